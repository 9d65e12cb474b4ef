"""Leases for plain threads: `with admission.lease(tier="batch", tokens=4_000) as lease`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from sidecar.leases.admission import Admission
from sidecar.leases.held_lease import HeldLease
from sidecar.leases.lease_request import LeaseRequest

T = TypeVar("T")
_CLOSED = "the admission was closed: connect again"
_END_WITHIN_S = 5.0
"""For calls that are canceled at the loop's end."""


class LoopThread:
    """An event loop in a thread of its own, which ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._process = os.getpid()
        self._is_ending = False
        self._lock = threading.Lock()
        """Of `_is_ending`: a call that the loop took just before its end has an end, too."""
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """True if the thread is in this process: a fork does not take it along."""
        return os.getpid() == self._process

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine in that loop. What interrupts the caller cancels it."""
        self._refuse_other_callers()
        with self._lock:
            if self._is_ending:
                raise RuntimeError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def say(self, do: Callable[[], None]) -> None:
        """Calls a function in that loop, soon. Nothing happens where the loop has ended."""
        if self.is_here:
            with contextlib.suppress(RuntimeError):  # it is closed, and may have been in this moment
                self._loop.call_soon_threadsafe(do)

    def stop(self) -> None:
        """Ends the loop, and what runs in it."""
        with self._lock:
            self._is_ending = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left, timeout=_END_WITHIN_S))

    def _refuse_other_callers(self) -> None:
        if not self.is_here:
            raise RuntimeError(
                "this process was forked from the one that connected: connect in each process, after the fork "
                "(with Celery in the signal `worker_process_init`)"
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError("called from a callback in the thread of the admission: call it from another thread")


class ThreadAdmission:
    """`Admission` for plain threads, any number of them. `sidecar.connect_threads` makes it.

    Everything of the pool runs in a thread of its own, with an event loop: a thread that computes for long costs no
    heartbeat.
    """

    def __init__(
        self, admission: Admission, thread: LoopThread, end: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        self._admission = admission
        self._thread = thread
        self._end = end
        self._is_closed = False
        atexit.register(self.close)

    def __enter__(self) -> ThreadAdmission:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives all leases back, and leaves the pool. Harmless when repeated, and in a process that was forked."""
        if self._is_closed or not self._thread.is_here:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        try:
            self._thread.call(self._end)
        finally:
            self._thread.stop()

    def lease(
        self,
        *,
        tokens: int,
        tier: str | None = None,
        tenant: str | None = None,
        requests: int = 1,
        prompt_tokens: int = 0,
        max_wait_s: float | None = None,
        when_preempted: Callable[[], None] | None = None,
        model: str | None = None,
        deadline: datetime | timedelta | None = None,
    ) -> ThreadLeaseBlock:
        """See `Admission.lease`, for a `with` in any thread.

        A thread cannot be canceled. So the lease is preempted only with `when_preempted`, which is called once, in
        another thread, and should make the block end soon: it may close the connection to the engine.
        """
        is_preemptible = when_preempted is not None
        asked = LeaseRequest(tier, tokens, tenant, requests, prompt_tokens, max_wait_s, is_preemptible, model, deadline)
        return ThreadLeaseBlock(self._admission.held_lease(asked), self._thread, when_preempted)


class ThreadLeaseBlock:
    """The block in which a thread holds a lease. It is used once."""

    def __init__(self, held: HeldLease, thread: LoopThread, when_preempted: Callable[[], None] | None) -> None:
        self._held = held
        self._thread = thread
        self._when_preempted = when_preempted
        self._uses = count()  # two threads never get the same number

    def __enter__(self) -> HeldLease:
        if next(self._uses):
            raise RuntimeError("the lease was used already: make one for each block")
        preempted = None if self._when_preempted is None else self._preempted
        try:
            self._thread.call(partial(self._held.acquire, preempted))
            return self._held
        except BaseException as error:  # it may have been admitted in the moment of an interruption
            self._thread.say(partial(self._held.release, error))
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not waited for: what interrupts this thread now would leave the lease. Its next call comes after it.
        self._thread.say(partial(self._held.release, error))

    def _preempted(self) -> None:
        """Called in the event loop: the holder's function may block, and must not hold the loop up."""
        assert self._when_preempted is not None
        threading.Thread(target=self._when_preempted, name="admission preemption", daemon=True).start()
