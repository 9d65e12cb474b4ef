"""Several engines of a pool, and the models that have pools of their own: the keys of `engines` and `models`.

Durations are in seconds, `UNLIMITED` stands for no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import model_validator

from sidecar.engines.pages import Health
from sidecar.policy import fields as of
from sidecar.policy.capacity import Capacity
from sidecar.policy.cost import TokenCost
from sidecar.policy.declared import ReadAs, declared, key
from sidecar.policy.rules import UNLIMITED

MOST_ENGINES = 64
"""Engines of one pool. A decision looks at each of them (`scheduling.scheduler`)."""
PROMPT_CACHE_KEY = b"prompt_cache_key"
"""The source of a session that is a member of the body. Every other source is a header's name, in lower case."""


def offered(amount: int | None) -> int:
    """An engine's tokens or requests, as its pool counts them. What an engine says of itself may be any number."""
    return UNLIMITED if amount is None else min(amount, of.MOST_OF_AN_ENGINE)


SOURCES = ("static", "file", "dns", "mounted")
ONE_ENGINE = "[{name: a, url: http://a:8000}]"


@dataclass(frozen=True, slots=True)
@declared
class EngineAddress:
    """One engine: an instance of the engine that the policy names."""

    name: of.EngineName = key(..., "Its name, unique among the engines.", "a")
    url: of.EngineUrl = key(..., "Its address, also with a base path.", "http://a:8000")
    capacity: Annotated[Capacity, ReadAs(Capacity | None)] = key(
        None, "Its size. Default: `capacity` of `engines`.", {"tokens": "400k", "requests": 160}
    )
    prefill: Annotated[int, ReadAs(of.Prefill | None)] = key(
        None, "Un-prefilled prompt tokens it may have at once. Default: `prefill` of `engines`.", "16k"
    )
    speed: of.Speed = key(
        1,  # replicas of one deployment are alike
        "Its speed against the other engines: one of 0.5 counts as twice as busy.",
        0.5,
    )

    def beside(self, capacity: Capacity, prefill: int) -> EngineAddress:
        """The engine with the capacity and the `prefill` of all engines, where it writes none of its own."""
        own_prefill: int | None = self.prefill
        return replace(
            self, capacity=self.capacity or capacity, prefill=prefill if own_prefill is None else own_prefill
        )


class Discovery(str, Enum):
    """Source of the engines: their addresses, or the processes that the middleware is mounted in."""

    STATIC = "static"
    FILE = "file"
    DNS = "dns"
    MOUNTED = "mounted"


@dataclass(frozen=True, slots=True)
@declared
class DnsService:
    """A name whose records are the engines, such as that of a headless service in Kubernetes."""

    service: of.Service = key(
        ...,
        "A host and a port for its A and AAAA records, or the name of SRV records.",
        "vllm.default.svc:8000",
        name="name",
    )
    refresh_s: of.Period = key(
        "5s",  # the time to live that CoreDNS gives a service's records
        "How often the name is looked up.",
        "30s",
    )

    @property
    def name(self) -> str:
        """The host, or the name of SRV records."""
        return self.service.host

    @property
    def port(self) -> int | None:
        """The port of A and AAAA records; None for SRV records, which have ports of their own."""
        return self.service.port

    def __str__(self) -> str:
        return str(self.service)


@dataclass(frozen=True, slots=True)
@declared
class Affinity:
    """How much a request is drawn to the engine that has computed its prefix before."""

    prefix: of.Flag = key(
        True,  # costs a hash for each 256 bytes of a prompt, and decides most of the prefix cache's hit rate
        "Whether hits of the engines' prefix caches are predicted from the prompt's bytes.",
    )
    weight_percent: of.Weight = key(
        3,  # 2 loses more than a seventh of the hits of cache-aware routing on a real trace: benchmarks/fleet
        "How many waiting prompt tokens one predicted token outweighs. With 0 the caches are ignored.",
        1.5,
    )
    session: of.SessionSources = key(
        # The prompt's bytes show a hit. A session's name only claims one, and a false claim overfills an engine.
        [],
        "Headers, or `prompt_cache_key`, that name a session: the engine that served it last is taken to have "
        "all of its prompt.",
        ["x-session-id", "prompt_cache_key"],
    )


@dataclass(frozen=True, slots=True)
@declared
class HealthBody:
    """The probes that say whether an engine is there. A refused connection takes an engine out at once."""

    path: of.UrlPath | None = key(
        None,  # `/health` of SGLang generates a token, so its page is another: each engine's class has its own
        "The page. Any answer but 502, 503 and 504 is life. Default: the engine's own.",
        "/health",
    )
    every_s: of.Period = key(
        "2s",  # a health page costs milliseconds
        "How often it is read; more often of an engine that is down.",
    )
    fail: of.PositiveCount = key(
        3,  # a busy engine may be slow to answer once; six seconds without a sign of life are another matter
        "Failures in a row, while nothing else comes from the engine, that take it out.",
    )
    rise: of.PositiveCount = key(
        2,  # an engine that crashes at its first request answers one probe before it
        "Answers in a row that bring it back.",
    )


def _health(body: HealthBody) -> Health:
    return Health(body.path or "", body.every_s, body.fail, body.rise)


@dataclass(frozen=True, slots=True)
@declared
class Replay:
    """Replays of requests whose engine broke, elsewhere. A request is never replayed after its answer's first byte."""

    before_first_byte: of.Replays = key(
        1,  # unseen by the client, and one engine more
        "How often one request is replayed: 1, or 0 for never. The next break is a 502.",
    )
    budget: of.Share = key(
        "10%",  # a replay computes a prompt twice: engines that all break must not get twice the work as well
        "The part of all admissions that may be replays; ten a minute always may.",
    )


_Listed = Annotated[list[EngineAddress], of.listed(ONE_ENGINE)]


def _engines(listed: list[EngineAddress] | None) -> tuple[EngineAddress, ...]:
    return tuple(listed or ())


@dataclass(frozen=True, slots=True, kw_only=True)
@declared
class FleetPolicy:
    """Several engines that share one pool. Each request enters the one that suits it best, when that one has room.

    One of `static`, `file`, `dns` and `mounted` says where they are. The pool's capacity is the sum of theirs.
    """

    SCHEMA: ClassVar[dict[str, Any]] = {"oneOf": [{"required": [source]} for source in SOURCES]}

    static: Annotated[tuple[EngineAddress, ...], ReadAs(_Listed | None, _engines)] = key(
        None, "The engines, one by one.", [{"name": "a", "url": "http://a:8000"}]
    )
    file: of.EngineListAt | None = key(
        None, "A file that lists them, relative to this one. It is followed.", "engines.yaml"
    )
    dns: DnsService | None = key(None, "A name whose records are the engines.", {"name": "vllm.default.svc:8000"})
    mounted: Annotated[bool, ReadAs(of.Mounted | None, bool)] = key(
        None, "Each process that mounts the middleware is an engine, which only its own requests enter.", True
    )
    capacity: Capacity = key(
        {"from": "engine"},  # engines know their size, and an engine that is started with another needs no change here
        "The size of each engine that has none of its own.",
        {"tokens": "400k", "requests": 160},
    )
    prefill: of.Prefill = key(
        # What engines compute in one step: vLLM (max_num_batched_tokens), SGLang (chunked_prefill_size) and
        # TensorRT-LLM (max_num_tokens) have 8192 as their default on large GPUs. With less, an engine idles between two
        # prompts; with more, prompts queue inside it, bound to it, in its order. Without a bound, an engine with room
        # in its KV cache takes every prompt when it comes: that is binding on arrival, which claims are there to avoid.
        "8k",
        "Prompt tokens, sent and without a first byte, that an engine may have at once. A larger "
        "prompt enters an engine that has none.",
        "16k",
    )
    affinity: Annotated[Affinity, of.DEFAULTS] = key(
        {}, "How much a request is drawn to the engine that has its prefix."
    )
    health: Annotated[Health, ReadAs(HealthBody, _health), of.DEFAULTS] = key({}, "The probes of each engine.")
    slow_start_s: of.Seconds = key(
        "60s",  # caches are empty, and the first requests of each shape compile kernels
        "How long an engine that comes back gets its capacity in ten steps.",
    )
    replay: Annotated[Replay, of.DEFAULTS] = key({}, "Replays of requests whose engine broke.")
    drain_timeout_s: of.PositiveSeconds = key(
        "10m",  # 12,000 tokens at 20 a second, so longer than almost any answer
        "How long a drain waits for the engine's last request. None is cut.",
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> FleetPolicy:
        written = [name for name in SOURCES if getattr(self, name)]
        if not written:
            raise ValueError(
                f"does not say where the engines are; write static, file, dns or mounted, such as static: {ONE_ENGINE}"
            )
        if len(written) > 1:
            raise ValueError(f"{' and '.join(written)} are both here; keep one of them")
        return self.listing(self.static)

    def listing(self, engines: Iterable[EngineAddress]) -> FleetPolicy:
        """The fleet with these engines; what they do not write of their own is that of the fleet."""
        return replace(self, static=tuple(engine.beside(self.capacity, self.prefill) for engine in engines))

    @property
    def discovery(self) -> Discovery:
        """Source of the engines."""
        if self.mounted:
            return Discovery.MOUNTED
        if self.file is not None:
            return Discovery.FILE
        return Discovery.STATIC if self.dns is None else Discovery.DNS


@dataclass(frozen=True, slots=True)
@declared
class ModelPolicy:
    """One model: a pool of its own, with the tiers and tenants of all."""

    engines: of.EngineNames | None = key(None, "The names of its engines. Required for several models.", ["a", "b"])
    aliases: of.ModelNames = key(
        [],  # a request goes to the engine with the name that it came with
        "Other names that clients send for it, and that its engines know, such as LoRA adapters.",
        ["llama", "my-lora"],
    )
    cost: TokenCost | None = key(
        None, "Weights of its tokens. Default: the pool's.", {"input": 1, "cached": 0.1, "output": 4}
    )


@dataclass(frozen=True, slots=True)
@declared
class ModelAlias:
    """A name that clients send, and no engine knows."""

    model: of.EngineModel = key(..., "The name that the engine gets in its place.", "llama-70b", name="as")


@dataclass(frozen=True, slots=True)
@declared
class EngineListFile:
    """The engines of a pool, in a file that other programs write. An empty list takes all engines out."""

    engines: Annotated[tuple[EngineAddress, ...], of.listed(ONE_ENGINE, or_empty=True)] = key(
        ..., "The engines, one by one.", [{"name": "a", "url": "http://a:8000"}]
    )


def pool_size(engines: Iterable[EngineAddress]) -> tuple[int | None, int | None]:
    """The sum of the written (tokens, requests); None in a dimension that an engine does not write, or of no engine."""
    sizes = [engine.capacity.size(None, None) for engine in engines]
    return _sum([tokens for tokens, _ in sizes]), _sum([requests for _, requests in sizes])


def pool_prefill(engines: Iterable[EngineAddress]) -> int | None:
    """The sum of the engines' un-prefilled prompt tokens; None where one of them has no bound, or there is none."""
    return _sum([None if engine.prefill == UNLIMITED else engine.prefill for engine in engines])


def largest_size(engines: Iterable[EngineAddress]) -> tuple[int, int]:
    """The most (tokens, requests) that one engine holds, by dimension; UNLIMITED where one of them writes no bound.

    A request that fits no engine is refused at once. Engines of which one has the most tokens, and another the most
    requests, are judged by both: a request that only the two together could hold waits, and is refused by its wait.
    """
    sizes = [engine.capacity.size(None, None) for engine in engines]
    return _most([tokens for tokens, _ in sizes]), _most([requests for _, requests in sizes])


def _sum(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None


def _most(amounts: Sequence[int | None]) -> int:
    known = [amount for amount in amounts if amount is not None]
    return max(known) if known and len(known) == len(amounts) else UNLIMITED
