"""One run: requests come, an admission sends them to engines, and time jumps from event to event.

A client that has patience leaves when it had no first token for so long. Where the engine already computes its prompt,
that takes until the end of the step that runs; one whose first token comes with that step stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.virtual_loop import VirtualLoop
from sidecar.tools.step_model.engine import PlanEnd, StepEngine
from sidecar.tools.step_model.model import EngineModel
from sidecar.tools.step_model.queue import JobQueue, KeyQueue

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
