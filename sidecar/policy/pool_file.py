"""The pool's file: every key of it, with its default and its purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ValidationInfo, field_validator

from sidecar.apis import STANDARD_PATHS
from sidecar.engines import ENGINES, Engine
from sidecar.engines.base import Carrier
from sidecar.policy import fields as of
from sidecar.policy.capacity import Capacity
from sidecar.policy.choices import (
    Background,
    Mode,
    Order,
    StoredTenants,
    StoreLoss,
    StreamUsage,
    TierSource,
    Unguarded,
    Unsized,
    UsageInTraces,
)
from sidecar.policy.cost import TokenCost
from sidecar.policy.declared import ReadAs, declared, key
from sidecar.policy.endpoint import Cors, Endpoint, EndpointBody, new_endpoints
from sidecar.policy.fleet import FleetPolicy, ModelAlias, ModelPolicy
from sidecar.policy.identity import GatewayPolicy, JwtPolicy
from sidecar.policy.problems import printable
from sidecar.policy.rules import PoolRules, pool_rules
from sidecar.policy.tenant import Tenant
from sidecar.policy.tier import Aging, Tier, TierBody, Timeouts, ladder

T = TypeVar("T")
_ENGINES = {"type": "string", "enum": list(ENGINES)}
DEFAULT_MAX_BODY = "8MiB"
MAX_CHOICES = 8
"""Choices times prompts. OpenAI's clients ask for a few; a request that starts a hundred takes a whole batch."""


def _anonymous(level: int | None) -> Tenant | None:
    return None if level is None else Tenant(name=of.ANONYMOUS, level=level, max_level=level)


def _unread(is_stored: bool) -> StoredTenants:
    return StoredTenants.UNREAD if is_stored else StoredTenants.NONE


def _frozen(named: dict[str, T] | None) -> Mapping[str, T]:
    return MappingProxyType(named or {})


_Tiers = Annotated[
    dict[of.NewTierName, Annotated[TierBody, of.DEFAULTS]], of.mapped("{high: {reserve: 20%}, normal: {}}")
]
_Models = Annotated[
    dict[of.ModelName, Annotated[ModelPolicy, of.DEFAULTS]], of.mapped("{llama-70b: {engines: [a, b]}}")
]
_Aliases = Annotated[dict[of.ModelName, ModelAlias], of.mapped("{gpt-4o: {as: llama-70b}}")]
_Endpoints = Annotated[dict[of.UrlPath, Annotated[EndpointBody, of.DEFAULTS]], of.mapped("{/v1/chat/completions: {}}")]


@dataclass(frozen=True, slots=True, kw_only=True)
@declared
class PoolFile:
    """One pool: an engine deployment, the tiers that share it, and the sources of a request's tier."""

    SCHEMA: ClassVar[dict[str, Any]] = {"anyOf": [{"required": ["capacity"]}, {"required": ["engines"]}]}

    engine: Annotated[type[Engine], of.Reads(of.one_of(ENGINES, "engine"), _ENGINES)] = key(
        ..., "The engine that serves the requests.", "tensorrt-llm", is_fixed=True
    )
    carrier: Annotated[Carrier, of.Choice(Carrier, "carrier")] | None = key(
        None,
        "How the priority travels to the engine. Default: the engine's own way.",
        "body",
        name="forward_priority",
        is_fixed=True,
    )
    capacity: Capacity | None = key(
        None,
        "The engine's size. With `engines` each has its own.",
        {"tokens": "400k", "requests": 160},
    )
    engines: FleetPolicy | None = key(
        None,
        "Several engines for one pool. Default: one, the proxy's --upstream or the app itself.",
        {"static": [{"name": "a", "url": "http://a:8000"}]},
    )
    models: Annotated[Mapping[str, ModelPolicy], ReadAs(_Models | None, _frozen)] = key(
        None,
        "A pool of its own for each model, chosen by the body's `model`. Default: one for all.",
        {"llama-70b": {"engines": ["a", "b"]}},
    )
    aliases: Annotated[Mapping[str, ModelAlias], ReadAs(_Aliases | None, _frozen)] = key(
        None,
        "Names of models that clients send and no engine knows: replaced on the way, and back in the answer.",
        {"gpt-4o": {"as": "llama-70b"}},
    )
    cost: TokenCost | None = key(
        None,
        "Weights of tokens in tenants' limits, budgets and fair shares, where a model has none of its own.",
        {"input": 1, "cached": 0.1, "output": 4},
    )
    aging: Aging | None = key(None, "How a waiting request rises. Default: it does not.")
    tiers: Annotated[tuple[Tier, ...], ReadAs(_Tiers, ladder)] = key(
        ..., "The tiers, most important first.", {"high": {"reserve": "20%"}, "normal": {}}
    )
    order: Annotated[Order, of.Choice(Order, "order")] = key(
        "level",
        "The order beyond the tiers' floors. `gain`: first what earns most before its deadline, of tiers with "
        "an `slo` of `ttft` and `tpot`.",
        "gain",
        is_fixed=True,
    )
    fair: of.Share = key(
        "25%",  # a quarter repairs the important tiers' worst waits, and costs one point in a hundred of the gain
        "With `order: gain`: the part of each reserve that is filled in fair order.",
        "50%",
    )
    default_level: Annotated[int, ReadAs(of.Level | None)] = key(
        None,
        'The tier of a request that names none. Default: "normal" where there is such a tier.',
        name="default_tier",
        is_always_read=True,
    )
    mode: Annotated[Mode, of.Choice(Mode, "mode")] = key(
        "enforce",
        "`observe` and `pass` let every request pass; `observe` records what `enforce` would have done.",
        "observe",
    )
    max_preemptions: of.Count = key(
        2,  # what was preempted twice has cost the engine two prefills: the third time it stays
        "How often one request is preempted at most.",
    )
    keep_alive_s: of.PositiveSeconds | None = key(
        None,
        "How often a waiting stream gets a comment, which keeps its connection open. Default: never.",
        "15s",
    )
    trace_waits_s: of.Seconds = key(
        "30s",  # waits that are shorter are seen when they end; beyond, someone looks at the trace meanwhile
        "How often a waiting request has a span `admission.waiting`. `0s`: never.",
        "5m",
    )
    anonymous: Annotated[Tenant | None, ReadAs(of.AnonymousLevel | None, _anonymous)] = key(
        "deny", "The tier, also the best one, of a request without a key; `deny` refuses it.", "low"
    )
    sources: of.SourceList = key(
        ["body", "header", "endpoint", "key"], "Where a request's tier comes from: the first that answers wins."
    )
    engine_levels: Annotated[tuple[tuple[float, int], ...], ReadAs(of.Thresholds | None)] = key(
        None,
        "For the source `engine`: from which number on a client's own engine priority counts as a tier. The "
        "body's `priority` is then on that scale, not from 0 to 1.",
        {"high": 10, "normal": 5, "batch": 0},
        is_always_read=True,
    )
    service_tiers: Annotated[tuple[tuple[str, int], ...], ReadAs(of.ServiceTiers | None)] = key(
        None,
        "For the source `service_tier`: the tiers that the values of the body's `service_tier` ask for. `auto` asks "
        "for none unless it stands here.",
        {"priority": "high", "default": "normal", "standard_only": "normal", "flex": "batch"},
        is_always_read=True,
    )
    endpoints: Annotated[Mapping[str, Endpoint], ReadAs(_Endpoints, new_endpoints)] = key(
        {path: {} for path in STANDARD_PATHS},
        "The guarded paths.",
    )
    unguarded: Annotated[Unguarded, of.Choice(Unguarded)] | None = key(
        None,  # a proxy knows the engine's paths; an app has paths of its own, such as /login
        "All other paths. `deny`: only reading (GET) and harmless ones pass. `generating`: all pass but those that "
        "run the model. `allow`: all pass. Default: `deny` before an engine's server, `generating` in an app.",
        "deny",
    )
    usage: Annotated[StreamUsage, of.Choice(StreamUsage)] = key(
        "ask",  # an event may hold any number of tokens: counted by its events, an answer can cost a tenth
        "A stream whose client does not ask for `usage`. `ask`: the engine is asked, and the client does not "
        "see it. `as_sent`: its tokens are estimated from the text.",
        "as_sent",
    )
    usage_in_traces: Annotated[UsageInTraces, of.Choice(UsageInTraces)] = key(
        "once",  # a backend that adds up what the spans of a trace used would count the same tokens twice
        "The `gen_ai.usage` of the `engine` span. `once`: unless a mounted app has traced it. `never`: "
        "something else traces it.",
        "never",
    )
    public: of.PathList | None = key(
        None,  # load balancers ask whether the engine lives; nothing else is for who has no key
        "With `unguarded: deny` and `anonymous: deny`: the paths that may be read without a key. Default: the "
        "engine's liveness page. The engine's metrics and settings are shown only if named here.",
        ["/health", "/metrics"],
    )
    background: Annotated[Background, of.Choice(Background)] = key(
        "refuse",  # such a response is answered at once and runs on: its request would hold nothing meanwhile
        "`background: true` on responses. `refuse`: a 400. `hold`: it holds its lease until it ends at the engine.",
        "hold",
    )
    tenant_files: of.Text | None = key(
        None,
        "The tenants' files, relative to this one. Default: no tenants.",
        "tenants/*.yaml",
        name="tenants",
        compare=False,
    )
    jwt: JwtPolicy | None = key(
        None,
        "Signed bearer tokens (JWTs) that name a tenant, beside the API keys.",
        {
            "issuer": "https://id.example",
            "audience": "llm",
            "jwks": "https://id.example/keys",
            "tenant_claim": "tenant",
        },
    )
    gateway: GatewayPolicy | None = key(
        None,
        "A gateway that names the tenant in a header, from its own addresses only.",
        {"tenant_header": "x-tenant", "addresses": ["10.0.0.0/8"]},
    )
    cors: Cors | None = key(
        None,
        "Pages of other origins that a browser lets use the API.",
        {"origins": ["https://app.example"]},
    )
    tier_header: of.HeaderName = key("x-priority", "The header in which a client names a tier.")
    max_body_bytes: of.Bytes = key(DEFAULT_MAX_BODY, "The largest request body.")
    max_upload_bytes: of.Bytes | None = key(
        None,
        "The largest upload to a path with `api: generic`. Default: `max_body`.",
        "1GiB",
    )
    body_timeout_s: of.PositiveSeconds = key("30s", "The longest a request's body may take to arrive.")
    timeouts: Annotated[Timeouts, of.DEFAULTS] = key(
        {}, "How long the engine may take for a request. Tiers may have their own."
    )
    disconnect_grace_s: of.Seconds = key(
        "2s",
        "How long an app may go on after its client's disconnect, before `abort_latency` begins.",
    )
    abort_latency_s: of.Seconds | None = key(
        None,
        "How long a request keeps its room after a disconnect. Default: the engine's own.",
        "4s",
    )
    tokenizer: of.ExistingFile | None = key(
        None, "A tokenizer.json, to count prompts exactly. Default: bytes / 4.", is_fixed=True
    )
    store: of.StoreAt | None = key(
        None,
        "The store that replicas share: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://. "
        "SIDECAR_STORE goes before it.",
        "redis://127.0.0.1:6379/0",
        is_fixed=True,
    )
    usage_days: of.UsageDays = key(
        62,  # a whole month and the one before
        "For how many days tenants' use is kept in the store, up to 400. 0 counts nothing.",
        400,
        is_fixed=True,
    )
    stored_tenants: Annotated[StoredTenants, ReadAs(of.Flag, _unread)] = key(
        False,  # else everyone who can write to the store could make a tenant
        "Tenants in the store, too, which `sidecar tenants` and the admin port change. It needs a store.",
        is_fixed=True,
    )
    pool: of.PoolName = key(
        "default",
        "The pool's name in the store (here, or SIDECAR_STORE), where several share one.",
        "chat-70b",
        is_fixed=True,
    )
    on_store_loss: Annotated[StoreLoss, of.Choice(StoreLoss)] = key(
        "divide",  # the engine still works: a part of the pool for each replica is safe, and better than refusing all
        "While the store (here, or SIDECAR_STORE) cannot be reached: `divide` goes on with this replica's "
        "part of the pool, `closed` refuses with 503.",
        "closed",
        is_fixed=True,
    )
    replicas: of.PositiveCount = key(
        1,  # its own part is then the whole pool: no request of a single replica waits for want of a number
        "Into how many parts a replica divides the pool that has not reached the store since its start.",
        3,
        is_fixed=True,
    )
    forward_key: of.Flag = key(
        False,  # the engine has no use for it, and its log may show it
        "Whether a client's API key reaches the engine. Else SIDECAR_ENGINE_KEY takes its place.",
    )

    max_choices: of.PositiveCount = key(
        MAX_CHOICES,
        "The most choices (`n`, `best_of`) of one request. Prompts of a list do not count.",
        16,
    )
    unsized: Annotated[Unsized, of.Choice(Unsized)] = key(
        "refuse",  # to hold the most that a tier may be given makes one request as dear as all others together
        "A request whose prompt is not in its body, such as `previous_response_id`. `refuse`: a 400. `hold`: "
        "it holds its tier's `max_request_tokens`, or else its size limit.",
        "hold",
    )

    @field_validator("carrier")
    @classmethod
    def _engine_can_carry(cls, carrier: Carrier | None, info: ValidationInfo) -> Carrier | None:
        engine = info.data.get("engine")
        if carrier is not None and engine is not None:
            engine.check_carrier(carrier)
        return carrier

    @field_validator("default_level")
    @classmethod
    def _default_tier_is_known(cls, level: int | None, info: ValidationInfo) -> int | None:
        tiers = of.tier_names(info)
        if level is None and "normal" in tiers:
            return tiers.index("normal")
        if level is None and tiers:
            raise ValueError(
                f"missing, and no tier is called normal; write one such as default_tier: {printable(tiers[0])}"
            )
        return level

    @field_validator("engine_levels")
    @classmethod
    def _thresholds_fit(
        cls, thresholds: dict[int, float] | None, info: ValidationInfo
    ) -> tuple[tuple[float, int], ...]:
        sources, engine, tiers = info.data.get("sources"), info.data.get("engine"), of.tier_names(info)
        if sources is not None and engine is not None:
            named = (
                None if thresholds is None else {tiers[level]: least for level, least in thresholds.items() if tiers}
            )
            if TierSource.ENGINE in sources:
                engine.check_thresholds(named, tiers)
            elif thresholds is not None:
                raise ValueError("only read for the source engine; add engine to sources, or remove this")
        return tuple((least, level) for level, least in sorted((thresholds or {}).items()))

    @field_validator("service_tiers")
    @classmethod
    def _service_tiers_fit(cls, named: dict[str, int] | None, info: ValidationInfo) -> tuple[tuple[str, int], ...]:
        sources, tiers = info.data.get("sources"), of.tier_names(info)
        if sources is not None and TierSource.SERVICE_TIER not in sources and named is not None:
            raise ValueError("only read for the source service_tier; add service_tier to sources, or remove this")
        if sources is not None and TierSource.SERVICE_TIER in sources and tiers and not (named or {}).keys() - {"auto"}:
            mistake = "missing" if named is None else "no value but auto"
            example = f"service_tiers: {{priority: {tiers[0]}, flex: {tiers[-1]}}}"
            raise ValueError(f"{mistake}; the source service_tier needs it, such as {example}")
        return tuple((named or {}).items())

    def rules_for(self, tokens: int | None, requests: int | None, prefill: int | None = None) -> PoolRules:
        """Rules of the tiers in a pool of a size. None is unbounded."""
        is_by_gain = self.order is Order.GAIN
        return pool_rules(
            tokens=tokens,
            requests=requests,
            tiers=self.tiers,
            promote_after_us=None if self.aging is None else self.aging.promote_after_us,
            ceiling=0 if self.aging is None else self.aging.ceiling,
            max_preemptions=self.max_preemptions,
            prefill=prefill,
            floor_of_reserve=self.fair if is_by_gain else Fraction(1),
            is_by_gain=is_by_gain,
        )
