"""Virtual time: the same comparison without processes, clocks and a machine that could be busy.

The load, the engines' step model and prefix caches, the rules of `fleet_routers` and the sidecar's own decisions are
those of the real run; the time is a number. A run takes seconds, and repeats exactly. What it leaves out: the sidecar's
prefix table (here an LRU over the engines' own blocks, of the right size), the proxy, and all that breaks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.decisions import Decisions
from benchmarks.fleet.engines import EngineFigures
from benchmarks.fleet.load import load, tokens_of
from benchmarks.fleet.routers import TIERS
from benchmarks.fleet.runs import Figures, Run, quarters
from benchmarks.fleet.setting import Setting
from benchmarks.fleet_routers import RULES
from benchmarks.fleet_routers.prefix_blocks import PrefixBlocks
from benchmarks.fleet_routers.rule import Request, Rule
from sidecar.policy import compiler
from sidecar.policy.model import Policy
from sidecar.pools.calls import EngineView
from sidecar.pools.engines import NORMAL_SPEED
from sidecar.pools.ledger_rules import new_rules
from sidecar.scheduling.tickets import Ticket
from sidecar.tools.emulator.occupancy import Occupancy
from sidecar.tools.loadgen import Planned, Seen
from sidecar.tools.replay.trace import TraceRow
from sidecar.tools.simulate import load as simulated
from sidecar.tools.simulate import play as simulate
from sidecar.tools.simulate.virtual_loop import VirtualLoop
from sidecar.tools.step_model.model import EngineModel

POLICY = (
    f"engine: vllm\ncapacity: {{tokens: 1000000, requests: 1000}}\n{TIERS}endpoints: {{/v1/chat/completions: {{}}}}\n"
)


class Sent(simulated.Request):
    """One request from its arrival on."""

    __slots__ = ("planned", "routed")

    def __init__(self, planned: Planned) -> None:
        prompt, output = tokens_of(planned)
        self.planned = planned
        self.routed = Request(msgspec.json.decode(planned.body)["messages"][0]["content"].encode())
        super().__init__(TraceRow(0, planned.at_s, prompt, output), 0, "", self.routed.blocks)


class Router:
    """A router before the engines of a stage: see `simulate.play.Admission`. `held` is what each engine has."""

    def __init__(self, stage: simulate.SimulatedEngines) -> None:
        self.stage = stage
        self.held = [Occupancy() for _ in stage.engines]
        self._places = itertools.count()

    def arrives(self, sent: simulated.Request) -> None:
        """See `Admission`."""
        raise NotImplementedError

    def first_token(self, sent: simulated.Request) -> None:
        """See `Admission`."""

    def finished(self, sent: simulated.Request) -> None:
        """See `Admission`."""
        self.held[sent.engine or 0].add(requests=-1, tokens=-sent.tokens)

    def _nothing(self, sent: simulated.Request) -> None:
        """See `Admission`."""

    leaves = reached = removed = _nothing

    def send(self, sent: simulated.Request, engine: int) -> None:
        """Sends a request to an engine, first come, first served."""
        self.held[engine].add(requests=1, tokens=sent.tokens)
        sent.place = (), next(self._places)
        self.stage.send(sent, engine)


class Bound(Router):
    """A rule that binds each request when it arrives."""

    def __init__(self, stage: simulate.SimulatedEngines, rule: Rule) -> None:
        super().__init__(stage)
        self.rule = rule

    def arrives(self, sent: simulated.Request) -> None:
        """See `Router`."""
        assert isinstance(sent, Sent)
        self.send(sent, self.rule.choose(sent.routed))

    def first_token(self, sent: simulated.Request) -> None:
        """See `Router`."""
        assert isinstance(sent, Sent)
        self.rule.first_byte(sent.routed, sent.engine or 0)

    def finished(self, sent: simulated.Request) -> None:
        """See `Router`."""
        assert isinstance(sent, Sent)
        super().finished(sent)
        self.rule.ended(sent.routed, sent.engine or 0)


class Late(Router):
    """The sidecar's own decisions, which bind a request when its engine has room."""

    def __init__(self, stage: simulate.SimulatedEngines, setting: Setting, weight_percent: int) -> None:
        super().__init__(stage)
        self._ids = [f"engine-{number}#1" for number in range(setting.engines)]
        self._cached = [PrefixBlocks(setting.engine_tokens) for _ in self._ids]
        sizes = setting.engine_tokens, setting.sequences, setting.engine_prefill
        views = [EngineView(name, *sizes, NORMAL_SPEED, is_reachable=True) for name in self._ids]
        self._decisions = Decisions(new_rules(_policy(), weight_percent), views)
        self._numbers = itertools.count()
        self._sent: dict[str, simulated.Request] = {}
        self._running: dict[simulated.Request, str] = {}

    def arrives(self, sent: simulated.Request) -> None:
        """See `Router`."""
        number, now_us = next(self._numbers), self.stage.loop.now_us
        found = [cached.hit_tokens(sent.blocks, sent.prompt) for cached in self._cached]
        hits = sorted(((one, hit) for one, hit in zip(self._ids, found, strict=True) if hit), key=lambda it: -it[1])
        self._sent[str(number)] = sent
        ticket = Ticket(str(number), 0, "", sent.tokens, 1, sent.prompt, arrived_us=now_us, number=number)
        ticket.hits = dict(hits[:8])
        self._decisions.submit(ticket)
        self._decide()

    def first_token(self, sent: simulated.Request) -> None:
        """See `Router`."""
        self._decisions.first_byte(self._running[sent], self.stage.loop.now_us)
        self._decide()

    def finished(self, sent: simulated.Request) -> None:
        """See `Router`."""
        super().finished(sent)
        self._decisions.settle(self._running.pop(sent), self.stage.loop.now_us)
        self._decide()

    def _decide(self) -> None:
        for lease in self._decisions.decide(self.stage.loop.now_us).admitted:
            sent = self._sent.pop(lease.ticket.id)
            self._running[sent] = lease.ticket.id
            engine = self._ids.index(lease.engine)
            self._cached[engine].add(sent.blocks)
            self.send(sent, engine)


def _policy() -> Policy:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "policy.yaml").write_text(POLICY)
        return compiler.load(folder)


def model_of(setting: Setting) -> EngineModel:
    """One of the engines."""
    us = 1e6 / setting.compression
    return EngineModel(
        name="emulated",
        max_sequences=setting.sequences,
        chunk_tokens=round(setting.prefill_tokens_per_step * setting.scale),
        kv_tokens=setting.engine_tokens,
        block_tokens=setting.block_tokens,
        step_us=setting.step_s * us,
        step_us_per_sequence=setting.step_s_per_sequence * us,
        step_us_per_prefill_token=setting.step_s_per_prefill_token * us / setting.scale,
    )


def play(name: str, setting: Setting, weight_percent: int = 200) -> Run:
    """One run."""
    loop = VirtualLoop()
    stage = simulate.SimulatedEngines(model_of(setting), setting.engines, loop, preempts=False, admits_ahead=True)
    rule = RULES.get(name)
    router = (
        Late(stage, setting, weight_percent)
        if rule is None
        else Bound(stage, rule(setting.engines, setting.engine_tokens))
    )
    requests = [Sent(planned) for planned in load(setting)]
    with loop.running():
        simulate.play(requests, stage, router)
    seen = [_seen(one) for one in requests]
    return Run(
        router=name,
        seed=setting.seed,
        figures=Figures.of(seen[int(len(seen) * setting.warm_up) :], setting),
        quarters=quarters(seen, setting),
        engines=[_figures(number, router, requests) for number in range(setting.engines)],
        use={"router": 0.0, "engines": 0.0, "load": 0.0},
        idle=1.0,
        stalled_s=0.0,
        seen=seen,
    )


def _seen(sent: Sent) -> Seen:
    error = sent.refusal and "it was never served"
    first_s = None if sent.first_us is None else sent.first_us / 1e6
    end_s = sent.planned.at_s if error or sent.end_us is None else sent.end_us / 1e6
    return Seen(
        sent.planned, sent.planned.at_s, first_s, end_s, 200, error, sent.emitted, sent.prompt, {}, None, 0,
        sent.cached_tokens,
    )  # fmt: skip


def _figures(number: int, router: Router, requests: Sequence[Sent]) -> EngineFigures:
    """As the real engine counts them. What is un-prefilled is not counted here."""
    engine, most = router.stage.engines[number], router.held[number]
    finished = sum(one.engine == number and one.refusal is None for one in requests)
    return EngineFigures(
        most.most_requests, most.most_tokens, 0, engine.cache.queried_tokens, engine.cache.hit_tokens,
        engine.busy_us / 1e6, 0.0, finished,
    )  # fmt: skip
