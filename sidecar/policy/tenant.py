"""Tenants of the policy, in a file of their own or in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, NamedTuple

from pydantic import ValidationInfo, field_validator, model_validator

from sidecar.policy import fields as of
from sidecar.policy.choices import ShownUsers
from sidecar.policy.declared import OrDefault, ReadAs, declared, key, values
from sidecar.policy.hours import ByHours, HoursText, not_too_many
from sidecar.policy.tenant_keys import TenantKey, TenantKeys


@dataclass(frozen=True, slots=True)
@declared
class RateLimits:
    """Limits of what comes in a minute, and at once. Each is unlimited if left out."""

    requests_per_minute: of.RateCount | None = key(None, "Requests per minute.", 600)
    tokens_per_minute: of.RateCount | None = key(None, "Tokens per minute, prompts and answers.", "200k")
    concurrent_requests: of.PositiveCount | None = key(None, "Requests at once, waiting or running.", 32)
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
    def budgets(self) -> Mapping[str, int]:
        """Tokens by `day` and `month`, in UTC."""
        return {}


@dataclass(frozen=True, slots=True)
@declared
class AccountLimits(RateLimits):
    """Limits of one account, such as a tenant's at one model. Each is unlimited if left out."""

    tokens_per_day: of.BudgetCount | None = key(None, "Tokens per day, in UTC. It needs a store.", "20M")
    tokens_per_month: of.BudgetCount | None = key(None, "Tokens per calendar month, in UTC. It needs a store.", "400M")

    @property
    def budgets(self) -> Mapping[str, int]:
        """See `RateLimits`."""
        found = {"day": self.tokens_per_day, "month": self.tokens_per_month}
        return {period: tokens for period, tokens in found.items() if tokens is not None}


_ByModel = Annotated[dict[of.ModelName, AccountLimits], of.mapped("{llama-70b: {tokens_per_minute: 50k}}")]


def _by_model(models: dict[str, AccountLimits] | None) -> Mapping[str, AccountLimits]:
    return models or {}


@dataclass(frozen=True, slots=True)
@declared
class LimitsHours:
    """Limits of a tenant in some hours. A key that is left out is as at other times."""

    requests_per_minute: of.RateCount | None = key(None, "Requests per minute.", 60)
    tokens_per_minute: of.RateCount | None = key(None, "Tokens per minute, prompts and answers.", "20k")
    concurrent_requests: of.PositiveCount | None = key(None, "Requests at once, waiting or running.", 4)
    max_output_tokens: of.PositiveCount | None = key(None, "Tokens of one answer.", 1024)


_HOURS = of.mapped('{"mon-fri 08:00-18:00 Europe/Berlin": {requests_per_minute: 60}}')


@dataclass(frozen=True, slots=True)
@declared
class Limits(AccountLimits):
    """A tenant's own limits. Each is unlimited if left out."""

    max_output_tokens: of.PositiveCount | None = key(None, "Tokens of one answer.", 8192)
    models: Annotated[Mapping[str, AccountLimits], ReadAs(_ByModel | None, _by_model)] = key(
        None,
        "Limits of its requests to single models of the pool's file, which count in these, too.",
        {"llama-70b": {"tokens_per_minute": "50k"}},
    )
    hours: Annotated[
        ByHours[LimitsHours], ReadAs(Annotated[dict[HoursText, LimitsHours], _HOURS] | None, not_too_many)
    ] = key(
        None,
        "Other limits by days and hours, as those of a tier.",
        {"mon-fri 08:00-18:00 Europe/Berlin": {"requests_per_minute": 60}},
    )


NO_LIMITS = Limits()
"""The limits of every tenant that has none."""
NO_RATE_LIMITS = RateLimits()


class Account(NamedTuple):
    """An account that a request is charged to: its tenant's own, or one beside it. It is charged to all or to none.

    A tenant's own account has the tenant's name. One beside it has more after that, and a space between them, which no
    tenant's name has: such as `acme model llama-70b`.
    """

    name: str
    limits: RateLimits
    most: int = 0
    """Of its kind so many are kept, those that were used last; 0 for all."""


def account_text(name: str) -> str:
    """An account as a sentence names it: `tenant acme (model llama-70b)`."""
    tenant, _, beside = name.partition(" ")
    return f"tenant {tenant} ({beside})" if beside else f"tenant {tenant}"


@dataclass(frozen=True, slots=True)
@declared
class Users:
    """A tenant's end users: where a request names one, and what each may have of the tenant's share."""

    sources: of.UserSources = key(
        ["header x-user-id", "body user", "body safety_identifier", "body metadata.user_id"],
        "Where a request names its user: `header NAME` or `body FIELD`, the first that does.",
        ["header x-user-id", "body user"],
        name="from",
    )
    fair: of.Flag = key(
        True,
        "Users who wait take turns, by tokens. All requests that name none count as one user.",
    )
    limits: Annotated[RateLimits, OrDefault(NO_RATE_LIMITS)] = key(
        None, "Limits of each user, beside the tenant's own."
    )
    most: of.PositiveCount = key(
        "10k",  # a few MB in the store
        "The most users whose use of their limits is remembered: those who came last.",
        "50k",
        name="max",
    )
    shown: Annotated[ShownUsers, of.Choice(ShownUsers)] = key(
        "hashed", "How explain and the log show a user: by a hash, or by the name."
    )

    @model_validator(mode="after")
    def _do_something(self) -> Users:
        if not (self.fair or self.limits.are_counted):
            raise ValueError(
                "with `fair: false` and without limits it does nothing; write one of them, or leave it out"
            )
        return self

    def account(self, tenant: str, user: str) -> Account:
        """A user's account, beside its tenant's."""
        return Account(f"{tenant} user {user or 'unknown'}", self.limits, self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
@declared
class Tenant:
    """One tenant: who it is, and what it may ask for."""

    name: of.TenantName = key(..., "The tenant's name, unique in the pool.", "acme", name="tenant")
    keys: TenantKeys | None = key(
        None,
        "Its API keys. May be left out where the pool's file has `jwt` or `gateway`; `[]` where the app names the "
        "tenant.",
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
    models: Annotated[tuple[str, ...] | None, ReadAs(of.ModelPatterns)] = key(
        ["*"],  # a list that names none is a mistake: it may have been meant as either
        "The models it may use, by the names that clients send; `*` is any characters. Another is a 404.",
        ["llama-70b", "qwen*"],
    )
    limits: Annotated[Limits, OrDefault(NO_LIMITS)] = key(None, "Its own limits.")
    downgrade_level: of.OverLimit | None = key(
        None, "Over a limit: `reject` (the default), or {downgrade: TIER}.", name="over_limit"
    )
    users: Users | None = key(None, "Its end users: turns and limits of their own.")

    @property
    def account(self) -> Account:
        """The account of all that it sends."""
        return Account(self.name, self.limits)

    def account_at(self, model: str) -> Account | None:
        """The account of what it sends to a model; None where that has no limits of its own."""
        limits = self.limits.models.get(model)
        return None if limits is None else Account(f"{self.name} model {model}", limits)

    @property
    def accounts(self) -> Sequence[Account]:
        """All that the policy names: its own, and those of models."""
        return [self.account, *(it for model in self.limits.models if (it := self.account_at(model)) is not None)]

    @property
    def has_budgets(self) -> bool:
        """True if an account of it has a budget."""
        return any(account.limits.budgets for account in self.accounts)

    def may_use(self, model: str) -> bool:
        """True if its requests may name this model. Names are compared as they are, also in their case."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)

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

    def with_key(self, one: TenantKey) -> Tenant:
        """The tenant as it asks with one of its keys."""
        if one == TenantKey(one.digest):
            return self
        level = self.level if one.level is None else one.level
        return KeyHolder(**{**values(self), "level": level}, key=one)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder(Tenant):
    """A tenant as it asks with a key that has more than its hash: a name, an end, or a tier, which is the `level`."""

    key: TenantKey

    @property
    def key_name(self) -> str | None:
        """See `Tenant`."""
        return self.key.name
