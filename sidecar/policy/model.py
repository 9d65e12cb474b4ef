"""Policy model that the running process uses: frozen, resolved, ready for lookups.

Nothing here reads a file. `compiler.load` makes this from YAML. Tier names have become levels (0 is the most
important), shares have become whole numbers (see `rules`), durations have become seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from types import MappingProxyType

from sidecar.apis import Api
from sidecar.engines.base import Carrier, Engine
from sidecar.policy.fleet import EngineAddress, FleetPolicy, ModelPolicy, largest_of, pool_prefill, pool_size
from sidecar.policy.gateway import GatewayPolicy
from sidecar.policy.identity import JwtPolicy
from sidecar.policy.rules import UNLIMITED, EngineCapacity, PoolRules, Shares, pool_rules
from sidecar.policy.store import StoreAddress


class Source(str, Enum):
    """Where a request's tier may come from. `engine` is the engine's own priority field or header, sent by a client."""

    BODY = "body"
    HEADER = "header"
    ENDPOINT = "endpoint"
    KEY = "key"
    ENGINE = "engine"


class Mode(str, Enum):
    """Whether requests are held: `observe` and `pass` pass all, and `observe` records what `enforce` would do."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    PASS = "pass"


MODE_VARIABLE = "SIDECAR_MODE"
"""`pass`, whatever the policy says. See docs/sidecar-trouble.md."""
BARE = "bare"
"""The generation of a policy that has no more than passing needs: see `passing`."""


def is_forced(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for it. Raises ValueError for another mode."""
    written = environment.get(MODE_VARIABLE, "")
    if written not in ("", Mode.PASS.value):
        raise ValueError(
            f"{MODE_VARIABLE}: {written!r} is not pass, the one mode that the environment can ask for; write another "
            "as `mode` into the policy"
        )
    return bool(written)


class CapacitySource(str, Enum):
    """Source of the pool's size, other than the policy itself."""

    ENGINE = "engine"


class Unguarded(str, Enum):
    """Treatment of a request on a path that the policy does not guard. See `middleware.unguarded`."""

    DENY = "deny"
    GENERATING = "generating"
    ALLOW = "allow"


class StreamUsage(str, Enum):
    """Whether the engine is asked for the usage of streams whose clients do not ask: see `middleware.asked_usage`."""

    ASK = "ask"
    AS_SENT = "as_sent"


class UsageInTraces(str, Enum):
    """Whether our `engine` span has what a request used: always, never, or unless the app has traced it itself."""

    ONCE = "once"
    ALWAYS = "always"
    NEVER = "never"


class Background(str, Enum):
    """Treatment of a response that runs on after its request is answered: refused, or followed with its lease."""

    REFUSE = "refuse"
    HOLD = "hold"


class Order(str, Enum):
    """What orders the requests beyond their tiers' floors: the aged level, or the service gain."""

    LEVEL = "level"
    GAIN = "gain"


class StoreLoss(str, Enum):
    """Behavior while the store cannot be reached: every replica uses its part of the pool, or refuses with 503."""

    DIVIDE = "divide"
    CLOSED = "closed"


class Unsized(str, Enum):
    """Treatment of a request whose body does not show the size of its prompt."""

    HOLD = "hold"
    REFUSE = "refuse"


class Learn(str, Enum):
    """How far a lease follows the output lengths that were learned; with `off` it holds prompt and `max_tokens`."""

    OFF = "off"
    CAUTIOUS = "cautious"
    FULL = "full"


class StoredTenants(str, Enum):
    """Whether there are tenants in the store, and whether the policy has them: once the process has read them."""

    NONE = "none"
    UNREAD = "unread"
    READ = "read"


MAX_CHOICES = 8
"""Choices times prompts. OpenAI's clients ask for a few; a request that starts a hundred takes a whole batch."""


@dataclass(frozen=True, slots=True)
class ServiceObjectives:
    """The promises of a tier, in seconds; None where there is none."""

    ttft_s: float | None = None
    queue_wait_s: float | None = None
    starvation_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the engine may take for a request of a tier, in seconds: see `schema.TimeoutsBody`."""

    first_byte_s: float = 600.0
    between_bytes_s: float = 600.0
    total_s: float = 4 * 3600.0

    @property
    def shortest_s(self) -> float:
        """The shortest of them."""
        return min(self.first_byte_s, self.between_bytes_s, self.total_s)


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier as the middleware sees it; its shares of the pool are in `PoolRules.tiers[level]`.

    `max_waiting` is the most requests that may queue (None: unbounded), `max_wait_s` the longest a request may queue
    (None: unbounded), `default_output_tokens` what a request without a maximum of its own is taken to produce,
    `max_request_tokens` the most one request may hold (None: the size limit), `slo` the promises that telemetry
    compares with, `gain_weight` the worth of a token in time, `timeouts` the engine's.
    """

    name: str
    level: int
    default_output_tokens: int
    max_waiting: int | None = None
    max_wait_s: float | None = None
    max_request_tokens: int | None = None
    slo: ServiceObjectives = ServiceObjectives()
    gain_weight: int = 1
    timeouts: Timeouts = Timeouts()


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The tokens of a request of the generic API: `base`, and `per_kilobyte` for each begun 1,024 bytes of its body."""

    base: int
    per_kilobyte: int = 0

    def of(self, size_bytes: int) -> int:
        """The tokens of a body of so many bytes, at least 1."""
        return max(1, self.base + self.per_kilobyte * -(-size_bytes // 1024))


@dataclass(frozen=True, slots=True)
class CostPlace:
    """Where an answer of the generic API says its cost in tokens: in a header, or in a member of its JSON."""

    header: bytes | None = None
    member: bytes | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A guarded path. `level` is the tier it maps to (None: none), `forward_to` the path the engine knows.

    A path of the generic API has a `size`; `cost` is None where its answers do not say what they cost, or only as
    OpenAI's do.
    """

    path: str
    api: Api
    level: int | None = None
    forward_to: str | None = None
    size: RequestSize | None = None
    cost: CostPlace | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """A tenant's own limits; None: unlimited. Of what a minute allows, `burst_us` worth of it may come at once."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    max_output_tokens: int | None = None
    burst_us: int = 60_000_000
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None

    @property
    def are_counted(self) -> bool:
        """Whether there is anything that a pool has to count. It counts no budgets."""
        return (
            self.requests_per_minute is not None
            or self.tokens_per_minute is not None
            or self.concurrent_requests is not None
        )

    @property
    def have_budgets(self) -> bool:
        """Whether the tenant has a budget of tokens for a day or a month, in UTC."""
        return self.tokens_per_day is not None or self.tokens_per_month is not None


NO_LIMITS = Limits()
"""The limits of every tenant that has none."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. `level` is its tier, `max_level` the most important one it may ask for (0 is the best).

    `downgrade_level` is the tier that what is over the limits falls to, None where it is refused.
    """

    name: str
    level: int
    max_level: int
    weight: int = 1
    limits: Limits = NO_LIMITS
    downgrade_level: int | None = None


@dataclass(frozen=True, slots=True)
class Cors:
    """The origins whose pages a browser lets use the API, and the headers of their requests: None for every header."""

    origins: tuple[str, ...]
    headers: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return ", ".join(self.origins)


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything the operator decided, as one immutable value.

    `tenants` maps the lower-case hex SHA-256 digest of an API key to its tenant. `anonymous` is None where a request
    without a key is refused. `engine_levels` lists (threshold, level), most important level first, for the source
    `engine`. `carrier` is None for the engine's own default. `generation` is a short digest of the files' contents.
    `store` is where many replicas keep one pool, called `pool` there, None where leases live in this process.
    `replicas` is into how many parts a replica divides the pool that has not reached the store since its start.
    `engine_capacity` is None where the policy itself says how large the pool is; otherwise the pool's size is what the
    engine says, and `rules` bound only what the policy does: `rules_of` gives the rules of a size. `keep_alive_s` is
    how often a streaming client that queues is sent a comment, None for never. `trace_waits_s` is how often a request
    that waits says so in its trace, 0 for never. With `forward_key` the tenant's key reaches the engine, too.
    `abort_latency_s` is how long the engine may compute on after a disconnect, None for the engine's own figure.
    `unguarded` is None where it depends on what the middleware stands before. `public` is None where the policy does
    not name the paths that need no key: see `public_paths`. `max_choices` bounds the choices of a prompt that one
    request may ask for, and `unsized` says what becomes of one whose prompt cannot be sized. `engines` is None where
    the pool has one engine, which the policy does not name; with engines, `rules` are those of the sum of their written
    capacities. `models` are those with pools of their own, by name; empty where all models share the pool. `learn` says
    how far leases follow the output lengths that were learned. With the order `gain`, `fair` is the part of each
    reserve that is its tier's floor.
    `jwt` is None where no tokens are accepted, `gateway` where no gateway names tenants; `keyless` are the tenants that
    have no API key. `stored_tenants` says whether the tenants of the store are among these.
    The use of the tenants is kept for `usage_days` in the store, 0 for not at all. `max_upload_bytes` is None where
    uploads have no bound of their own, `cors` where pages of other origins are left to the app.
    """

    rules: PoolRules
    tiers: tuple[Tier, ...]
    endpoints: Mapping[str, Endpoint]
    tenants: Mapping[str, Tenant]
    anonymous: Tenant | None
    default_level: int
    sources: tuple[Source, ...]
    engine: type[Engine]
    carrier: Carrier | None
    engine_levels: tuple[tuple[float, int], ...]
    tier_header: bytes
    max_body_bytes: int
    body_timeout_s: float
    disconnect_grace_s: float
    tokenizer: str | None
    generation: str
    shares: tuple[Shares, ...] = ()
    engine_capacity: EngineCapacity | None = None
    store: StoreAddress | None = None
    pool: str = "default"
    on_store_loss: StoreLoss = StoreLoss.DIVIDE
    replicas: int = 1
    mode: Mode = Mode.ENFORCE
    keep_alive_s: float | None = None
    trace_waits_s: float = 30.0
    forward_key: bool = False
    abort_latency_s: float | None = None
    unguarded: Unguarded | None = None
    public: tuple[str, ...] | None = None
    background: Background = Background.REFUSE
    max_choices: int = MAX_CHOICES
    unsized: Unsized = Unsized.REFUSE
    engines: FleetPolicy | None = None
    models: Mapping[str, ModelPolicy] = field(default_factory=lambda: MappingProxyType({}))
    learn: Learn = Learn.CAUTIOUS
    order: Order = Order.LEVEL
    fair: Fraction = Fraction(1, 4)
    jwt: JwtPolicy | None = None
    gateway: GatewayPolicy | None = None
    keyless: tuple[Tenant, ...] = ()
    stored_tenants: StoredTenants = StoredTenants.NONE
    usage: StreamUsage = StreamUsage.ASK
    usage_in_traces: UsageInTraces = UsageInTraces.ONCE
    usage_days: int = 62
    max_upload_bytes: int | None = None
    cors: Cors | None = None
    _named: dict[str, Tenant] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_bare(self) -> bool:
        """Whether it has no more than `mode: pass` needs."""
        return self.generation == BARE

    @property
    def public_paths(self) -> Sequence[str] | None:
        """The paths that may be read without a key, and the only ones of the operator's pages that may be read at all.

        None where that bounds nothing: requests need no key (`anonymous`), and the policy does not say which paths.
        """
        if self.public is None and self.anonymous is None:
            return (self.engine.liveness_page,)
        return self.public

    @property
    def named(self) -> Mapping[str, Tenant]:
        """All tenants by their names, with API keys or without. Made once: there may be 10,000."""
        if not self._named:
            self._named.update({tenant.name: tenant for tenant in (*self.tenants.values(), *self.keyless)})
        return self._named

    def of_engines(self, engines: Sequence[EngineAddress]) -> Policy:
        """The policy as it is with these engines, such as those of an engine list: `rules` are those of their sum."""
        assert self.engines is not None
        rules = self.rules_of(*pool_size(engines), pool_prefill(engines))
        return replace(self, engines=replace(self.engines, static=tuple(engines)), rules=rules)

    def of_model(self, name: str) -> Policy:
        """The policy of one model's pool: its engines, their sum, and a name of its own in the store. Raises KeyError.

        The pool called `default` has `default/llama-70b`: no policy can give a pool a name with a slash.
        """
        assert self.engines is not None  # `validate` refuses models without engines
        names = self.models[name].engines
        mine = [engine for engine in self.engines.static if names is None or engine.name in names]
        of_engines = self.of_engines(mine)
        # Its front has the tenants, and counts what they use.
        return replace(of_engines, pool=f"{self.pool}/{name}", stored_tenants=StoredTenants.NONE, usage_days=0)

    @property
    def largest_engine(self) -> tuple[int, int]:
        """The most (tokens, requests) that one engine holds: no larger request is ever admitted. See `largest_of`."""
        return (UNLIMITED, UNLIMITED) if self.engines is None else largest_of(self.engines.static)

    @property
    def called_models(self) -> Mapping[str, str]:
        """The models by the names that clients may call them: their own and their aliases, in the file's order."""
        models = self.models.values()
        return {name: model.name for model in models for name in (model.name, *model.aliases)}

    @property
    def reads_capacity(self) -> bool:
        """Whether a part of the pool's size is read from the engines, or depends on how many are found."""
        if self.engines is None:
            return self.engine_capacity is not None
        return not self.engines.static or not all(engine.is_written for engine in self.engines.static)

    def rules_of(self, tokens: int | None, requests: int | None, prefill: int | None = None) -> PoolRules:
        """The same tiers' rules in a pool of another size. None is unbounded."""
        rules = self.rules
        return pool_rules(
            tokens=tokens,
            requests=requests,
            tiers=self.shares,
            promote_after_us=rules.promote_after_us,
            ceiling=rules.ceiling,
            max_preemptions=rules.max_preemptions,
            prefill=prefill,
            floor_of_reserve=self.fair if rules.is_by_gain else Fraction(1),
            is_by_gain=rules.is_by_gain,
        )

    def ordered_by(self, order: Order) -> Policy:
        """The same policy with another order."""
        rules = replace(self.rules, is_by_gain=order is Order.GAIN)
        sizes = (None if size == UNLIMITED else size for size in (rules.tokens, rules.requests, rules.prefill))
        ordered = replace(self, order=order, rules=rules)
        return replace(ordered, rules=ordered.rules_of(*sizes))

    @property
    def is_sized(self) -> bool:
        """Whether the pool's size stands in the policy, in one dimension at least. It may still be the engine's."""
        return min(self.rules.tokens, self.rules.requests) < UNLIMITED

    def level_of(self, name: str) -> int | None:
        """The level of the tier called `name`, None where the policy has no such tier."""
        return next((tier.level for tier in self.tiers if tier.name == name), None)
