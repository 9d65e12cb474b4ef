"""Request of a lease from Python, checked against the policy."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from math import isfinite
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from sidecar.admission.intake import SizedRequest
from sidecar.admission.model_names import ModelNames
from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.errors import InvalidHeader, TenantsUnavailable
from sidecar.identity.classify import Classification, Fallback
from sidecar.payload.decode import LARGEST_COUNT, Payload
from sidecar.policy.choices import StoredTenants, TierSource
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Tenant

PATH = "/python"
"""In place of an HTTP request's, in traces, metrics and pages."""
INTERNAL = "internal"
"""The tenant of a lease that names none: the operator's own work, in any tier, without limits."""


class LeaseRequest(NamedTuple):
    """Arguments of `Admission.lease`, see there."""

    tier: str | None
    tokens: int
    tenant: str | None
    requests: int
    prompt_tokens: int
    max_wait_s: float | None
    is_preemptible: bool
    model: str | None
    deadline: datetime | timedelta | None

    def sized(self, policy: Policy, now_us: int, names: ModelNames | None = None) -> SizedRequest:
        """The request of a pool with this policy, as the intake makes it of a body at `now_us` of the pool's clock.

        Raises ValueError for what cannot be, and TenantsUnavailable where the tenants in the store were not read yet.
        """
        refuse_other_counts("tokens", self.tokens, at_least=1)
        refuse_other_counts("requests", self.requests, at_least=1)
        refuse_other_counts("prompt_tokens", self.prompt_tokens, at_least=0)
        if self.max_wait_s is not None and not _is_duration(self.max_wait_s):
            raise ValueError(f"max_wait_s: {self.max_wait_s!r} is no number of seconds; write 0 or more, or None")
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"model: {self.model!r} is no name; write a text, or None")
        tenant, source = self._tenant(policy), TierSource.KEY if self.tier is None else Fallback.LEASE
        level = self._level(policy, tenant)
        if tenant.models is not None and not (self.model and tenant.may_use(self.model)):
            raise ValueError(f"model: tenant {tenant.name} may not use {self.model!r}; {_one_of(tenant.models)}")
        request = SizedRequest(
            headers={},
            payload=Payload(self.model, stream=False),
            classification=Classification(tenant, level, source, None, ()),
            api=Api.GENERIC,
            path=PATH,
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            assumed_output=max(0, self.tokens - self.prompt_tokens),
            requests=self.requests,
            max_wait_s=self.max_wait_s,
            hits=(),
            deadline_us=self._deadline_us(policy, level, now_us),
        )
        return request if names is None else request.with_charges(names)

    def usage(self, tokens: int | None) -> UsageReader:
        """The usage of an answer that says so many tokens of prompt and output; None: it says nothing."""
        usage = UsageReader(has_begun=True)
        if tokens is not None:
            of_prompt = min(self.prompt_tokens, tokens)
            usage.counted(of_prompt, tokens - of_prompt)
        return usage

    def _tenant(self, policy: Policy) -> Tenant:
        if self.tenant is None:
            return Tenant(name=INTERNAL, level=policy.default_level, max_level=0)
        found = policy.named.get(self.tenant) if isinstance(self.tenant, str) else None
        if found is not None:
            return found
        if policy.anonymous is not None and policy.anonymous.name == self.tenant:
            return policy.anonymous
        if policy.stored_tenants is StoredTenants.UNREAD:
            raise TenantsUnavailable("the tenants in the store have not been read yet; ask again", retry_after_s=1)
        raise ValueError(f"tenant: the policy has no {self.tenant!r}; {_one_of(sorted(policy.named))}")

    def _level(self, policy: Policy, tenant: Tenant) -> int:
        if self.tier is None:
            return tenant.level
        level = policy.level_for(self.tier)
        names = [tier.name for tier in policy.tiers]
        if level is None:
            raise ValueError(f"tier: the policy has no {self.tier!r}; {_one_of(names)}")
        if level < tenant.max_level:
            raise ValueError(
                f"tier: tenant {tenant.name} may not ask for {self.tier!r}, as its `max_tier` says; "
                f"{_one_of(names[tenant.max_level :])}"
            )
        return level

    def _deadline_us(self, policy: Policy, level: int, now_us: int) -> int | None:
        """Its deadline by the pool's clock, at most as late as the tier allows."""
        deadline = self.deadline
        if deadline is None:
            return None
        from sidecar.admission.deadline import latest_deadline_us

        if isinstance(deadline, timedelta):
            left_s = deadline.total_seconds()
        elif isinstance(deadline, datetime) and deadline.utcoffset() is not None:
            left_s = deadline.timestamp() - time.time()
        else:
            raise ValueError(f"deadline: {deadline!r} is no timedelta, and no datetime with a zone; write one of them")
        try:
            return latest_deadline_us(policy, level, now_us + round(left_s * 1e6), now_us)
        except InvalidHeader as none:
            raise ValueError(none.message) from None


def _one_of(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" or one of {len(shown) - 12} more" if len(shown) > 12 else ""
    return f"write one of {', '.join(shown[:12])}{more}" if shown else "it has no tenants at all"


def _is_duration(seconds: object) -> bool:
    try:
        return isinstance(seconds, int | float) and seconds >= 0 and isfinite(seconds)
    except OverflowError:
        return False


def refuse_other_counts(name: str, value: object, *, at_least: int) -> None:
    """Raises ValueError for all but a whole number that a store counts exactly, with many others."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= LARGEST_COUNT:
        raise ValueError(f"{name}: {value!r} is no whole number of at least {at_least} and of at most {LARGEST_COUNT}")


# -- Stand-in for the engine in a process that has none: its own code calls the engine.


class NoEngineHere:
    """An ASGI app without any path, and without a lifespan."""

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
