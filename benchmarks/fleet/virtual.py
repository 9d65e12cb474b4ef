"""Virtual time: the same comparison without processes, clocks and a machine that could be busy.

The load, the engines' step model and prefix caches, the rules of `fleet_routers` and the sidecar's own scheduler are
those of the real run; the time is a number. A run takes seconds, and repeats exactly. What it leaves out: the sidecar's
prefix table (here an LRU over the engines' own blocks, of the right size), the proxy, and all that breaks.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks.fleet.engines import EngineFigures
from benchmarks.fleet.load import load, tokens_of
from benchmarks.fleet.routers import GREEDY, OURS, TIERS, NotStarted
from benchmarks.fleet.runs import Figures, Run, quarters
from benchmarks.fleet.setting import Setting
from benchmarks.fleet_routers import RULES
from benchmarks.fleet_routers.prefix_blocks import PrefixBlocks
from benchmarks.fleet_routers.rule import Request, Rule
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
    """The sidecar's scheduler, which binds a request when its engine has room. Raises NotStarted where it has none."""

    def __init__(self, setting: Setting, weight_percent: int) -> None:
        try:
            scheduler: Any = importlib.import_module("sidecar.scheduling.fleet_scheduler")
            placement: Any = importlib.import_module("sidecar.scheduling.placement")
        except ImportError as error:
            raise NotStarted(f"{OURS} cannot place requests yet: {error}") from None
        self._scheduler = scheduler.FleetScheduler(_policy().rules_of, weight_percent)
        self._ids = [f"engine-{number}#1" for number in range(setting.engines)]
        self._cached = [PrefixBlocks(setting.engine_tokens) for _ in self._ids]
        offers = [
            placement.EngineOffer(name, setting.engine_tokens, setting.sequences, setting.engine_prefill)
            for name in self._ids
        ]
        self._scheduler.set_engines(offers, 0)
        self._names = map(str, itertools.count())
        self._waiting: dict[str, Sent] = {}
        self._running: dict[Sent, str] = {}

    def arrives(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        name, tokens = next(self._names), sent.prompt_tokens
        found = [cached.hit_tokens(sent.request.blocks, tokens) for cached in self._cached]
        hits = sorted(((one, hit) for one, hit in zip(self._ids, found, strict=True) if hit), key=lambda it: -it[1])
        self._waiting[name] = sent
        self._scheduler.submit(
            name, tier=0, tokens=sent.tokens, now_us=_us(now_s), prompt=tokens, hits=hits[:8], tenant="", weight=1
        )
        return self._dispatch(now_s)

    def first_byte(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        self._scheduler.prefilled(self._running[sent], _us(now_s))
        return self._dispatch(now_s)

    def ended(self, sent: Sent, now_s: float) -> Iterable[tuple[Sent, int]]:
        """See `Router`."""
        self._scheduler.settle(self._running.pop(sent), _us(now_s))
        return self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> Iterable[tuple[Sent, int]]:
        admitted = []
        for admission in self._scheduler.dispatch(_us(now_s)):
            sent = self._waiting.pop(admission.ticket.id)
            self._running[sent] = admission.ticket.id
            engine = self._ids.index(admission.engine)
            self._cached[engine].add(sent.request.blocks)
            admitted.append((sent, engine))
        return admitted


def _us(now_s: float) -> int:
    return round(now_s * _MICROSECONDS)


def _policy() -> Any:
    compiler: Any = importlib.import_module("sidecar.policy.compiler")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "policy.yaml").write_text(POLICY)
        return compiler.load(folder)


def router_of(name: str, setting: Setting, weight_percent: int) -> Router:
    """The router of that name. `ours-greedy` changes the process for good. Raises NotStarted."""
    if name in RULES:
        return Bound(RULES[name](setting.engines, setting.engine_tokens))
    if name == GREEDY:
        from benchmarks.fleet.greedy import make_greedy

        try:
            make_greedy()
        except ImportError as error:
            raise NotStarted(f"{GREEDY} cannot place requests yet: {error}") from None
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
    """One run. Raises NotStarted."""
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
