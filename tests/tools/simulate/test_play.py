"""What an admission hears of a run: also of a request that the engine has preempted."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

from sidecar.tools.replay.trace import TraceRow
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import SimulatedEngines, VirtualLoop, play
from sidecar.tools.step_model.model import EngineModel

EVERY = 10
"""Tokens after which it wants to hear of a request again."""


class Everyone:
    """An admission that sends each request on at once, and looks at its length again and again."""

    def __init__(self, engines: SimulatedEngines) -> None:
        self.engines = engines
        self.seen: dict[Request, list[int]] = {}

    def arrives(self, request: Request) -> None:
        self.seen[request] = []
        request.place = (), len(self.seen)
        self.engines.send(request, 0)

    def leaves(self, request: Request) -> None:
        raise AssertionError("its client has all the patience there is")

    def first_token(self, request: Request) -> None:
        self.reached(request)

    def reached(self, request: Request) -> None:
        engine = self.engines.engines[0]
        self.seen[request].append(length := engine.length(request))
        engine.report_at(request, length + EVERY)

    def finished(self, request: Request) -> None:
        pass

    def removed(self, request: Request) -> None:
        raise AssertionError("nobody has asked for it")


def test_a_request_that_the_engine_has_preempted_is_looked_at_again() -> None:
    model = EngineModel(name="small", step_us=1000, kv_tokens=128, block_tokens=16)
    rows = [TraceRow(line=line, at_s=0.0, input_tokens=16, output_tokens=90) for line in (1, 2)]
    offered = [Request(row, 0, "a", ()) for row in rows]
    with closing(VirtualLoop()) as loop:
        engines = SimulatedEngines(model, 1, loop)
        admission = Everyone(engines)
        play(offered, engines, admission)
    assert sorted(one.preemptions > 0 for one in offered) == [False, True]
    for one in offered:
        seen = [0, *admission.seen[one], one.output]
        assert max(after - before for before, after in pairwise(seen)) <= EVERY, seen
