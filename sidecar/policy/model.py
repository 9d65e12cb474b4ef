"""Policy that the running process uses: frozen, resolved, ready for lookups.

Nothing here reads a file. `compiler.load` makes it of the pool's file and the tenants'. Tier names have become levels
(0 is the most important), shares have become whole numbers (see `rules`), durations have become seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from sidecar.policy.capacity import Capacity
from sidecar.policy.choices import (
    Learn,
    Mode,
    Order,
    StoredTenants,
)
from sidecar.policy.cost import TokenCost
from sidecar.policy.fleet import EngineAddress, largest_size, pool_prefill, pool_size
from sidecar.policy.hours import (
    WEEKS_S,
    ByHours,
    Hours,
    HoursNow,
    borders_s,
    changes_text,
    covering,
    first_covering,
    record_at,
)
from sidecar.policy.pool_file import PoolFile
from sidecar.policy.rules import UNLIMITED, PoolRules
from sidecar.policy.tenant import Tenant

MODE_VARIABLE = "SIDECAR_MODE"
"""`pass`, whatever the policy says. See docs/roll-out.md."""
BARE = "bare"
"""The generation of a policy that has no more than passing needs: see `passing`."""


_MOST_SHOWN = 20
"""Of the tiers and tenants whose hours count now."""


def is_forced(environment: Mapping[str, str]) -> bool:
    """True if the environment asks for it. Raises ValueError for another mode."""
    written = environment.get(MODE_VARIABLE, "")
    if written not in ("", Mode.PASS.value):
        raise ValueError(
            f"{MODE_VARIABLE}: {written!r} is not pass, the one mode that the environment can ask for; write another "
            "as `mode` into the policy"
        )
    return bool(written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(PoolFile):
    """Everything the operator decided, as one immutable value: the keys of the pool's file, and what comes of them.

    `named` are all tenants by their names, with API keys or without. `generation` is a short digest of the files'
    contents. `rules` bound only what the policy does where the engine says how large the pool is: `rules_for` gives the
    rules of a size. With engines they are those of the sum of their written capacities.
    """

    rules: PoolRules
    named: Mapping[str, Tenant]
    generation: str
    _as_written: Policy | None = field(default=None, repr=False, compare=False)
    _of_keys: dict[str, Tenant] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def is_bare(self) -> bool:
        """True if it has no more than `mode: pass` needs."""
        return self.generation == BARE

    @property
    def engine_capacity(self) -> Capacity | None:
        """The capacity that is read from the one engine; None where the policy says it, or names the engines."""
        return self.capacity if self.engines is None and self.capacity is not None and self.capacity.is_read else None

    @property
    def learn(self) -> Learn:
        """How far leases follow the output lengths that were learned."""
        capacity = self.capacity if self.engines is None else self.engines.capacity
        return Learn.CAUTIOUS if capacity is None else capacity.learn

    @property
    def public_paths(self) -> Sequence[str] | None:
        """The paths that may be read without a key, and the only ones of the operator's pages that may be read at all.

        None where that bounds nothing: requests need no key (`anonymous`), and the policy does not say which paths.
        """
        if self.public is None and self.anonymous is None:
            return (self.engine.liveness_page,)
        return self.public

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """The tenants as they ask with their API keys, by the lower-case hex SHA-256 digests of these.

        Made once: there may be 10,000.
        """
        if not self._of_keys:
            of_keys = ((key, tenant) for tenant in self.named.values() for key in tenant.keys or ())
            self._of_keys.update({key.digest: tenant.with_key(key) for key, tenant in of_keys})
        return self._of_keys

    def of_engines(self, engines: Sequence[EngineAddress]) -> Policy:
        """The policy as it is with these engines, such as those of an engine list: `rules` are those of their sum."""
        assert self.engines is not None
        rules = self.rules_for(*pool_size(engines), pool_prefill(engines))
        return replace(self, engines=self.engines.listing(engines), rules=rules)

    def of_model(self, name: str) -> Policy:
        """The policy of one model's pool: its engines, their sum, and a name of its own in the store. Raises KeyError.

        The pool called `default` has `default/llama-70b`: no policy can give a pool a name with a slash.
        """
        assert self.engines is not None  # `validate` refuses models without engines
        names = self.models[name].engines
        mine = [engine for engine in self.engines.static if names is None or engine.name in names]
        of_engines = self.of_engines(mine)
        # Its front has the tenants, and counts what they use.
        return replace(
            of_engines, pool=f"{self.pool}/{name}", stored_tenants=StoredTenants.NONE, usage_days=0, _as_written=None
        )

    @property
    def largest_engine(self) -> tuple[int, int]:
        """The most (tokens, requests) that one engine holds: no larger request is ever admitted. See `largest_size`."""
        return (UNLIMITED, UNLIMITED) if self.engines is None else largest_size(self.engines.static)

    @property
    def called_models(self) -> Mapping[str, str]:
        """The models by the names that clients may call them: their own and their aliases, in the file's order.

        With one pool for all models these are only the names that no engine knows.
        """
        called = {name: model for model, one in self.models.items() for name in (model, *one.aliases)}
        return called | {alias: called.get(one.model, one.model) for alias, one in self.aliases.items()}

    @property
    def has_costs(self) -> bool:
        """True if tokens are weighted, of one model at least."""
        costs = [self.cost, *(model.cost for model in self.models.values())]
        return any(cost is not None and not cost.is_plain for cost in costs)

    @property
    def costs(self) -> Mapping[str, TokenCost]:
        """The weights of tokens by model, in a pool for all `any model`; none where each token counts as one."""
        return {model: self.cost_for(model) for model in self.models or ("any model",)} if self.has_costs else {}

    def cost_for(self, model: str | None) -> TokenCost:
        """The weights of the tokens of a model, or of others than those of the policy."""
        of_model = self.models.get(model or "")
        own = None if of_model is None else of_model.cost
        return own or self.cost or TokenCost.plain()

    @property
    def reads_capacity(self) -> bool:
        """True if a part of the pool's size is read from the engines, or depends on how many are found."""
        if self.engines is None:
            return self.engine_capacity is not None
        return not self.engines.static or any(engine.capacity.is_read for engine in self.engines.static)

    def ordered_by(self, order: Order) -> Policy:
        """Copy of the policy with another order."""
        return replace(self, order=order)._of_size(self.rules)

    def _of_size(self, rules: PoolRules) -> Policy:
        """The policy with its rules for a pool as large as that of other rules."""
        sizes = (None if size == UNLIMITED else size for size in (rules.tokens, rules.requests, rules.prefill))
        return replace(self, rules=self.rules_for(*sizes))

    @property
    def as_written(self) -> Policy:
        """The policy of which this one is what counts at some time."""
        return self._as_written or self

    @property
    def all_hours(self) -> frozenset[Hours]:
        """All hours in which something else counts than at other times."""
        return frozenset(hours for entries in self._by_hours().values() for hours in entries)

    def _by_hours(self) -> Mapping[str, ByHours[Any]]:
        """Changes by hours of each tier and tenant that has any."""
        of_all: dict[str, ByHours[Any]] = {f"tier {tier.name}": tier.hours for tier in self.tiers}
        of_all |= {f"tenant {name}": tenant.limits.hours for name, tenant in self.named.items()}
        return {name: entries for name, entries in of_all.items() if entries}

    def hours_at(self, time_s: float) -> HoursNow | None:
        """Changes that count at a time; None for a policy without hours."""
        if not (all_hours := self.all_hours):
            return None
        by_hours = self._by_hours()
        found = {name: hours for name, entries in by_hours.items() if (hours := first_covering(entries, time_s))}
        now = {name: f"{changes_text(by_hours[name][found[name]])} ({found[name]})" for name in [*found][:_MOST_SHOWN]}
        if len(found) > len(now):
            now["others"] = f"{len(found) - len(now)} more"
        counting = covering(all_hours, time_s)
        following = (at_s for at_s in borders_s(all_hours, time_s) if covering(all_hours, at_s) != counting)
        next_change = next((datetime.fromtimestamp(at_s, timezone.utc).isoformat() for at_s in following), None)
        return HoursNow(now, next_change)

    def in_all_hours(self) -> Iterator[tuple[str, Policy]]:
        """Combinations of tiers' hours in a week of winter and in one of summer, each with the policy as it is then."""
        of_tiers = {hours for tier in self.tiers for hours in tier.hours}
        spans = [(*span, hours) for week_s in WEEKS_S for hours in of_tiers for span in hours.spans(week_s)]
        seen: set[frozenset[Hours]] = {frozenset()}
        for at_s in sorted({border_s for begin_s, end_s, _ in spans for border_s in (begin_s, end_s)}):
            counting = frozenset(hours for begin_s, end_s, hours in spans if begin_s <= at_s < end_s)
            if counting not in seen:
                seen.add(counting)
                yield " and ".join(sorted(counting)), self.at(at_s)

    def at(self, time_s: float) -> Policy:
        """The policy with what its hours say at a time, in Unix seconds."""
        if not self.all_hours:
            return self
        named = {
            name: replace(one, limits=record_at(one.limits, time_s)) if one.limits.hours else one
            for name, one in self.named.items()
        }
        changed = replace(
            self,
            tiers=tuple(record_at(tier, time_s) for tier in self.tiers),
            named=MappingProxyType(named),
            _as_written=self,
        )
        return changed._of_size(self.rules)

    @property
    def is_sized(self) -> bool:
        """True if the pool's size stands in the policy, in one dimension at least. It may still be the engine's."""
        return min(self.rules.tokens, self.rules.requests) < UNLIMITED

    def level_for(self, name: str) -> int | None:
        """The level of the tier called `name`, None where the policy has no such tier."""
        return next((tier.level for tier in self.tiers if tier.name == name), None)
