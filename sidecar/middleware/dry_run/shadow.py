"""Shadow request: it waits and holds in the pool as an observed request would have when enforcing.

    ENTERING -> WAITING -> HOLDING -> OVER        (each may also end in OVER: refused, disconnected, stopped)

The request itself runs meanwhile, or is over. The shadow is behind its request by its own queue wait, so all that it
needs to know of the request has happened by then. The module `request` lists the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from sidecar.errors import AdmissionError, QueueTimeout
from sidecar.events import Verdict
from sidecar.middleware.intake import SizedRequest, count_tokens
from sidecar.middleware.policy_snapshot import PolicySnapshot
from sidecar.middleware.wait import enter_pool
from sidecar.pools import Grant, Lease, Pool

LONGEST_WAIT_S = 3600.0
"""The longest wait of a shadow where its tier has none."""
CLIENT_LEFT, WAITED_TOO_LONG = "client_left", "waited_too_long"


class ShadowResult(NamedTuple):
    """The result of a shadow request. `code` is None where it was admitted; `wait` where it never waited."""

    verdict: Verdict
    code: str | None
    wait: Grant | None


class ShadowRequest:
    """The shadow of one request. `report` is called once, with the result.

    Its request calls `begun` with the first byte of the response, then `disconnected` or `ended`. Until then an
    admitted shadow holds its lease. `run` is called once, in a task of its own.
    """

    __slots__ = (
        "_began_us", "_begun", "_disconnected", "_ended", "_holds", "_pool", "_preempted", "_report", "_request",
        "_snapshot", "_used",
    )  # fmt: skip

    def __init__(
        self, pool: Pool, snapshot: PolicySnapshot, request: SizedRequest, report: Callable[[ShadowResult], None]
    ) -> None:
        self._pool = pool
        self._snapshot = snapshot
        self._request = request
        self._report: Callable[[ShadowResult], None] | None = report
        self._used: int | None = None
        self._began_us = pool.now_us()
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[int] = loop.create_future()
        self._disconnected: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._preempted: asyncio.Future[None] = loop.create_future()
        self._holds = False

    @property
    def is_real(self) -> bool:
        """Whether it holds room that its request uses at the engine at this moment."""
        return self._holds and not self._ended.done()

    def begun(self) -> None:
        """The first byte of the response goes out."""
        if not self._begun.done():
            self._begun.set_result(self._pool.now_us() - self._began_us)

    def disconnected(self) -> None:
        """The client disconnected before the first byte."""
        if not self._disconnected.done():
            self._disconnected.set_result(None)

    def ended(self, used_tokens: int | None = None) -> None:
        """The request is over: the shadow holds for as long as it took. `used_tokens` corrects its tenant's charge."""
        self.begun()
        self._used = used_tokens if self._used is None else self._used
        if not self._ended.done():
            self._ended.set_result(self._pool.now_us() - self._began_us)

    async def run(self) -> None:
        """Waits and holds in the pool. Canceled, it leaves nothing there."""
        try:
            if self._snapshot.estimator.counter is not None:
                await count_tokens(self._request, self._snapshot)
            lease = await enter_pool(self._pool, self._request, keeps_body=False)
            await self._pass_through(lease)
        except AdmissionError as refusal:
            self._end(Verdict.REFUSED, refusal.code, None)

    def give_up(self, code: str) -> None:
        """The shadow ends early. Where its result is not known yet, it is unknown."""
        self._end(Verdict.UNKNOWN, code, None)

    async def _pass_through(self, lease: Lease) -> None:
        request, policy = self._request, self._snapshot.policy
        try:
            is_preemptible = request.is_preemptible(policy)
            if is_preemptible:
                lease.on_preempt = self._preempt
            grant = lease.grant or await self._wait(lease, lease.wait(), request.longest_wait_s(policy))
            self._holds = grant is not None
            while is_preemptible and grant is not None and await self._is_preempted(lease, grant):
                self._holds, self._preempted = False, asyncio.get_running_loop().create_future()
                # As when enforcing: only the client may limit the second wait.
                grant = await self._wait(lease, lease.requeue(), request.max_wait_s)
                self._holds = grant is not None
            if grant is not None:
                self._end(Verdict.ADMITTED, None, grant)
                await self._hold(grant)
        finally:
            if not lease.settle(self._used):
                lease.leave()

    async def _wait(self, lease: Lease, granted: asyncio.Future[Grant], most_s: float | None) -> Grant | None:
        """The grant; None where it left the queue without one, which is reported."""
        at_most_s = LONGEST_WAIT_S if most_s is None else most_s
        await asyncio.wait((granted, self._disconnected), timeout=at_most_s, return_when=asyncio.FIRST_COMPLETED)
        if self._disconnected.done():
            wait = lease.grant if lease.settle(0) else await lease.leave()
            self._end(Verdict.ABANDONED, CLIENT_LEFT, wait)
        elif granted.done():
            return granted.result()
        elif most_s is None:
            self._end(Verdict.UNKNOWN, WAITED_TOO_LONG, await lease.leave())
        else:
            self._end(Verdict.REFUSED, QueueTimeout.code, await lease.leave())
        return None

    def _preempt(self) -> None:
        """Called by the pool: a more important request needs the room."""
        if not self._preempted.done():
            self._preempted.set_result(None)

    async def _is_preempted(self, lease: Lease, grant: Grant) -> bool:
        """Holds until the first byte would have gone out: whether the shadow was preempted before that."""
        await asyncio.wait((self._preempted, self._begun, self._disconnected), return_when=asyncio.FIRST_COMPLETED)
        if self._begun.done():
            await asyncio.wait((self._preempted,), timeout=self._left_s(grant, self._begun.result()))
        if self._preempted.done() and not self._disconnected.done():
            return True
        lease.keep()
        return False

    async def _hold(self, grant: Grant) -> None:
        """Holds the lease for as long as the request took, from the grant on; or until the client disconnects."""
        await asyncio.wait((self._ended, self._disconnected), return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            await asyncio.sleep(self._left_s(grant, self._ended.result()))

    def _left_s(self, grant: Grant, lasts_us: int) -> float:
        """The time until `lasts_us` after the grant, in seconds."""
        return max(0, grant.at_us + lasts_us - self._pool.now_us()) / 1e6

    def _end(self, verdict: Verdict, code: str | None, wait: Grant | None) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(ShadowResult(verdict, code, wait))


MOST_SHADOWS = 10_000
"""The most shadow requests that wait or hold; 10 KB each. It also bounds a tier's queue that has no bound."""
STOPPED, DEFECT = "stopped", "defect"

_log = logging.getLogger("sidecar.observing")


class ShadowRegistry:
    """All shadow requests of a controller: a bounded number, each in a task of its own, and none after `close`.

    `close` is called at the server's end, before the pool's.
    """

    def __init__(self, most: int = MOST_SHADOWS) -> None:
        self._most = most
        self._following: dict[asyncio.Task[None], ShadowRequest] = {}
        self._is_closed = False
        self._reported = False

    def __len__(self) -> int:
        return len(self._following)

    def follow(self, shadow: ShadowRequest) -> bool:
        """Runs a shadow request in the background. False where there are too many already."""
        if self._is_closed or len(self._following) >= self._most:
            return False
        task = asyncio.get_running_loop().create_task(shadow.run(), name="sidecar shadow")
        self._following[task] = shadow
        task.add_done_callback(self._over)
        return True

    def end_unreal(self) -> None:
        """Ends the shadows that wait, or hold for a request that is over: real requests must not wait for them."""
        for task, shadow in tuple(self._following.items()):
            if not shadow.is_real:
                task.cancel()

    async def close(self) -> None:
        """Ends all of them; each releases what it holds."""
        self._is_closed = True
        following = tuple(self._following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    def report(self, defect: BaseException) -> None:
        """Logs the first defect of the dry run; later ones would write a line for each request."""
        if not self._reported:
            self._reported = True
            _log.error(
                "a defect in the sidecar: a request was not observed, and passed; further ones are not logged",
                exc_info=defect,
                extra={"event": "observing_failed"},
            )

    def _over(self, task: asyncio.Task[None]) -> None:
        shadow = self._following.pop(task)
        defect = None if task.cancelled() else task.exception()
        shadow.give_up(STOPPED if defect is None else DEFECT)
        if defect is not None:
            self.report(defect)
