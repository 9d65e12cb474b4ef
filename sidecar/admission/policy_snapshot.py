"""Immutable policy snapshot, compiled for requests.

A request takes the current snapshot when it arrives and uses it until it ends. A new policy becomes a new snapshot; an
existing snapshot never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.admission.model_names import ModelNames
from sidecar.admission.request_path import by_path
from sidecar.engines.base import AbortLatency, Engine, Routes, abort_latency
from sidecar.events import Headers
from sidecar.gain.token_deadlines import Objective
from sidecar.identity.classify import API_KEY_HEADERS, Classifier
from sidecar.identity.tokens import TokenVerifier
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.choices import Mode, StreamUsage
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.policy.tier import Tier

AUTHORIZATION = b"authorization"
KEY_HEADERS = (AUTHORIZATION, *API_KEY_HEADERS)
BEARER = b"Bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """Rules for API keys on the way to the engine. `engine_key` is the engine's own key, None where it has none.

    A tenant's key gives access to the tenant's share of the pool, and an engine would write it into its logs. So the
    key is removed, unless the policy says `forward_key: true` (`is_forwarded`). Then the client's headers pass
    unchanged, and the engine's key is not added.

    `of_gateway` are the headers of a gateway that names tenants: no engine gets them, whoever sent them. `added` are
    those that the engine gets instead.
    """

    is_forwarded: bool = False
    engine_key: bytes | None = field(default=None, repr=False)
    of_gateway: Sequence[bytes] = ()
    added: Headers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Makes the headers that the engine gets instead."""
        has_none = self.is_forwarded or self.engine_key is None
        added = () if has_none else ((AUTHORIZATION, BEARER + (self.engine_key or b"")),)
        object.__setattr__(self, "added", added)

    def stripped(self, headers: Mapping[bytes, bytes]) -> Sequence[bytes]:
        """The names of the client's headers that hold, or may hold, a tenant's key: they must not be forwarded.

        All of them, where several are there: clients of two providers send the same key in each. `Authorization` with
        another scheme, such as Basic, holds no tenant's key and stays.
        """
        if self.is_forwarded:
            return [*filter(headers.__contains__, self.of_gateway)]
        names = [*filter(headers.__contains__, (*self.of_gateway, *API_KEY_HEADERS))]
        if headers.get(AUTHORIZATION, b"").lstrip()[:6].lower() == b"bearer":
            names.append(AUTHORIZATION)
        return names


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """A policy and everything that is computed from it once. Lists by level begin with the most important tier.

    `endpoints` are those that are guarded, `named_endpoints` all of them, as `request_path.find_endpoint` takes them.
    `priorities` are the values that the engine gets, `tier_names` are header values. `are_preemptible` says whose
    requests' room may be taken back before their first byte, `are_preemptible_by_rule` whose might, if the app may be
    called twice. `abort_latency` is how long the engine computes on after an aborted request. `objectives` are the
    tiers' own; none at all where no tier has one: then no gain is measured. `are_guarded` says whose
    requests are reported to the pool as having met their objective or missed it: no one's in `mode: observe`.
    `is_observing` is `mode: observe`, `is_passing` is `mode: pass`, which guards no endpoint. `asks_usage_of` is the
    engine that is asked for the usage of streams, None where no one asks.
    """

    policy: Policy
    endpoints: Mapping[str, Endpoint]
    named_endpoints: Mapping[str, Endpoint]
    classifier: Classifier
    names: ModelNames
    estimator: Estimator
    credentials: Credentials
    priorities: tuple[int | float, ...]
    tier_names: tuple[bytes, ...]
    are_preemptible: tuple[bool, ...]
    are_preemptible_by_rule: tuple[bool, ...]
    abort_latency: AbortLatency
    routes: Routes
    objectives: tuple[Objective | None, ...] = ()
    are_guarded: tuple[bool, ...] = ()
    is_observing: bool = False
    is_passing: bool = False
    asks_usage_of: Engine | None = None


def policy_snapshot(
    policy: Policy,
    dialect: Engine,
    estimator: Estimator,
    engine_key: bytes | None,
    *,
    is_proxied: bool = False,
    repeats: bool = True,
    tokens: TokenVerifier | None = None,
) -> PolicySnapshot:
    """Compiles a policy. Raises whatever is wrong with it, before a request has seen it.

    `engine_key` replaces the tenant's key. `is_proxied` says that the engine is another process, after a reverse proxy.
    `repeats` says that the app may be called twice for one request. `tokens` verifies the signed tokens of tenants.
    """
    objectives = tuple(objective_for(tier) for tier in policy.tiers)
    named_endpoints = by_path(policy.endpoints)
    credentials = Credentials(policy.forward_key, engine_key, () if policy.gateway is None else policy.gateway.headers)
    return PolicySnapshot(
        policy=policy,
        endpoints={} if policy.mode is Mode.PASS else named_endpoints,
        named_endpoints=named_endpoints,
        classifier=Classifier(policy, dialect, tokens),
        names=ModelNames(policy),
        estimator=estimator,
        credentials=credentials,
        priorities=tuple(dialect.priority(tier.level, len(policy.tiers)) for tier in policy.tiers),
        tier_names=tuple(tier.name.encode() for tier in policy.tiers),
        are_preemptible=tuple(repeats and policy.rules.is_preemptible(tier.level) for tier in policy.tiers),
        are_preemptible_by_rule=tuple(policy.rules.is_preemptible(tier.level) for tier in policy.tiers),
        abort_latency=abort_latency(dialect, policy.abort_latency_s, is_proxied=is_proxied),
        routes=policy.engine.routes,
        objectives=objectives if any(objectives) else (),
        are_guarded=tuple(tier.hold > 0 and policy.mode is Mode.ENFORCE for tier in policy.tiers),
        is_observing=policy.mode is Mode.OBSERVE,
        is_passing=policy.mode is Mode.PASS,
        asks_usage_of=dialect if policy.usage is StreamUsage.ASK and dialect.usage_options else None,
    )


def objective_for(tier: Tier) -> Objective | None:
    """The objective that a tier's gain is measured by: None where it has not both times."""
    slo = tier.slo
    if slo.ttft_s is None or slo.tpot_s is None:
        return None
    return Objective(round(slo.ttft_s * 1e6), round(slo.tpot_s * 1e6), tier.gain.weight)
