"""Policy compiler: from a path to a `Policy`, or to all mistakes in its files at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sidecar.apis import Api, infer_api
from sidecar.policy.capacity_schema import Capacity
from sidecar.policy.fields import ANONYMOUS, Context
from sidecar.policy.file_model import FileModel
from sidecar.policy.fleet import FleetPolicy, pool_prefill, pool_size
from sidecar.policy.fleet_compiler import capacity_of, fleet_policy, model_policies
from sidecar.policy.gateway import GatewayPolicy
from sidecar.policy.generic_schema import CostBody
from sidecar.policy.identity import JwtPolicy
from sidecar.policy.identity_schema import GatewayBody, JwtBody
from sidecar.policy.model import (
    NO_LIMITS,
    Cors,
    CostPlace,
    Endpoint,
    Learn,
    Limits,
    Order,
    Policy,
    RequestSize,
    ServiceObjectives,
    StoredTenants,
    Tenant,
    Tier,
    Timeouts,
)
from sidecar.policy.problems import Path, Place, PolicyError, Problem, printable
from sidecar.policy.rules import EngineCapacity, PoolRules, Shares, pool_rules
from sidecar.policy.schema import (
    CorsBody,
    EndpointBody,
    LimitsBody,
    PoolFile,
    Slo,
    TenantFile,
    TierBody,
    TierTimeoutsBody,
    TimeoutsBody,
)
from sidecar.policy.source import Document, read
from sidecar.policy.tenant_files import obstacles, tenant_files
from sidecar.policy.validate import entries, pool_problems, sentence, tenant_problems

POOL_FILE = "policy.yaml"
M = TypeVar("M", bound=FileModel)

_SHARE_KEYS = [field.name for field in fields(Shares) if field.name in TierBody.model_fields]
"""Keys of a tier that the rules take as they are."""
_POOL_KEYS = (
    *("engine", "tokenizer", "store", "pool", "on_store_loss", "replicas", "mode", "forward_key", "unguarded"),
    *("background", "max_choices", "unsized", "order", "fair", "usage", "usage_in_traces", "usage_days"),
)
"""Keys of the pool's file that the policy takes as they are."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A policy and the files it came from."""

    policy: Policy
    pool: Document
    tenants: dict[str, Document]

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that was read, the pool's first."""
        return (self.pool.file, *(document.file for document in self.tenants.values()))

    def place(self, path: Path) -> Place | None:
        """Where a value stands: a path in the pool's file, or `("tenants", NAME, ...)` for one in a tenant's."""
        if len(path) > 1 and path[0] == "tenants":
            document = self.tenants.get(str(path[1]))
            return document.place(path[2:]) if document else None
        return self.pool.place(path)


def load(path: str | FilePath) -> Policy:
    """The policy at `path`, a file or a folder with policy.yaml in it. Raises PolicyError with every mistake."""
    return load_files(path).policy


def load_files(path: str | FilePath) -> Loaded:
    """As `load`, and keeps what it read: for who wants to say where something stands."""
    file = FilePath(path)
    is_folder = os.path.isdir(file)
    file = file / POOL_FILE if is_folder else file
    document = read(file)
    if document.is_missing:
        raise PolicyError([_missing(file, is_folder=is_folder)])
    if document.data is None:
        raise PolicyError(document.problems)
    if "tenant" in document.data and "tiers" not in document.data:
        raise PolicyError([document.problem(("tenant",), _A_TENANT)])
    around = Context(tuple(entries(document.data, "tiers")), file.parent)
    tenants, missing = _tenant_documents(document, file.parent)
    pool, problems = _validated(PoolFile, document, around)
    problems += [*pool_problems(document), *missing]
    bodies: list[TenantFile] = []
    for tenant in tenants:
        body, wrong = _validated(TenantFile, tenant, around)
        problems += wrong
        bodies += [body] if body else []
    problems += tenant_problems(document, tenants)
    if problems or pool is None:
        raise PolicyError(_in_order(problems, [document, *tenants]))
    policy = resolve(pool, bodies, _digest([document, *tenants]))
    by_name = {body.tenant: tenant for body, tenant in zip(bodies, tenants, strict=True)}
    return Loaded(policy, document, by_name)


_A_TENANT = "this is a tenant's file; name the policy's own file, or the folder with policy.yaml in it"
_HOW_TO_BEGIN = "`sidecar init` writes a policy for an engine"


def _missing(file: FilePath, *, is_folder: bool) -> Problem:
    """No line: nothing is there to have lines."""
    missing = "there is no such file" if is_folder else "there is no such file or folder"
    return Problem("", f"{missing}; {_HOW_TO_BEGIN}, or name another file or folder", Place(str(file), None))


def _tenant_documents(pool: Document, folder: FilePath) -> tuple[list[Document], list[Problem]]:
    """The files that the pool's `tenants` pattern names, sorted by name; a pattern that names none is a mistake."""
    pattern = (pool.data or {}).get("tenants")
    if not isinstance(pattern, str) or not pattern.strip() or not pattern.isprintable():
        return [], []  # absent, or reported by the pool's own validation
    files, reasons = tenant_files(pattern, folder), obstacles(pattern, folder)
    if not files and not reasons:
        reasons = [f"no file matches {printable(pattern)}; add a tenant's file there, or remove this line"]
    elif not files:
        reasons = [f"no file matches {printable(pattern)}: {reason}" for reason in reasons]
    return [read(FilePath(name)) for name in files], [pool.problem(("tenants",), reason) for reason in reasons]


def _validated(model: type[M], document: Document, around: Context) -> tuple[M | None, list[Problem]]:
    problems = list(document.problems)
    if document.data is None:
        return None, problems
    try:
        return model.model_validate(document.data, context=around), problems
    except ValidationError as refused:
        return None, problems + [_problem(model, document, error) for error in refused.errors(include_url=False)]


def _problem(model: type[FileModel], document: Document, error: ErrorDetails) -> Problem:
    path, message = sentence(model, error)
    return document.problem(path, message)


def _in_order(problems: Iterable[Problem], documents: list[Document]) -> list[Problem]:
    """By file, then by line; what was found twice, once."""
    order = {document.file: index for index, document in enumerate(documents)}

    def where(problem: Problem) -> tuple[int, int]:
        return (order[problem.place.file], problem.place.line or 0) if problem.place else (0, 0)

    return sorted(dict.fromkeys(problems), key=where)


def _digest(documents: list[Document]) -> str:
    """Changes when any file's own name or content does; the folder's place does not count, so replicas agree."""
    whole = hashlib.sha256()
    for document in documents:
        for part in (os.fsencode(FilePath(document.file).name), document.content):
            whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:12]


def resolve(pool: PoolFile, tenants: Sequence[TenantFile], generation: str) -> Policy:
    """The policy of files that were found to be without mistakes; `generation` says which version of them it is."""
    levels = {name: level for level, name in enumerate(pool.tiers)}
    by_key = [(body.keys, tenant_of(body, levels)) for body in tenants]
    thresholds = pool.engine_levels or {}
    fleet = None if pool.engines is None else fleet_policy(pool.engines, pool.engine)
    return Policy(
        rules=_rules(pool, fleet, levels),
        shares=_shares(pool),
        engine_capacity=_engine_capacity(pool, fleet),
        engines=fleet,
        models=model_policies(pool.models),
        learn=_learn(pool),
        tiers=tuple(_tier(name, levels[name], body, pool.timeouts) for name, body in pool.tiers.items()),
        endpoints=MappingProxyType({path: _endpoint(path, body, levels) for path, body in pool.endpoints.items()}),
        tenants=MappingProxyType({key: tenant for keys, tenant in by_key for key in keys or ()}),
        keyless=tuple(tenant for keys, tenant in by_key if not keys),
        jwt=_jwt(pool.jwt),
        gateway=_gateway(pool.gateway),
        cors=_cors(pool.cors),
        stored_tenants=StoredTenants.UNREAD if pool.stored_tenants else StoredTenants.NONE,
        anonymous=_anonymous(pool, levels),
        default_level=levels[str(pool.default_tier)],
        sources=tuple(pool.sources),
        public=None if pool.public is None else tuple(pool.public),
        carrier=pool.forward_priority,
        engine_levels=tuple((thresholds[name], level) for name, level in levels.items() if name in thresholds),
        tier_header=pool.tier_header.encode("ascii"),
        max_body_bytes=pool.max_body,
        max_upload_bytes=pool.max_upload,
        body_timeout_s=float(pool.body_timeout),
        disconnect_grace_s=float(pool.disconnect_grace),
        generation=generation,
        keep_alive_s=_seconds(pool.keep_alive),
        trace_waits_s=float(pool.trace_waits),
        abort_latency_s=_seconds(pool.abort_latency),
        **{key: getattr(pool, key) for key in _POOL_KEYS},
    )


def _rules(pool: PoolFile, fleet: FleetPolicy | None, levels: dict[str, int]) -> PoolRules:
    prefill = None
    if fleet is not None:
        (tokens, requests), prefill = pool_size(fleet.static), pool_prefill(fleet.static)
    else:
        tokens, requests = _capacity(pool).tokens, _capacity(pool).requests
    return pool_rules(
        tokens=tokens,
        requests=requests,
        tiers=_shares(pool),
        promote_after_us=round(pool.aging.promote_after * 1_000_000) if pool.aging else None,
        ceiling=levels[pool.aging.ceiling] if pool.aging else 0,
        max_preemptions=pool.max_preemptions,
        prefill=prefill,
        floor_of_reserve=pool.fair if pool.order is Order.GAIN else Fraction(1),
        is_by_gain=pool.order is Order.GAIN,
    )


def _shares(pool: PoolFile) -> tuple[Shares, ...]:
    return tuple(
        Shares(
            name=name,
            preempt_after_us=_microseconds(body.preempt_after),
            **{key: getattr(body, key) for key in _SHARE_KEYS},
        )
        for name, body in pool.tiers.items()
    )


def _engine_capacity(pool: PoolFile, fleet: FleetPolicy | None) -> EngineCapacity | None:
    capacity = None if fleet is not None else capacity_of(_capacity(pool))
    return capacity if isinstance(capacity, EngineCapacity) else None


def _learn(pool: PoolFile) -> Learn:
    capacity = _capacity(pool) if pool.engines is None else pool.engines.capacity
    return capacity.learn


def _capacity(pool: PoolFile) -> Capacity:
    assert pool.capacity is not None  # `validate` refuses a pool without one that has no engines either
    return pool.capacity


def _tier(name: str, level: int, body: TierBody, timeouts: TimeoutsBody) -> Tier:
    return Tier(
        name=name,
        level=level,
        default_output_tokens=body.default_output_tokens,
        max_waiting=body.queue.max_requests if body.queue else None,
        max_wait_s=_seconds(body.queue.max_wait) if body.queue else None,
        max_request_tokens=body.max_request_tokens,
        slo=_promises(body.slo) if body.slo else ServiceObjectives(),
        gain_weight=body.gain.weight if body.gain else 1,
        timeouts=_timeouts(body.timeouts, timeouts),
    )


def _timeouts(own: TierTimeoutsBody | None, pool: TimeoutsBody) -> Timeouts:
    of_tier = own or TierTimeoutsBody()
    return Timeouts(
        float(of_tier.first_byte or pool.first_byte),
        float(of_tier.between_bytes or pool.between_bytes),
        float(of_tier.total or pool.total),
    )


def _promises(slo: Slo) -> ServiceObjectives:
    return ServiceObjectives(_seconds(slo.ttft), _seconds(slo.queue_wait), _seconds(slo.starvation), _seconds(slo.tpot))


def _seconds(duration: Fraction | None) -> float | None:
    return None if duration is None else float(duration)


def _microseconds(duration: Fraction | None) -> int | None:
    return None if duration is None else round(duration * 1_000_000)


def _endpoint(path: str, body: EndpointBody, levels: dict[str, int]) -> Endpoint:
    api = body.api or infer_api(body.forward_to or path)
    assert isinstance(api, Api)  # `validate` refuses a path that does not say
    level = None if body.tier is None else levels[body.tier]
    size = None if body.tokens is None else RequestSize(body.tokens.base, body.tokens.per_kilobyte)
    return Endpoint(path, api, level, body.forward_to, size, None if body.cost is None else _cost(body.cost))


def _cost(body: CostBody) -> CostPlace:
    header, member = body.header, body.member
    return CostPlace(None if header is None else header.encode(), None if member is None else member.encode())


def tenant_of(body: TenantFile, levels: Mapping[str, int]) -> Tenant:
    """The tenant that a file, or a record of the store, describes. `levels` are the tiers' by their names."""
    return Tenant(
        name=body.tenant,
        level=levels[body.tier],
        max_level=levels[body.max_tier or body.tier],
        weight=body.weight,
        limits=_limits(body.limits),
        downgrade_level=levels[body.over_limit] if body.over_limit else None,
    )


def _jwt(body: JwtBody | None) -> JwtPolicy | None:
    if body is None:
        return None
    return JwtPolicy(
        issuer=body.issuer,
        audience=body.audience,
        key_set=body.jwks,
        tenant_claim=body.tenant_claim,
        tier_claim=body.tier_claim,
        clock_skew_s=float(body.clock_skew),
        algorithms=tuple(body.algorithms),
    )


def _gateway(body: GatewayBody | None) -> GatewayPolicy | None:
    if body is None:
        return None
    tier_header = None if body.tier_header is None else body.tier_header.encode("ascii")
    return GatewayPolicy(body.tenant_header.encode("ascii"), tier_header, tuple(body.addresses))


def _cors(body: CorsBody | None) -> Cors | None:
    if body is None:
        return None
    return Cors(tuple(body.origins), None if body.headers is None else tuple(body.headers))


def _limits(body: LimitsBody | None) -> Limits:
    if body is None:
        return NO_LIMITS
    return Limits(
        requests_per_minute=body.requests_per_minute,
        tokens_per_minute=body.tokens_per_minute,
        concurrent_requests=body.concurrent_requests,
        max_output_tokens=body.max_output_tokens,
        burst_us=round(body.burst * 1_000_000),
        tokens_per_day=body.tokens_per_day,
        tokens_per_month=body.tokens_per_month,
    )


def _anonymous(pool: PoolFile, levels: dict[str, int]) -> Tenant | None:
    if pool.anonymous is None:
        return None
    level = levels[pool.anonymous]
    return Tenant(ANONYMOUS, level=level, max_level=level)


def shipped_policies() -> FilePath:
    """The folder with `policy.yaml` and `tenants/`. Raises FileNotFoundError where a packager left it out."""
    package = FilePath(__file__).resolve().parent.parent
    for folder in (package / "policies", package.parent / "policies"):
        if (folder / "policy.yaml").is_file():
            return folder
    raise FileNotFoundError("the example policies are missing from this installation; pass a policy of your own")
