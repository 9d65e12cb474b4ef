"""What a door goes by, in one immutable value: a request takes it as it comes, and keeps it to its end.

A policy that replaces another while requests are under way is a new value beside the old one, never a change of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sidecar.asgi.understanding import Intake, Understood, longest_wait_s
from sidecar.classify import Classifier
from sidecar.engines.base import AbortLatency, Engine, Routes, abort_latency
from sidecar.policy.model import Endpoint, Policy
from sidecar.tokens import Estimator


@dataclass(frozen=True, slots=True)
class Ruling:
    """A policy, ready for requests. `priorities` are what the engine is told, `tier_names` header values, by level.

    `abort_latency` is how long the engine computes on for a request that it did not answer to the end.
    """

    policy: Policy
    endpoints: Mapping[str, Endpoint]
    intake: Intake
    priorities: tuple[int | float, ...]
    tier_names: tuple[bytes, ...]
    abort_latency: AbortLatency
    routes: Routes

    def longest_wait_s(self, understood: Understood) -> float | None:
        """The longest wait of a request at its tier, in seconds. Raises InvalidHeader for what is no duration."""
        return longest_wait_s(understood.headers, self.policy.tiers[understood.classification.level].max_wait_s)

    def is_preemptible(self, understood: Understood) -> bool:
        """Whether the room of a request may be taken back before its first byte."""
        # The engine would compute a background response to its end, and a second time beside it.
        return not understood.payload.background and self.policy.rules.is_preemptible(understood.classification.level)


def ruling(
    policy: Policy, dialect: Engine, estimator: Estimator, engine_key: bytes | None, *, is_proxied: bool = False
) -> Ruling:
    """The ruling by a policy. `engine_key` goes on to the engine in place of the tenant's.

    `is_proxied`: the app is a reverse proxy, and the engine is another process.

    Whatever can be wrong with the policy raises here, before any request has seen it.
    """
    return Ruling(
        policy=policy,
        endpoints=policy.endpoints,
        intake=Intake(policy, Classifier(policy, dialect), estimator, engine_key),
        priorities=tuple(dialect.priority(tier.level, len(policy.tiers)) for tier in policy.tiers),
        tier_names=tuple(tier.name.encode() for tier in policy.tiers),
        abort_latency=abort_latency(dialect, policy.abort_latency_s, is_proxied=is_proxied),
        routes=policy.engine.routes,
    )
