"""Differences between two policies in an operator's words, for the log of a reload, and which of them need a restart.

Every field of a policy is compared. A field that an operator knows by another name or unit is described that way. A
tenant's keys are never shown, only their number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

from sidecar.durations import policy_duration
from sidecar.engines.base import Engine
from sidecar.policy.capacity import Capacity
from sidecar.policy.cost import TokenCost
from sidecar.policy.declared import written_name
from sidecar.policy.fleet import FleetPolicy
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED, PoolRules
from sidecar.policy.store import StoreAddress
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_keys import TenantKey
from sidecar.policy.tier import Aging

MOST_NAMED = 20
"""Most differences that are listed one by one, so that a roll-out of a thousand tenants is still one log line."""

_PARTS = {"speed": 1000, "weight_percent": 100}
"""Numbers that are counted in parts of one."""
_ABOUT = frozenset(
    ("rules", "capacity", "engines", "models", "aliases", "tiers", "timeouts", "endpoints", "named", "generation")
)
"""Fields of a policy that are described elsewhere."""
_WHOLE = Aging, StoreAddress, Tenant, TokenCost
"""Mappings that are compared as one value."""
_LEVELS = frozenset({"default_level", "level", "max_level", "downgrade_level"})


def differences(before: Policy, after: Policy) -> list[str]:
    """One phrase for each, the pool's before its tiers', its tiers' before its tenants'."""
    return list(_Telling(before, after).describe_changes())


def describe_changes(before: Policy, after: Policy) -> str:
    """The changes in one line, of bounded length."""
    found = differences(before, after)
    if not found:
        return "nothing that counts is different"
    more = len(found) - MOST_NAMED
    return "; ".join([*found[:MOST_NAMED], *([f"and {more} more differences"] if more > 0 else [])])


class _Telling:
    """Two policies beside each other."""

    def __init__(self, before: Policy, after: Policy) -> None:
        self._before, self._after = before, after

    def describe_changes(self) -> Iterator[str]:
        """Everything, by what it is about."""
        before, after = self._before, self._after
        yield from self._capacity(before.engine_capacity, after.engine_capacity)
        capacity = "capacity" if after.engines is None else "engines capacity"
        yield from _compare(f"{capacity} learn", before.learn.value, after.learn.value)
        yield from self._rules(before.rules, after.rules)
        yield from self._record("", before, after, but=_ABOUT)
        yield from self._fleet(before.engines, after.engines)
        yield from self._compare_named("model", before.models, after.models)
        yield from self._compare_named("alias", before.aliases, after.aliases)
        for tiers in zip(before.tiers, after.tiers, strict=False):
            yield from self._record(f"tier {tiers[0].name} ", *tiers, but={"level"})
        yield from self._compare_named("endpoint", before.endpoints, after.endpoints)
        yield from self._tenants(before.named, after.named)

    def _capacity(self, before: Capacity | None, after: Capacity | None) -> Iterator[str]:
        if before is not None and after is not None:
            yield from self._record("capacity ", before, after, but={"learn"})

    def _rules(self, before: PoolRules, after: PoolRules) -> Iterator[str]:
        if self._after.engine_capacity is None:  # else the policy's own bounds were just describe_changes
            for name in ("tokens", "requests"):
                yield from _compare(f"capacity {name}", *(_show(getattr(rules, name)) for rules in (before, after)))

    def _record(self, about: str, before: Any, after: Any, but: Collection[str] = ()) -> Iterator[str]:
        """Every field of two records of one type, but those in `but`, and those that are only made of others."""
        for field in fields(before):
            name = field.name
            if not field.compare:
                continue
            old, new = getattr(before, name), getattr(after, name)
            if old == new or name in but:
                continue
            key = f"{about}{written_name(field)}"
            if isinstance(old, dict):
                yield from self._compare_named(key, old, new)
            elif _are_one_kind(old, new):
                yield from self._record(f"{key} ", old, new, but={"learn"})
            else:
                yield from _compare(key, self._value(name, old), self._value(name, new))

    def _value(self, name: str, value: Any) -> str:
        if value is not None and name in _LEVELS:
            return str(self._after.tiers[value].name)
        if name == "anonymous":
            return "deny" if value is None else str(self._after.tiers[value.level].name)
        if name == "downgrade_level":
            return "reject"
        if name == "engines" and value is None:
            return "all"
        if name == "engine_levels":
            return _value(name, tuple(f"{self._after.tiers[level].name} {least:g}" for least, level in value))
        if name == "service_tiers":
            return _value(name, tuple(f"{name} {self._after.tiers[level].name}" for name, level in value))
        if isinstance(value, Aging):
            return f"{policy_duration(value.promote_after_us / 1e6)} up to {self._before.tiers[value.ceiling].name}"
        return _value(name, value)

    def _compare_named(self, what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
        for name in _names(before, after):
            if name not in after:
                yield f"{what} {name} removed"
            elif name not in before:
                yield f"{what} {name} added"
            else:
                yield from self._record(f"{what} {name} ", before[name], after[name])

    def _fleet(self, before: FleetPolicy | None, after: FleetPolicy | None) -> Iterator[str]:
        if before is None or after is None:
            yield from _compare("engines", _discovery(before), _discovery(after))
            return
        yield from self._record("engines ", before, after, but={"static"})
        old, new = ({engine.name: engine for engine in fleet.static} for fleet in (before, after))
        yield from self._compare_named("engine", old, new)

    def _tenants(self, before: Mapping[str, Tenant], after: Mapping[str, Tenant]) -> Iterator[str]:
        for name in _names(before, after):
            old, new = (frozenset(one[name].keys or ()) if name in one else frozenset() for one in (before, after))
            if name not in after:
                yield f"tenant {name} removed ({_keys(len(old))})"
            elif name not in before:
                yield f"tenant {name} added ({_keys(len(new))})"
            else:
                yield from self._record(f"tenant {name} ", before[name], after[name])
                yield from _changed_keys(name, old, new)


def _names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys([*before, *after]))


def _changed_keys(tenant: str, before: frozenset[TenantKey], after: frozenset[TenantKey]) -> Iterator[str]:
    old, new = ({one.digest for one in keys} for keys in (before, after))
    changed = len(after - before) - len(new - old)
    for count, what in ((len(old - new), "removed"), (len(new - old), "added"), (changed, "changed")):
        if count:
            yield f"tenant {tenant}: {_keys(count)} {what}"


def _keys(count: int) -> str:
    return "1 key" if count == 1 else f"{count} keys"


def _compare(about: str, before: str, after: str) -> Iterator[str]:
    if before != after:
        yield f"{about} {before} -> {after}"


def _are_one_kind(before: object, after: object) -> bool:
    """True if both are mappings of a file whose keys are compared one by one."""
    if type(before) is not type(after) or not is_dataclass(before) or isinstance(before, _WHOLE):
        return False
    return not isinstance(before, Capacity) or before.is_read is getattr(after, "is_read", None)


def _value(name: str, value: Any) -> str:
    """A field's value as an operator would write it."""
    if value is None:
        return "none"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, type) and issubclass(value, Engine):
        return value.name
    if isinstance(value, bool):
        return "true" if value else "false"
    if name in _PARTS:
        return f"{value / _PARTS[name]:g}"
    if isinstance(value, Fraction):
        return f"{float(100 * value):g}%"
    if name.endswith("_us"):
        return policy_duration(value / 1e6)
    if name.endswith("_s"):
        return policy_duration(value)
    if isinstance(value, int):
        return _show(value)
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if type(value) is tuple:
        return ", ".join(_value(name, one) for one in value) or "none"
    return str(value)


def _show(amount: int) -> str:
    return "unbounded" if amount == UNLIMITED else f"{amount:,}"


def _discovery(fleet: FleetPolicy | None) -> str:
    return "none" if fleet is None else fleet.discovery.value


_FIXED = [one for one in fields(Policy) if one.metadata.get("is_fixed")]
"""Keys that a running process cannot change."""


def needs_restart(running: Policy, changed: Policy) -> list[str]:
    """The keys, as the operator writes them, in which `changed` cannot replace `running`; none where it can.

    A running process has its engine's dialect, its pool and its store, and everything that waits or is held stands in a
    tier by its level; the source of the pool's size was decided when it was made.
    """
    keys = {written_name(one): getattr(running, one.name) != getattr(changed, one.name) for one in _FIXED}
    keys |= {
        **_capacity_changes(running, changed),
        "models (their names)": set(running.models) != set(changed.models),
        "tiers (their names and order)": _tier_names(running) != _tier_names(changed),
    }
    return [key for key, is_another in keys.items() if is_another]


def _capacity_changes(running: Policy, changed: Policy) -> dict[str, bool]:
    """Where the pool's engines, and its size, come from."""
    before, after = running.engines, changed.engines
    if before is None and after is None:
        return {"capacity.from": (running.engine_capacity is None) != (changed.engine_capacity is None)}
    if before is None or after is None:
        return {"engines": True}
    return {
        "engines (static, file, dns or mounted)": before.discovery is not after.discovery,
        "engines.capacity.from": before.mounted and before.capacity.is_read is not after.capacity.is_read,
        "engines.file": None not in (before.file, after.file) and before.file != after.file,
        "engines.dns.name": before.dns is not None and after.dns is not None and str(before.dns) != str(after.dns),
    }


def _tier_names(policy: Policy) -> list[str]:
    return [tier.name for tier in policy.tiers]
