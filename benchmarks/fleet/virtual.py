"""Virtual time: the same comparison without processes, clocks and a machine that could be busy.

The load, the engines' step model and prefix caches, the rules of `fleet_routers` and the sidecar's own decisions are
those of the real run; the time is a number. A run takes seconds, and repeats exactly. What it leaves out: the sidecar's
prefix table (here an LRU over the engines' own blocks, of the right size), the proxy, and all that breaks.
"""

from __future__ import annotations

import heapq
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

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
from sidecar.pools.ledger_rules import rules_of
from sidecar.scheduling.tickets import Ticket
from sidecar.tools.emulator.kv_cache import KvCache
from sidecar.tools.emulator.occupancy import Occupancy
from sidecar.tools.emulator.scheduler import Rank, RunningBatch, StepModel, WaitingQueue, first_come
from sidecar.tools.emulator.scheduler import Sequence as Running
from sidecar.tools.loadgen import Planned, Seen

POLICY = (
    f"engine: vllm\ncapacity: {{tokens: 1000000, requests: 1000}}\n{TIERS}endpoints: {{/v1/chat/completions: {{}}}}\n"
)
_MICROSECONDS = 1e6


class Sent(Running):
    """One request from its arrival on; in an engine it is a running sequence."""

    __slots__ = ("engine", "first_s", "planned", "request")

    def __init__(self, planned: Planned) -> None:
        prompt, output = tokens_of(planned)
        self.planned = planned
        self.request = Request(msgspec.json.decode(planned.body)["messages"][0]["content"].encode())
        super().__init__(prompt, output, self.request.blocks)
        self.engine = -1
        self.first_s: float | None = None


class Router(Protocol):
    """A router: each call returns the requests that are sent now, with their engines."""

    def arrives(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """A request came."""

    def first_byte(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """An engine has prefilled it."""

    def ended(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """Its answer is complete."""


class Bound:
    """A rule that binds each request when it arrives."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def arrives(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        del now_s
        return [(sent, self.rule.choose(sent.request))]

    def first_byte(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        del now_s
        self.rule.first_byte(sent.request, sent.engine)
        return []

    def ended(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        del now_s
        self.rule.ended(sent.request, sent.engine)
        return []


class Late:
    """The sidecar's own decisions, which bind a request when its engine has room."""

    def __init__(self, setting: Setting, weight_percent: int) -> None:
        self._ids = [f"engine-{number}#1" for number in range(setting.engines)]
        self._cached = [PrefixBlocks(setting.engine_tokens) for _ in self._ids]
        sizes = setting.engine_tokens, setting.sequences, setting.engine_prefill
        views = [EngineView(name, *sizes, NORMAL_SPEED, is_reachable=True) for name in self._ids]
        self._decisions = Decisions(rules_of(_policy(), weight_percent), views)
        self._numbers = itertools.count()
        self._sent: dict[str, Sent] = {}
        self._running: dict[Sent, str] = {}

    def arrives(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        number, prompt = next(self._numbers), sent.prompt_tokens
        found = [cached.hit_tokens(sent.request.blocks, prompt) for cached in self._cached]
        hits = sorted(((one, hit) for one, hit in zip(self._ids, found, strict=True) if hit), key=lambda it: -it[1])
        self._sent[str(number)] = sent
        ticket = Ticket(str(number), 0, "", sent.tokens, 1, prompt, arrived_us=_us(now_s), number=number)
        ticket.hits = dict(hits[:8])
        self._decisions.submit(ticket)
        return self._decided(now_s)

    def first_byte(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        self._decisions.first_byte(self._running[sent], _us(now_s))
        return self._decided(now_s)

    def ended(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        self._decisions.settle(self._running.pop(sent), _us(now_s))
        return self._decided(now_s)

    def _decided(self, now_s: float) -> Iterable[tuple[Sent, int]]:
        admitted = []
        for lease in self._decisions.decide(_us(now_s)).admitted:
            sent = self._sent.pop(lease.ticket.id)
            self._running[sent] = lease.ticket.id
            engine = self._ids.index(lease.engine)
            self._cached[engine].add(sent.request.blocks)
            admitted.append((sent, engine))
        return admitted


def _us(now_s: float) -> int:
    return round(now_s * _MICROSECONDS)


def _policy() -> Policy:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "policy.yaml").write_text(POLICY)
        return compiler.load(folder)


def router_of(name: str, setting: Setting, weight_percent: int) -> Router:
    """The router of that name."""
    if name in RULES:
        return Bound(RULES[name](setting.engines, setting.engine_tokens))
    return Late(setting, weight_percent)


class EmulatedEngine:
    """One engine: its queue, its batch, and what it held."""

    def __init__(self, setting: Setting) -> None:
        ms_scale = setting.compression
        model = StepModel(
            max_num_seqs=setting.sequences,
            prefill_tokens_per_step=round(setting.prefill_tokens_per_step * setting.scale),
            kv_tokens=setting.engine_tokens,
            step_s=setting.step_s / ms_scale,
            step_s_per_seq=setting.step_s_per_sequence / ms_scale,
            step_s_per_prefill_token=setting.step_s_per_prefill_token / ms_scale / setting.scale,
        )
        blocks = setting.engine_tokens // setting.block_tokens * setting.block_tokens
        self.cache = KvCache(blocks, setting.block_tokens, caches_prefixes=True)
        self.batch: RunningBatch[Sent] = RunningBatch(model, self.cache)
        self.queue: WaitingQueue[Sent] = WaitingQueue(first_come)
        self.occupancy = Occupancy()
        self.is_stepping = False
        self.computed_s = 0.0
        self.finished = 0

    def figures(self) -> EngineFigures:
        """As the real one counts them. What is un-prefilled is not counted here."""
        most = self.occupancy
        cache = self.cache
        return EngineFigures(
            most.most_requests, most.most_tokens, 0, cache.queried_tokens, cache.hit_tokens, self.computed_s, 0.0,
            self.finished,
        )  # fmt: skip


def play(name: str, setting: Setting, weight_percent: int = 200) -> Run:
    """One run."""
    router = router_of(name, setting, weight_percent)
    engines = [EmulatedEngine(setting) for _ in range(setting.engines)]
    requests = [Sent(planned) for planned in load(setting)]
    order = itertools.count()
    events: list[tuple[float, int, Sent | EmulatedEngine]] = [(one.planned.at_s, next(order), one) for one in requests]
    ends: dict[Sent, float] = {}
    heapq.heapify(events)

    def send(admitted: Iterable[tuple[Sent, int]]) -> None:
        for sent, number in admitted:
            sent.engine = number
            engine = engines[number]
            engine.queue.push(sent, Rank(), now_s)
            engine.occupancy.add(requests=1, tokens=sent.tokens)
            step(engine)

    def step(engine: EmulatedEngine) -> None:
        if not engine.is_stepping and (len(engine.batch) or len(engine.queue)):
            engine.is_stepping = True
            duration_s = engine.batch.begin(engine.queue).duration_s
            engine.computed_s += duration_s
            heapq.heappush(events, (now_s + duration_s, next(order), engine))

    while events:
        now_s, _, what = heapq.heappop(events)
        if isinstance(what, Sent):
            send(router.arrives(what, now_s))
            continue
        output = what.batch.end()
        what.is_stepping = False
        for sent in output.emitted:
            if sent.first_s is None:
                sent.first_s = now_s
                send(router.first_byte(sent, now_s))
        for sent in output.finished:
            ends[sent] = now_s
            what.finished += 1
            what.occupancy.add(requests=-1, tokens=-sent.tokens)
            send(router.ended(sent, now_s))
        step(what)
    return _run(name, setting, [_seen(one, ends.get(one)) for one in requests], engines)


def _seen(sent: Sent, end_s: float | None) -> Seen:
    error = None if end_s is not None else "it was never served"
    return Seen(
        sent.planned, sent.planned.at_s, sent.first_s, end_s or sent.planned.at_s, 200, error, sent.emitted,
        sent.prompt_tokens, {}, None, 0, sent.cached_tokens,
    )  # fmt: skip


def _run(name: str, setting: Setting, seen: Sequence[Seen], engines: Sequence[EmulatedEngine]) -> Run:
    return Run(
        router=name,
        seed=setting.seed,
        figures=Figures.of(seen[int(len(seen) * setting.warm_up) :], setting),
        quarters=quarters(seen, setting),
        engines=[engine.figures() for engine in engines],
        use={"router": 0.0, "engines": 0.0, "load": 0.0},
        idle=1.0,
        stalled_s=0.0,
        seen=seen,
    )
