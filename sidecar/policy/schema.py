"""Schema of the policy files as an operator writes them: every key, its unit, its default and its purpose.

Defaults are in the operator's notation ("100%", "30s"), so that the JSON Schema shows them as they are written.
`fields` decides what one value may be, `validate` what holds between several values. Validation needs a
`fields.Context`: the tier names, and the folder that paths are relative to.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path as FilePath
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, ValidationInfo, field_validator

from sidecar.apis import STANDARD_PATHS
from sidecar.engines import NoEngine
from sidecar.engines.base import Carrier
from sidecar.policy import fields as of
from sidecar.policy.capacity_schema import Capacity
from sidecar.policy.file_model import FileModel, key, nothing_means_defaults
from sidecar.policy.fleet_schema import EngineListFile, EnginesBody, ModelBody
from sidecar.policy.generic_schema import CostBody, Size
from sidecar.policy.identity_schema import GatewayBody, JwtBody
from sidecar.policy.model import MAX_CHOICES, Source
from sidecar.policy.problems import printable

DEFAULT_MAX_BODY = "8MiB"


class Aging(FileModel):
    """How a waiting request rises, so that old work is not overtaken forever."""

    promote_after: of.PositiveDuration = key(
        ..., "A waiting request rises one tier each time this long has passed.", "5m"
    )
    ceiling: of.TierName = key(..., "No request rises past this tier.", "normal")


class Slo(FileModel):
    """The promises of a tier. Telemetry and alerts compare with it; admission does not depend on it."""

    ttft: of.PositiveDuration | None = key(None, "Time to the first token, in 99 of 100.", "500ms")
    tpot: of.PositiveDuration | None = key(
        None,
        "Time per output token after the first. With it and `ttft` the tier's service gain is measured: each token "
        "against its deadline.",
        "60ms",
    )
    queue_wait: of.PositiveDuration | None = key(None, "The wait for admission, in 99 of 100.", "2s")
    starvation: of.PositiveDuration | None = key(
        None, "The longest that any request may starve: wait after it was overtaken.", "30m"
    )


class GainBody(FileModel):
    """The worth of a tier's service, beside that of other tiers."""

    weight: of.GainWeight = key(1, "The worth of an output token that comes in time, from 1 to 1000.", "4")


class QueueBody(FileModel):
    """How much may wait."""

    max_requests: of.Count | None = key(
        None, "Requests that may wait in each process; one more is refused. Default: no bound.", "10k"
    )
    max_wait: of.Duration | None = key(
        None, "The longest a request waits before it is refused. Default: no bound.", "30m"
    )


class TimeoutsBody(FileModel):
    """How long the engine may take. Then the request ends with `engine_timeout`, and is sent to no other engine."""

    first_byte: of.PositiveDuration = key(
        "10m",  # a prompt of a million tokens is read in less; and OpenAI's and Anthropic's clients wait no longer
        "From admission to the first byte of an answer that streams. Any other comes in one piece, at its end.",
        "30s",
    )
    between_bytes: of.PositiveDuration = key(
        "10m",  # an engine may think, or write a tool's arguments, for minutes before it sends them; and see above
        "The longest silence after the first byte.",
        "60s",
    )
    total: of.PositiveDuration = key(
        "4h",  # 128k tokens at 10 a second take 3.6 hours: no answer takes longer
        "From admission to the last byte. Not of responses in the background.",
        "30m",
    )


class TierTimeoutsBody(FileModel):
    """A tier's own timeouts of the engine. Default of each: the pool's."""

    first_byte: of.PositiveDuration | None = key(None, "From admission to the first byte of a stream.", "30s")
    between_bytes: of.PositiveDuration | None = key(None, "The longest silence after the first byte.", "60s")
    total: of.PositiveDuration | None = key(None, "From admission to the last byte.", "30m")


class TierBody(FileModel):
    """One tier's part of the pool."""

    reserve: of.Share = key("0%", "The part of the pool this tier can always get back.", "20%")
    lend: of.Share = key(
        "100%",  # keeps nothing idle: holding capacity back is a price that an operator should choose to pay
        "How much of the unused reserve less important tiers may use meanwhile.",
        "50%",
    )
    limit: of.Share = key("100%", "The most of the pool this tier may ever hold.", "60%")
    always_first: of.Flag = key(
        False, "Goes before all others, whatever it holds. First tier only, with a limit below 100%."
    )
    preemptible: of.Flag = key(
        False,
        "Its running requests may be canceled and put back in the queue, while nothing of their answer has "
        "gone out, where the tier holds more than its reserve and a more important one has waited too long.",
    )
    preempt_after: of.Duration | None = key(
        None,
        "A request of this tier that has waited so long takes room back from less important tiers that are "
        "preemptible. Default: it waits its turn.",
        "500ms",
    )
    slo: Slo | None = key(None, "What this tier promises.")
    gain: GainBody | None = key(None, "The worth of a token in time. Needs `slo` with `ttft` and `tpot`.")
    queue: QueueBody | None = key(None, "How much may wait in this tier. Default: no bounds.")
    default_output_tokens: of.PositiveCount = key(
        512,  # a long chat answer: rather too much than an overfull KV cache; real usage gives back the difference
        "What a request without a maximum of its own is taken to produce, until usage says better.",
    )
    timeouts: TierTimeoutsBody | None = key(
        None, "How long the engine may take for its requests. Default: the pool's `timeouts`.", {"first_byte": "30s"}
    )
    max_request_tokens: of.PositiveCount | None = key(
        None, "The most tokens one request may hold. Default: the tier's size limit (`sidecar check` prints it).", "32k"
    )

    @field_validator("gain")
    @classmethod
    def _gain_has_deadlines(cls, gain: GainBody | None, info: ValidationInfo) -> GainBody | None:
        slo = info.data.get("slo")
        if gain is not None and (slo is None or slo.ttft is None or slo.tpot is None):
            raise ValueError(
                "a tier's gain is that of tokens before their deadlines: give its `slo` a `ttft` and a `tpot`"
            )
        return gain

    @field_validator("limit")
    @classmethod
    def _limit_covers_reserve(cls, limit: Fraction, info: ValidationInfo) -> Fraction:
        reserve = info.data.get("reserve")
        if limit == 0:
            raise ValueError('"0%" admits nothing, ever; write a larger share, or remove the tier')
        if reserve is not None and limit < reserve:
            raise ValueError(f'below the reserve of {of.percent(reserve)}; write "{of.percent(reserve)}" or more')
        return limit

    @field_validator("always_first")
    @classmethod
    def _always_first_is_limited(cls, always_first: bool, info: ValidationInfo) -> bool:
        if always_first and info.data.get("limit") == 1:
            raise ValueError('would let this tier take the whole pool; write a limit below 100%, such as limit: "50%"')
        return always_first


class CorsBody(FileModel):
    """Browsers that may use the API from pages of other origins. Cookies are never allowed: keys are headers."""

    origins: of.Origins = key(..., 'The origins of the pages, or `["*"]` for every page.', ["https://app.example"])
    headers: of.AskedHeaders | None = key(
        None,
        "The headers that their requests may have; write `authorization` and `content-type` among them. Default: "
        "every header that is asked for.",
        ["authorization", "content-type", "x-priority"],
    )


class EndpointBody(FileModel):
    """Treatment of requests on one path."""

    tier: of.TierName | None = key(None, "The tier of requests on this path.", "batch")
    forward_to: of.UrlPath | None = key(None, "The path the engine knows. Default: the same path.", "/v1/completions")
    api: of.ApiName | None = key(None, "The shape of its requests. Default: from the path.")
    tokens: Size | None = key(
        None,
        "`api: generic` only: the tokens that one request holds, or how they are estimated.",
        {"per_kilobyte": 250},
    )
    cost: Annotated[CostBody, of.mapped("{header: x-cost-tokens}")] | None = key(
        None,
        "`api: generic` only: where an answer says its cost. Default: in OpenAI's `usage`, else the estimate counts.",
        {"member": "total_tokens"},
    )


class LimitsBody(FileModel):
    """A tenant's own limits; what is left out is unlimited."""

    requests_per_minute: of.RateCount | None = key(None, "Requests per minute.", 600)
    tokens_per_minute: of.RateCount | None = key(None, "Tokens per minute, prompts and answers.", "200k")
    tokens_per_day: of.BudgetCount | None = key(
        None, "Tokens per day, prompts and answers, from midnight to midnight in UTC. It needs a store.", "20M"
    )
    tokens_per_month: of.BudgetCount | None = key(None, "Tokens per calendar month, in UTC. It needs a store.", "400M")
    concurrent_requests: of.PositiveCount | None = key(None, "Requests at once, waiting or running.", 32)
    max_output_tokens: of.PositiveCount | None = key(None, "Tokens of one answer.", 8192)
    burst: of.BurstDuration = key(
        "60s",  # what a client reads out of `x-ratelimit-limit-*`: that so many may come, at once too
        "How much of its allowance may come at once: that of so long.",
        "10s",
    )


_TierBody = Annotated[TierBody, BeforeValidator(nothing_means_defaults)]
_ModelBody = Annotated[ModelBody, BeforeValidator(nothing_means_defaults)]
_EndpointBody = Annotated[EndpointBody, BeforeValidator(nothing_means_defaults)]


class PoolFile(FileModel):
    """One pool: an engine deployment, the tiers that share it, and the sources of a request's tier."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["capacity"]}, {"required": ["engines"]}]})

    engine: of.EngineChoice = key(..., "The engine that serves the requests.", "tensorrt-llm")
    forward_priority: of.CarrierChoice | None = key(
        None, "How the priority travels to the engine. Default: the engine's own way.", "body"
    )
    capacity: Capacity | None = key(
        None,
        "What the engine holds at once. Required without `engines`, which have capacities of their own.",
        {"tokens": "400k", "requests": 160},
    )
    engines: EnginesBody | None = key(
        None,
        "Several engines for one pool. Default: one, the proxy's --upstream or the app itself.",
        {"static": [{"name": "a", "url": "http://a:8000"}]},
    )
    models: Annotated[dict[of.ModelName, _ModelBody], of.mapped("{llama-70b: {engines: [a, b]}}")] | None = key(
        None,
        "A pool of its own for each model, chosen by the body's `model`. Default: one pool, whatever the model.",
        {"llama-70b": {"engines": ["a", "b"]}},
    )
    aging: Aging | None = key(None, "How a waiting request rises. Default: it does not.")
    tiers: Annotated[dict[of.NewTierName, _TierBody], of.mapped("{high: {reserve: 20%}, normal: {}}")] = key(
        ..., "The tiers, most important first.", {"high": {"reserve": "20%"}, "normal": {}}
    )
    order: of.OrderChoice = key(
        "level",
        "What orders the requests beyond their tiers' floors: `level`, or `gain`, which serves first what earns most "
        "before its deadline, of the tiers with an `slo` of `ttft` and `tpot`.",
        "gain",
    )
    fair: of.Share = key(
        "25%",  # a quarter repairs the important tiers' worst waits, and costs one point in a hundred of the gain
        "With `order: gain`, the part of each reserve that is filled in fair order: the tier's floor. With `level` the "
        "whole reserve is.",
        "50%",
    )
    default_tier: of.TierName | None = key(
        None, 'The tier of a request that names none. Default: "normal" where there is such a tier.'
    )
    mode: of.ModeChoice = key(
        "enforce",
        "`observe` lets every request pass at once and untouched, and records what `enforce` would have done. "
        "`pass` does no more than pass them, for when the sidecar itself is the problem.",
        "observe",
    )
    max_preemptions: of.Count = key(
        2,  # what was preempted twice has cost the engine two prefills: the third time it stays
        "How often one request is preempted at most. For tiers that are preemptible.",
    )
    keep_alive: of.PositiveDuration | None = key(
        None,
        "How often a streaming client that queues is sent a comment, so that no load balancer takes the "
        "wait for an idle connection. Default: never.",
        "15s",
    )
    trace_waits: of.Duration = key(
        "30s",  # waits that are shorter are seen when they end; beyond, someone looks at the trace meanwhile
        "How often a request that waits says so in its trace, as a span `admission.waiting`, so that a long wait is "
        "seen before it ends, and also where the process is killed. `0s`: never.",
        "5m",
    )
    anonymous: of.AnonymousTier | None = key(
        "deny", "The tier, also the best one, of a request without a key; `deny` refuses it.", "low"
    )
    sources: of.SourceList = key(
        ["body", "header", "endpoint", "key"], "Where a request's tier comes from: the first that answers wins."
    )
    engine_levels: of.Thresholds | None = key(
        None,
        "From which number on a client's own engine priority counts as a tier. For the source `engine`: with it, a "
        "number in the body's `priority` is on the engine's own scale, and not from 0 to 1.",
        {"high": 10, "normal": 5, "batch": 0},
    )
    endpoints: Annotated[dict[of.UrlPath, _EndpointBody], of.mapped("{/v1/chat/completions: {}}")] = key(
        {path: {} for path in STANDARD_PATHS},
        "The guarded paths; `unguarded` says what happens on all others. Default: the standard /v1 paths.",
    )
    unguarded: of.UnguardedChoice | None = key(
        None,  # a proxy knows the engine's paths; an app has paths of its own, such as /login
        "What happens on paths that are not guarded. `deny`: only reading (GET) and what the engine is "
        "known to do harmlessly, such as tokenizing, passes; the rest is a 404. `generating`: only paths on which the "
        "engine generates are a 404. `allow`: everything passes. Default: `deny` before an engine's server, "
        "`generating` in an app.",
        "deny",
    )
    usage: of.UsageChoice = key(
        "ask",  # an event may hold any number of tokens: counted by its events, an answer can cost a tenth
        "How the tokens of a stream are known whose client does not ask for its `usage`. `ask`: the engine is asked, "
        "and the client does not see the answer. `as_sent`: the request is not changed, and the tokens are estimated "
        "from the text. With `engine: none` nothing is asked.",
        "as_sent",
    )
    usage_in_traces: of.TracedUsageChoice = key(
        "once",  # a backend that adds up what the spans of a trace used would count the same tokens twice
        "Whether the `engine` span has what the request used (`gen_ai.usage`). `once`: unless a mounted app has traced "
        "its own call of the model with it. `never`: something else traces it, such as the engine. Metrics have it in "
        "any case.",
        "never",
    )
    public: of.PathList | None = key(
        None,  # load balancers ask whether the engine lives; nothing else is for who has no key
        "With `unguarded: deny`, the paths that may be read without a key, where others need one (`anonymous: deny`). "
        "The engine's metrics, documents and settings are shown only where they are named here. Default: the engine's "
        "liveness page; with another `anonymous`, every path.",
        ["/health", "/metrics"],
    )
    background: of.BackgroundChoice = key(
        "refuse",  # such a response is answered at once and runs on: its request would hold nothing meanwhile
        "What happens to `background: true` on responses. `refuse`: a 400. `hold`: the response is "
        "followed at the engine until it ends, and holds its lease until then.",
        "hold",
    )
    tenants: of.Text | None = key(
        None, "The tenants' files, relative to this one. Default: no tenants.", "tenants/*.yaml"
    )
    jwt: JwtBody | None = key(
        None,
        "Signed bearer tokens (JWTs) that name a tenant, beside the API keys. Default: API keys alone.",
        {
            "issuer": "https://id.example",
            "audience": "llm",
            "jwks": "https://id.example/keys",
            "tenant_claim": "tenant",
        },
    )
    gateway: GatewayBody | None = key(
        None,
        "A gateway that names the tenant in a header, which counts from its own addresses only. Default: none.",
        {"tenant_header": "x-tenant", "addresses": ["10.0.0.0/8"]},
    )
    cors: CorsBody | None = key(
        None,
        "Which pages of other origins a browser lets use the API. Default: none, beside what the app says itself.",
        {"origins": ["https://app.example"]},
    )
    tier_header: of.HeaderName = key("x-priority", "The header in which a client names a tier.")
    max_body: of.Size = key(DEFAULT_MAX_BODY, "The largest request body.")
    max_upload: of.Size | None = key(
        None,
        "The largest upload to a path with `api: generic`, which is not read into memory. Default: `max_body`.",
        "1GiB",
    )
    body_timeout: of.PositiveDuration = key("30s", "The longest a request's body may take to arrive.")
    timeouts: Annotated[TimeoutsBody, BeforeValidator(nothing_means_defaults)] = key(
        {}, "How long the engine may take for a request. Tiers may have their own."
    )
    disconnect_grace: of.Duration = key(
        "2s",
        "How long an app may go on after its client's disconnect before its request counts as ended. The "
        "room stays held for `abort_latency`, too.",
    )
    abort_latency: of.Duration | None = key(
        None,
        "How long the engine may compute on for a request after its client's disconnect: so long it keeps "
        "its room. Default: the engine's own.",
        "4s",
    )
    tokenizer: of.ExistingFile | None = key(
        None, "A tokenizer.json, relative to this file, to count prompts exactly. Default: bytes / 4."
    )
    store: of.StoreAt | None = key(
        None,
        "Where many replicas keep one pool: redis://, rediss://, unix://, redis+sentinel:// or "
        "redis+cluster://. SIDECAR_STORE in the environment goes before it, and is the better place for a password. "
        "Default: leases live in this process.",
        "redis://127.0.0.1:6379/0",
    )
    usage_days: of.UsageDays = key(
        62,  # a whole month and the one before
        "For how many days the use of the tenants is kept in the store, up to 400. 0 counts nothing. Without a store, "
        "here or in SIDECAR_STORE, it does nothing.",
        400,
    )
    stored_tenants: of.Flag = key(
        False,  # else everyone who can write to the store could make a tenant
        "Whether there are tenants in the store, too, which `sidecar tenants` and the admin port change while the "
        "sidecars run. It needs a store, here or in SIDECAR_STORE.",
    )
    pool: of.PoolName = key(
        "default",
        "The pool's name in the store, where several pools share one. Without a store, here or in "
        "SIDECAR_STORE, it does nothing.",
        "chat-70b",
    )
    on_store_loss: of.StoreLossChoice = key(
        "divide",  # the engine still works: a part of the pool for each replica is safe, and better than refusing all
        "What a replica does while the store cannot be reached: `divide` goes on with its part of the "
        "pool, `closed` refuses with 503. Without a store, here or in SIDECAR_STORE, it does nothing.",
        "closed",
    )
    replicas: of.PositiveCount = key(
        1,  # its own part is then the whole pool: no request of a single replica waits for want of a number
        "Into how many parts a replica divides the pool where it has not reached the store since its start, with "
        "`on_store_loss: divide`. Later it knows how many replicas there are.",
        3,
    )
    forward_key: of.Flag = key(
        False,  # the engine has no use for it, and its log may show it
        "Whether the API key that a client sent reaches the engine too. By default it is "
        "removed, and the engine's own, SIDECAR_ENGINE_KEY in the environment, put in its place.",
    )

    max_choices: of.PositiveCount = key(
        MAX_CHOICES,
        "The most choices of a prompt (`n`, `best_of`) that one request may ask for. Prompts and inputs of a list do "
        "not count here, because the engine queues them itself.",
        16,
    )
    unsized: of.UnsizedChoice = key(
        "refuse",  # to hold the most that a tier may be given makes one request as dear as all others together
        "What becomes of a request whose prompt is not in its body, such as `previous_response_id`: "
        "`refuse` answers 400, `hold` lets it hold its tier's `max_request_tokens`, or else the most that the tier "
        "could ever be given.",
        "hold",
    )

    @field_validator("capacity")
    @classmethod
    def _engine_reports_it(cls, capacity: Capacity | None, info: ValidationInfo) -> Capacity | None:
        if capacity is not None and capacity.read_from is not None and info.data.get("engine") is NoEngine:
            raise ValueError("the engine none reports nothing; write tokens, requests or both")
        return capacity

    @field_validator("forward_priority")
    @classmethod
    def _engine_can_carry(cls, carrier: Carrier | None, info: ValidationInfo) -> Carrier | None:
        engine = info.data.get("engine")
        if carrier is not None and engine is not None:
            engine.check_carrier(carrier)
        return carrier

    @field_validator("default_tier")
    @classmethod
    def _default_tier_is_known(cls, name: str | None, info: ValidationInfo) -> str | None:
        tiers = of.context(info).tiers
        if name is not None or "normal" in tiers:
            return name or "normal"
        if tiers:
            raise ValueError(
                f"missing, and no tier is called normal; write one such as default_tier: {printable(tiers[0])}"
            )
        return None

    @field_validator("engine_levels")
    @classmethod
    def _thresholds_fit(cls, thresholds: dict[str, float] | None, info: ValidationInfo) -> dict[str, float] | None:
        sources = info.data.get("sources")
        engine = info.data.get("engine")
        if sources is None or engine is None:
            return thresholds
        if Source.ENGINE in sources:
            engine.check_thresholds(thresholds, of.context(info).tiers)
        elif thresholds is not None:
            raise ValueError("only read for the source engine; add engine to sources, or remove this")
        return thresholds


class TenantFile(FileModel):
    """One tenant: who it is, and what it may ask for."""

    tenant: of.TenantName = key(..., "The tenant's name, unique in the pool.", "acme")
    keys: of.KeyHashes | None = key(
        None,
        "Hashes of its API keys, from `sidecar keys new`. Never the keys themselves. May be left out where the pool's "
        "file has `jwt` or `gateway`; `[]` where the app names the tenant.",
        ["sha256:..."],
    )
    tier: of.TierName = key(..., "The tier of its requests that name none.", "normal")
    max_tier: of.TierName | None = key(
        None, "The best tier it may ask for; more is clamped. Default: its tier.", "high"
    )
    weight: of.PositiveCount = key(1, "Its share against the other tenants of its tier.", 2)
    limits: LimitsBody | None = key(None, "Its own limits. Default: none.")
    over_limit: of.OverLimit | None = key(
        None, "What happens over a limit: `reject`, or {downgrade: TIER}. Default: reject."
    )

    @field_validator("max_tier")
    @classmethod
    def _max_tier_covers_tier(cls, name: str | None, info: ValidationInfo) -> str | None:
        tier, tiers = info.data.get("tier"), of.context(info).tiers
        if name in tiers and tier in tiers and tiers.index(str(name)) > tiers.index(str(tier)):
            raise ValueError(f"less important than its tier {tier}; write {tier} or a more important one")
        return name

    @field_validator("over_limit")
    @classmethod
    def _downgrade_goes_down(cls, name: str | None, info: ValidationInfo) -> str | None:
        tier, tiers = info.data.get("tier"), of.context(info).tiers
        if name in tiers and tier in tiers and tiers.index(str(name)) <= tiers.index(str(tier)):
            raise ValueError(f"not less important than its tier {tier}; write a tier below it, or reject")
        return name


SCHEMAS: dict[str, type[FileModel]] = {
    "policy.schema.json": PoolFile,
    "tenant.schema.json": TenantFile,
    "engines.schema.json": EngineListFile,
}

NAMED = {"tiers": "TierBody", "endpoints": "EndpointBody", "models": "ModelBody"}
"""The mappings whose keys are the operator's own names, and what each name may hold. Nothing at all is allowed too."""


def schema_text(model: type[FileModel]) -> str:
    """One file's schema as it is written to disk."""
    return json.dumps(schema_document(model), indent=2, ensure_ascii=False) + "\n"


def schema_document(model: type[FileModel]) -> dict[str, Any]:
    """One file's schema as JSON types."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_tidied(model.model_json_schema())}
    for name, body in NAMED.items():
        if name in schema["properties"]:
            schema["properties"][name] |= _named(body)
            schema["properties"][name].pop("patternProperties", None)
    return schema


def _named(body: str) -> dict[str, Any]:
    return {"additionalProperties": {"anyOf": [{"$ref": f"#/$defs/{body}"}, {"type": "null"}]}}


_NOISE = frozenset({"title", "propertyNames"})  # made up from names; and not written by every version of pydantic


def _tidied(node: Any, *, names: bool = False, drop: frozenset[str] = _NOISE) -> Any:
    """Without what says nothing, so that every version of pydantic gives the same text.

    `names` is True where the keys are the file's own, so that a key called `title` would stay.
    """
    if isinstance(node, list):
        return [_tidied(item, drop=_NOISE | {"default"}) for item in node]  # an `anyOf`: the default stands outside
    if not isinstance(node, dict):
        return node
    return {
        key: _tidied(value, names=not names and key in {"properties", "$defs"})
        for key, value in node.items()
        if names or key not in drop
    }


def write(folder: FilePath) -> None:
    """Writes both schemas into `folder`."""
    for name, model in SCHEMAS.items():
        (folder / name).write_text(schema_text(model), encoding="utf-8")


if __name__ == "__main__":
    write(FilePath(sys.argv[1] if len(sys.argv) > 1 else "policies"))
