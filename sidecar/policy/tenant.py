"""Tenants of the policy, in a file of their own or in the store, and their API keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, GetJsonSchemaHandler, ValidationInfo, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from sidecar.policy import fields as of
from sidecar.policy.declared import OrDefault, ReadAs, declared, key, values
from sidecar.policy.keys import PREFIX, read_hash
from sidecar.policy.problems import quoted


@dataclass(frozen=True, slots=True)
@declared
class Limits:
    """A tenant's own limits. Each is unlimited if left out."""

    requests_per_minute: of.RateCount | None = key(None, "Requests per minute.", 600)
    tokens_per_minute: of.RateCount | None = key(None, "Tokens per minute, prompts and answers.", "200k")
    tokens_per_day: of.BudgetCount | None = key(
        None, "Tokens per day, prompts and answers, from midnight to midnight in UTC. It needs a store.", "20M"
    )
    tokens_per_month: of.BudgetCount | None = key(None, "Tokens per calendar month, in UTC. It needs a store.", "400M")
    concurrent_requests: of.PositiveCount | None = key(None, "Requests at once, waiting or running.", 32)
    max_output_tokens: of.PositiveCount | None = key(None, "Tokens of one answer.", 8192)
    burst_us: of.Burst = key(
        "60s",  # what a client reads out of `x-ratelimit-limit-*`: that so many may come, at once too
        "How much of its allowance may come at once: that of so long.",
        "10s",
    )

    @property
    def are_counted(self) -> bool:
        """True if there is anything that a pool has to count. It counts no budgets."""
        return (
            self.requests_per_minute is not None
            or self.tokens_per_minute is not None
            or self.concurrent_requests is not None
        )

    @property
    def have_budgets(self) -> bool:
        """True if the tenant has a budget of tokens for a day or a month, in UTC."""
        return self.tokens_per_day is not None or self.tokens_per_month is not None


NO_LIMITS = Limits()
"""The limits of every tenant that has none."""


_DAY_S = 24 * 3600
_LEAST_DIGITS = 8
"""Of a hash that stands for its key: the keys of a tenant hardly share so many."""


@dataclass(frozen=True, slots=True)
@declared
class TenantKey:
    """One API key of a tenant. Its hash alone may be written in place of the mapping."""

    digest: of.KeyHash = key(..., "Its hash, from `sidecar keys new`.", "sha256:...", name="hash")
    name: of.KeyName | None = key(None, "Its name in the log, in spans and in `sidecar keys list`.", "ci")
    expires_s: of.Expiry | None = key(
        None,
        "Its last day, which ends at midnight in UTC, or the time of its end, with a zone. Default: it has no end.",
        "2027-01-31",
    )
    level: of.Level | None = key(
        None,
        "The tier of its requests that name none, up to the tenant's `max_tier`. Default: the tenant's `tier`.",
        "batch",
        name="tier",
    )

    @property
    def title(self) -> str:
        """Its name, or the beginning of its hash."""
        return self.name or f"{PREFIX}{self.digest[:12]}"

    @property
    def last(self) -> str | None:
        """The last day on which it counts, in UTC, or the time from which it does not; None where it has no end."""
        if self.expires_s is None:
            return None
        if self.expires_s % _DAY_S == 0:
            return datetime.fromtimestamp(self.expires_s - _DAY_S, timezone.utc).date().isoformat()
        return datetime.fromtimestamp(self.expires_s, timezone.utc).isoformat().replace("+00:00", "Z")


class UnknownKey(LookupError):
    """A tenant has no such key, or several; the message says what would be right."""


def find_key(keys: Sequence[TenantKey], called: str) -> TenantKey:
    """The key of a name, or whose hash begins so. Raises UnknownKey."""
    digits = called.lower().removeprefix(PREFIX)
    named = [one for one in keys if one.name == called]
    found = named or [one for one in keys if len(digits) >= _LEAST_DIGITS and one.digest.startswith(digits)]
    if len({one.digest for one in found}) == 1:
        return found[0]
    if found:
        raise UnknownKey(f"the hashes of {len(found)} keys begin with {quoted(called)}; write more of it")
    raise UnknownKey(f"no key is called {quoted(called)}, and no hash begins so; `sidecar keys list` has them")


class _HashToo:
    """Marks a key in whose place its hash may stand."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [dict(of.KEY_HASH), handler(core)]}


def _as_key(written: object) -> object:
    return written if isinstance(written, dict | TenantKey) else TenantKey(read_hash(written))


def _named_once(keys: tuple[TenantKey, ...]) -> tuple[TenantKey, ...]:
    names: set[str] = set()
    for one in dict.fromkeys(keys):  # one that stands there twice is another mistake
        if one.name in names:
            raise ValueError(f"two keys are called {quoted(one.name)}; give each a name of its own")
        names |= {one.name} if one.name else set()
    return keys


_Keys = Annotated[
    tuple[Annotated[TenantKey, BeforeValidator(_as_key), _HashToo()], ...],
    of.listed('keys: ["sha256:..."] as `sidecar keys new` prints it', or_empty=True),
    AfterValidator(_named_once),
]


@dataclass(frozen=True, slots=True, kw_only=True)
@declared
class Tenant:
    """One tenant: who it is, and what it may ask for."""

    name: of.TenantName = key(..., "The tenant's name, unique in the pool.", "acme", name="tenant")
    keys: _Keys | None = key(
        None,
        "Hashes of its API keys, from `sidecar keys new`, or mappings with more about each. May be left out where the "
        "pool's file has `jwt` or `gateway`; `[]` where the app names the tenant.",
        ["sha256:..."],
        compare=False,
    )
    level: of.Level = key(..., "The tier of its requests that name none.", "normal", name="tier")
    max_level: Annotated[int, ReadAs(of.Level | None)] = key(
        None,
        "The best tier it may ask for; more is clamped. Default: its tier.",
        "high",
        name="max_tier",
        is_always_read=True,
    )
    weight: of.PositiveCount = key(1, "Its share against the other tenants of its tier.", 2)
    limits: Annotated[Limits, OrDefault(NO_LIMITS)] = key(None, "Its own limits. Default: none.")
    downgrade_level: of.OverLimit | None = key(
        None, "Over a limit: `reject` (the default), or {downgrade: TIER}.", name="over_limit"
    )

    @field_validator("max_level")
    @classmethod
    def _max_tier_covers_tier(cls, best: int | None, info: ValidationInfo) -> int:
        tiers, level = of.tier_names(info), int(info.data.get("level", 0))
        if best is not None and best > level and "level" in info.data:
            raise ValueError(
                f"less important than its tier {tiers[level]}; write {tiers[level]} or a more important one"
            )
        best = level if best is None else best
        above = [one for one in info.data.get("keys") or () if one.level is not None and one.level < best]
        if above and "level" in info.data:
            raise ValueError(
                f"less important than {tiers[above[0].level]}, the tier of key {above[0].title}; "
                f"write {tiers[above[0].level]} here, or a tier up to {tiers[best]} there"
            )
        return best

    @field_validator("downgrade_level")
    @classmethod
    def _downgrade_goes_down(cls, lower: int | None, info: ValidationInfo) -> int | None:
        tiers, level = of.tier_names(info), info.data.get("level")
        if lower is not None and level is not None and tiers and lower <= level:
            raise ValueError(f"not less important than its tier {tiers[level]}; write a tier below it, or reject")
        return lower

    @property
    def key_name(self) -> str | None:
        """The name of the key with which it asks; None for a key without one, and where no key names the tenant."""
        return None

    @property
    def whole(self) -> Tenant:
        """The tenant with whatever key."""
        return self

    def with_key(self, one: TenantKey) -> Tenant:
        """The tenant as it asks with one of its keys."""
        if one == TenantKey(one.digest):
            return self
        level = self.level if one.level is None else one.level
        return KeyHolder(**{**values(self), "level": level}, key=one, tenant=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder(Tenant):
    """A tenant as it asks with a key that has more than its hash: a name, an end, or a tier, which is the `level`."""

    key: TenantKey
    tenant: Tenant

    @property
    def key_name(self) -> str | None:
        """See `Tenant`."""
        return self.key.name

    @property
    def whole(self) -> Tenant:
        """See `Tenant`."""
        return self.tenant
