"""One run: requests come, an admission sends them to engines, and time jumps from event to event.

A client that has patience leaves when it had no first token for so long. Where the engine already computes its prompt,
that takes until the end of the step that runs; one whose first token comes with that step stays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from sidecar.tools.simulate.load import Request
from sidecar.tools.step_model.engine import PlanEnd, StepEngine
from sidecar.tools.step_model.model import EngineModel
from sidecar.tools.step_model.queue import JobQueue, KeyQueue

# -- Virtual time: the part of an event loop that pools use, on a clock that the simulation sets.


class VirtualLoop(asyncio.BaseEventLoop):
    """Callbacks and timers by `now_us`. It never runs by itself: `set_time` and `run_ready` do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self._soon: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._count = 0

    def time(self) -> float:
        """See `AbstractEventLoop.time`."""
        return self.now_us / 1e6

    def call_soon(  # type: ignore[override]  # its parameters of variable types need Python 3.11
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `AbstractEventLoop.call_soon`."""
        handle = asyncio.Handle(callback, list(args), self, context)
        self._soon.append(handle)
        return handle

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `AbstractEventLoop.call_later`. To the microsecond."""
        at_us = self.now_us + max(0, round(delay * 1e6))
        handle = asyncio.TimerHandle(at_us / 1e6, callback, list(args), self, context)
        self._count += 1
        heappush(self._timers, (at_us, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A timer that was canceled goes when it would be the next."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See `AbstractEventLoop.call_exception_handler`. A defect ends the simulation."""
        if "exception" in context:
            raise context["exception"]

    @property
    def next_us(self) -> int | None:
        """The time of the next timer, None without one."""
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run_ready(self) -> None:
        """Runs what is due at `now_us`, and what that brings, until nothing is left of it."""
        while True:
            next_us = self.next_us
            if next_us is not None and next_us <= self.now_us:
                self._soon.append(heappop(self._timers)[2])
            if not self._soon:
                return
            while self._soon:
                handle = self._soon.popleft()
                if not handle.cancelled():
                    handle._run()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Is the running loop of this thread in the block, and closed after it. What still waits then is canceled."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
            for task in asyncio.all_tasks(self):
                task.cancel()
            self.run_ready()
        finally:
            asyncio._set_running_loop(outer)
            self.close()


ABANDONED = "abandoned"
"""The refusal of a request whose client has left."""


class SimulatedAdmission(Protocol):
    """Admission before the engines: the product's pool, or a baseline."""

    def arrives(self, request: Request) -> None:
        """A request is offered."""

    def leaves(self, request: Request) -> None:
        """Its client leaves, before its first token."""

    def first_token(self, request: Request) -> None:
        """Its first token came."""

    def reached(self, request: Request) -> None:
        """It has the length at which the admission asked for it, or runs again after a preemption."""

    def finished(self, request: Request) -> None:
        """Its answer is complete."""

    def removed(self, request: Request) -> None:
        """Its engine has ended it, because the admission ended it or its client has left."""


class Played(NamedTuple):
    """A run that is over. Every request of `offered` has an `end_us`."""

    offered: Sequence[Request]
    engines: Sequence[StepEngine[Request]]
    end_us: int


class SimulatedEngines:
    """The engines and the clock of one run, as its admission sees them."""

    def __init__(
        self,
        model: EngineModel,
        engines: int,
        loop: VirtualLoop,
        queue: Callable[[], JobQueue[Request]] = KeyQueue,
    ) -> None:
        self.model = model
        self.loop = loop
        self.engines = [StepEngine(model, queue()) for _ in range(engines)]

    def send(self, request: Request, engine: int) -> None:
        """Sends a request to an engine."""
        request.engine = engine
        self.engines[engine].push(request, self.loop.now_us)

    def abort(self, request: Request) -> None:
        """Ends a request in its engine, with the step that runs."""
        assert request.engine is not None
        self.engines[request.engine].remove(request, self.loop.now_us)

    def refuse(self, request: Request, why: str) -> None:
        """A request gets no answer."""
        request.refusal, request.end_us = why, self.loop.now_us


class _Patience:
    """The clients that wait for a first token, in the order in which they would leave."""

    def __init__(self, offered: Sequence[Request], patience_us: int | None) -> None:
        self._offered = offered
        self._patience_us = patience_us
        self._next = 0

    def due_us(self, coming: int) -> int | None:
        """When the next one leaves of those before the request number `coming`; None where none does."""
        if self._patience_us is None:
            return None
        while self._next < coming:
            one = self._offered[self._next]
            if one.first_us is None and one.end_us is None:
                return one.at_us + self._patience_us
            self._next += 1
        return None

    def leaving(self, coming: int, now_us: int) -> Iterator[Request]:
        """Requests that leave now, once each."""
        while (due_us := self.due_us(coming)) is not None and due_us <= now_us:
            self._next += 1
            yield self._offered[self._next - 1]


def play(
    offered: Sequence[Request], stage: SimulatedEngines, admission: SimulatedAdmission, patience_us: int | None = None
) -> Played:
    """Plays all requests to their ends. One that still waits when nothing more can happen gets no answer.

    Nor does one that no engine can hold to its end, whoever admits: it would be preempted again and again.
    """
    loop, engines, coming = stage.loop, stage.engines, 0
    patience = _Patience(offered, patience_us)
    while True:
        times = [engine.due_us for engine in engines if engine.due_us is not None]
        if coming < len(offered):
            times.append(offered[coming].at_us)
        if (leaves_us := patience.due_us(coming)) is not None:
            times.append(leaves_us)
        busy = any(map(len, engines)) or coming < len(offered)
        if (timer_us := loop.next_us) is not None and (busy or _waits(offered)):
            times.append(timer_us)
        if not times:
            break
        loop.now_us = max(loop.now_us, min(times))
        for engine in engines:
            if engine.due_us is not None and engine.due_us <= loop.now_us:
                _tell(engine.advance(), admission, loop.now_us)
        loop.run_ready()
        for request in patience.leaving(coming, loop.now_us):
            admission.leaves(request)
            loop.run_ready()
        while coming < len(offered) and offered[coming].at_us <= loop.now_us:
            request = offered[coming]
            if engines[0].cache.fits(request.prompt + request.output):
                admission.arrives(request)
            else:
                stage.refuse(request, "request_too_large")
            coming += 1
        loop.run_ready()
        for engine in engines:
            if engine.due_us is None:
                _tell(engine.leave_idle(), admission, loop.now_us)
                engine.begin(loop.now_us)
    for one in offered:
        if one.end_us is None:
            stage.refuse(one, "never_admitted")
    return Played(offered, engines, loop.now_us)


def _waits(offered: Sequence[Request]) -> bool:
    return any(one.end_us is None for one in offered)


def _tell(found: PlanEnd[Request], admission: SimulatedAdmission, now_us: int) -> None:
    for one in found.first:
        one.first_us, one.has_left = now_us, False
        admission.first_token(one)
    for one in (*found.resumed, *found.reached):  # a length that was asked for before a preemption is forgotten
        admission.reached(one)
    for one in found.finished:
        one.end_us = now_us
        admission.finished(one)
    for one in found.removed:
        admission.removed(one)
