"""Policies that load and will surprise: each warning one sentence with the numbers, and what would be better."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import NamedTuple

from sidecar.durations import policy_duration
from sidecar.engines import NoPriorityEngine
from sidecar.engines.base import Carrier, Engine
from sidecar.policy import fields as of
from sidecar.policy.choices import Learn, Order, StoreLoss, TierSource, Unguarded, Unsized
from sidecar.policy.fleet_warnings import fleet_warnings, model_warnings
from sidecar.policy.hours import Hours, never_counting
from sidecar.policy.model import Policy
from sidecar.policy.problems import FilePlace, Found, Path, Problem, dotted, suggestion
from sidecar.policy.rules import MOST_EXCESS, UNLIMITED, PoolRules, TierRules, best_level, has_reserve, largest_request
from sidecar.policy.tenant import AccountLimits, Tenant
from sidecar.policy.tenant_keys import TenantKey
from sidecar.policy.tier import Tier, Timeouts

MOSTLY_RESERVED = Fraction(80, 100)
"""Above this, the prototype of the rules showed that priorities hardly matter under overload."""

MANY_RESERVES = 8
"""A tier that accepts a request of more reserves than this gets a warning of how long it owes for one."""


A_MINUTE_US = 60_000_000
_KINDS = ("tokens", "requests")

TAKES_BACK = "250ms"
"""The `preempt_after` of an emergency tier that the messages suggest: the shipped policy's."""

NOMINAL = 10_000
"""The requests of a pool whose size only the engine knows: its shares are judged, no amount is shown."""


SOON_S = 14 * 24 * 3600
"""Keys that end within so long have a warning: time for their holders to change them."""


def warnings(policy: Policy, place: Callable[[Path], FilePlace | None] = lambda _path: None) -> tuple[Problem, ...]:
    """The warnings of `sidecar check` about a valid policy. `place` knows the files' lines: `Loaded.place`."""
    found = [*_pool(policy), *_pools(policy), *_tenants(policy), *fleet_warnings(policy), *model_warnings(policy)]
    found += _hours(policy)
    known = {*found}
    for hours, then in policy.in_all_hours():
        others = [warning for warning in (*_pool(then), *_pools(then)) if warning not in known]
        found += [(path, f"in {hours}: {message}") for path, message in others]
        known |= {*others}
    return tuple(Problem(dotted(path), message, place(path)) for path, message in found)


def _pool(policy: Policy) -> Found:
    reserved = sum((tier.reserve for tier in policy.tiers), start=Fraction(0))
    if reserved > MOSTLY_RESERVED:
        left = f" and the {of.percent(1 - reserved)} left" if reserved < 1 else ""
        yield (
            ("tiers",),
            f"{of.percent(reserved)} of the pool is reserved, so priorities hardly matter under overload, and no tier "
            f"with a reserve accepts a request larger than that{left}; reserve 80% at most",
        )
    yield from _engines_numbers(policy)
    if not policy.named and policy.anonymous is None:
        yield ("tenants",), "no tenant, and anonymous is deny: every request is refused; add a tenant, or a tier there"
    yield from _open_paths(policy)
    if policy.cors is not None and "*" in policy.cors.origins and policy.anonymous is not None:
        yield (
            ("cors", "origins"),
            "with anonymous a tier, every page that someone in your network opens may use the engine without a key; "
            "write the origins of your own pages, or anonymous: deny",
        )
    if policy.store is not None and policy.on_store_loss is StoreLoss.DIVIDE and policy.replicas == 1:
        yield (
            ("store",),
            "each replica that starts while the store cannot be reached takes the whole pool; write `replicas: N`, how "
            "many share it, or `on_store_loss: closed`",
        )
    yield from _find_unsized(policy)
    yield from _unchecked_trust(policy)
    if policy.order is Order.GAIN and not any(tier.slo.ttft_s and tier.slo.tpot_s for tier in policy.tiers):
        yield (
            ("order",),
            "no tier has an `slo` with `ttft` and `tpot`, so no request earns anything and all are ordered by level; "
            "write such an slo, or remove this line",
        )


def _open_paths(policy: Policy) -> Found:
    """`unguarded` that lets in whom `anonymous` or `public` keep out."""
    if policy.unguarded is Unguarded.ALLOW and policy.anonymous is None:
        yield (
            ("unguarded",),
            "allow passes every path that is not guarded without a key, although anonymous is deny; write deny before "
            "an engine",
        )
    if policy.public is not None and policy.unguarded in {Unguarded.ALLOW, Unguarded.GENERATING}:
        chosen = policy.unguarded.value
        yield ("public",), f"unguarded: {chosen} leaves every page open, so this does nothing; write unguarded: deny"


def _pools(policy: Policy) -> Found:
    """Warnings that depend on the pool's size: of the one pool, or of each model's."""
    if not policy.models:
        yield from _sizes(policy)
        return
    by_warning: dict[tuple[Path, str], list[str]] = {}
    for name in policy.models:
        for warning in _sizes(policy.of_model(name)):
            by_warning.setdefault(warning, []).append(name)
    for (path, message), names in by_warning.items():
        yield path, message if len(names) == len(policy.models) else f"{message} (model {_join(names)})"


def _sizes(policy: Policy) -> Found:
    if policy.is_sized:
        yield from _find_rounded_up(policy.rules)
        yield from _emergency(policy)
        yield from _empty_limits(policy)
    yield from _tiers(policy)


def _empty_limits(policy: Policy) -> Found:
    """Limits of less than one token or one request of the engines' sum. Of a written capacity they are mistakes."""
    for tier, shares in zip(policy.rules.tiers, policy.tiers, strict=True):
        for kind, limit, size in zip(_KINDS, tier.limit, policy.rules.capacity, strict=False):
            if not limit:
                yield (
                    ("tiers", tier.name, "limit"),
                    f"{of.percent(shares.limit)} of {size} {kind} is less than one, and admits nothing while the pool "
                    "is not larger; write a larger share",
                )


def _find_unsized(policy: Policy) -> Found:
    """`unsized: hold` in tiers where nothing but the size limit bounds what such a request holds."""
    rules = policy.rules_for(NOMINAL, None) if policy.rules.tokens == UNLIMITED else policy.rules
    if policy.unsized is not Unsized.HOLD or (not policy.reads_capacity and policy.rules.tokens == UNLIMITED):
        return
    unbounded = [tier for tier in policy.tiers if tier.max_request_tokens is None]
    if unbounded:
        most, name = max((largest_request(rules, tier.level)[0], tier.name) for tier in unbounded)
        yield (
            ("unsized",),
            f"a request whose prompt cannot be sized holds its tier's size limit: in {name} {most / rules.tokens:.0%} "
            "of the pool's tokens, so that few others run beside it; write max_request_tokens in "
            f"{_join([tier.name for tier in unbounded])}",
        )


def _unchecked_trust(policy: Policy) -> Found:
    """`learn: full` where no one would see that leases hold too little: the engine's preemptions are not read."""
    if policy.learn is not Learn.FULL:
        return
    fleet, engine = policy.engines, policy.engine
    path: Path = ("capacity", "learn") if fleet is None else ("engines", "capacity", "learn")
    if not engine.counts_preemptions:
        who = "the engine" if engine is NoPriorityEngine else engine.title
        yield path, f"{who} reports no preemptions, so the quantile never rises; write learn: cautious"
        return
    if fleet is None:
        unread, what = policy.engine_capacity is None, "the engine's preemptions"
    else:
        written = [one.name for one in fleet.static if not one.capacity.is_read]
        unread = bool(written) if fleet.static else not fleet.capacity.is_read
        are_some = 0 < len(written) < len(fleet.static)
        what = f"the preemptions of engine {_join(written)}" if are_some else "the engines' preemptions"
    if unread:
        yield (
            path,
            f"no one reads {what}, so the quantile never rises; write from: engine, or learn: cautious",
        )


def _engines_numbers(policy: Policy) -> Found:
    """Whole numbers that an engine's own clients send in a body's `priority`, where a number from 0 to 1 is read."""
    engine = policy.engine
    if not takes_whole_numbers(engine) or TierSource.BODY not in policy.sources or TierSource.ENGINE in policy.sources:
        return
    sources = ", ".join(source.value for source in (TierSource.ENGINE, *policy.sources))
    levels = own_levels(engine, [tier.name for tier in policy.tiers], policy.default_level)
    yield (
        ("engine",),
        f"a number in a body's priority is read from 0 to 1: priority: 0 means the last tier, {policy.tiers[-1].name}, "
        f"and 2 or more gets a 400, while {engine.title} takes any whole number; where clients send its numbers, "
        f"write sources: [{sources}] and engine_levels: {levels}",
    )


def takes_whole_numbers(engine: type[Engine]) -> bool:
    """True if clients of the engine itself send whole numbers in a body's `priority`."""
    return Carrier.BODY in engine.carriers and engine.priority_range is None


def own_levels(engine: type[Engine], tiers: Sequence[str], default_level: int) -> str:
    """`engine_levels` by which the engine's default of 0 means the default tier. `tiers` are most important first."""
    sign = -1 if engine.more_important_is_higher else 1
    return "{" + ", ".join(f"{name}: {sign * 10 * (level - default_level)}" for level, name in enumerate(tiers)) + "}"


class _Dimension(NamedTuple):
    """One dimension of the pool that the policy bounds: every figure by level."""

    name: str
    capacity: int
    reserves: Sequence[int]
    limits: Sequence[int]


def _dimensions(rules: PoolRules) -> Iterator[_Dimension]:
    for d, name in enumerate(_KINDS):
        if rules.capacity[d] != UNLIMITED:
            reserves, limits = [tier.reserve[d] for tier in rules.tiers], [tier.limit[d] for tier in rules.tiers]
            yield _Dimension(name, rules.capacity[d], reserves, limits)


def _find_rounded_up(rules: PoolRules) -> Found:
    """Reserves that are at most 100% as shares, and more than the pool as whole numbers."""
    for of_pool in _dimensions(rules):
        reserved = sum(of_pool.reserves)
        if reserved > of_pool.capacity:
            yield (
                ("tiers",),
                f"the reserves need {reserved:,} {of_pool.name}, each rounded up, and the pool has "
                f"{of_pool.capacity:,}: the floors of less important tiers are not certain; give fewer tiers "
                "a reserve, or smaller ones",
            )


def _emergency(policy: Policy) -> Found:
    """An `always_first` tier that leaves less than the reserves of the others while it holds its limit."""
    rules, first = policy.rules, policy.rules.tiers[0]
    found = list(_dimensions(rules))
    left = [one.capacity - sum(one.reserves[1:]) for one in found]
    is_certain = all(one.limits[0] <= rest for one, rest in zip(found, left, strict=True))
    if not first.always_first or is_certain or any(sum(one.reserves) > one.capacity for one in found):
        return
    floors = [
        f"{shares.name} ({of.percent(shares.reserve)})"
        for tier, shares in zip(rules.tiers[1:], policy.tiers[1:], strict=True)
        if has_reserve(tier)
    ]
    most = min(rest * 100 // one.capacity for one, rest in zip(found, left, strict=True))
    better = f"write limit: {most}% or less, or reserve less" if most > 0 else "reserve less in the other tiers"
    yield (
        ("tiers", first.name, "limit"),
        f"while {first.name} holds its limit of {of.percent(policy.tiers[0].limit)}, the "
        f"{'reserves' if len(floors) > 1 else 'reserve'} of {_join(floors)} {'are' if len(floors) > 1 else 'is'} not "
        f"certain; {better}",
    )


def _join(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _tiers(policy: Policy) -> Found:
    pool = nominal_rules(policy)
    for tier, rules in zip(policy.tiers, pool.tiers, strict=True):
        yield from _starving(rules, pool)
        yield from _idle(rules, pool, shows_amount=policy.is_sized)
        yield from _too_large(tier, pool, policy.largest_engine[0])
        if policy.is_sized:
            yield from _single(tier, pool, policy.largest_engine[1])
        yield from _owing(tier, rules, pool, policy.largest_engine, is_sized=policy.is_sized)
        yield from _late_emergency(rules, pool)
        yield from _preemption(rules, pool)
        yield from _guard(tier, pool)
        yield from _timeouts(tier)


def _timeouts(tier: Tier) -> Found:
    """Timeouts of the engine that end what the tier promises, or that are never reached."""
    path, most, ttft_s = ("tiers", tier.name, "timeouts"), tier.timeouts, tier.slo.ttft_s
    if ttft_s is not None and most.first_byte_s <= ttft_s:
        yield (
            path,
            f"first_byte of {policy_duration(most.first_byte_s)} ends requests that the slo's ttft of "
            f"{policy_duration(ttft_s)} still calls in time; write several times that",
        )
    usual = Timeouts()
    for key, most_s, default_s in (
        ("first_byte", most.first_byte_s, usual.first_byte_s),
        ("between_bytes", most.between_bytes_s, usual.between_bytes_s),
    ):
        if most_s >= most.total_s and most_s != default_s:
            yield (
                path,
                f"{key} of {policy_duration(most_s)} does nothing: total ends the request after "
                f"{policy_duration(most.total_s)}; write less, or leave it out",
            )


def _guard(tier: Tier, rules: PoolRules) -> Found:
    """A guarded tier where floors, which are never cut, are half of what less important tiers may hold, or more."""
    if not tier.hold:
        return
    below, found = slice(tier.level + 1, None), list(_dimensions(rules))
    floors = [sum(one.reserves[below]) for one in found]
    most = [min(one.capacity, sum(one.limits[below])) for one in found]
    if all(2 * kept >= may_hold for kept, may_hold in zip(floors, most, strict=True)):
        part = min(kept * 100 // one.capacity for one, kept in zip(found, floors, strict=True))
        yield (
            ("tiers", tier.name, "slo", "hold"),
            f"does little: the reserves of less important tiers, {part}% of the pool, are theirs whatever this tier "
            "misses, and at least half of what they may hold; reserve less there, or leave this out",
        )


def _preemption(tier: TierRules, rules: PoolRules) -> Found:
    """One tier's preemption key without its counterpart in another tier."""
    above, below = rules.tiers[: tier.level], rules.tiers[tier.level + 1 :]
    if tier.preempt_after_us is not None and not any(other.preemptible for other in below):
        yield (
            ("tiers", tier.name, "preempt_after"),
            "does nothing: no less important tier is preemptible; write preemptible: true there, or leave this out",
        )
    if not tier.preemptible:
        return
    if not rules.max_preemptions:
        yield (
            ("tiers", tier.name, "preemptible"),
            "does nothing: max_preemptions is 0; write at least 1 there, or leave this out",
        )
    elif all(other.preempt_after_us is None for other in above):
        yield (
            ("tiers", tier.name, "preemptible"),
            "does nothing: no more important tier has preempt_after; write it there, such as 500ms, or leave this out",
        )


def nominal_rules(policy: Policy) -> PoolRules:
    """The policy's rules; those of a pool of `NOMINAL` requests where only the engine knows the size."""
    return policy.rules if policy.is_sized else policy.rules_for(None, NOMINAL)


def _starving(tier: TierRules, rules: PoolRules) -> Found:
    """A tier with no floor, under tiers that it never reaches by aging and that can hold the whole pool."""
    best = best_level(rules, tier.level)
    above = rules.tiers[:best]
    can_fill = any(sum(other.limit[d] for other in above) >= rules.capacity[d] != UNLIMITED for d in range(2))
    if has_reserve(tier) or not can_fill:
        return
    ceiling = "does not age" if best == tier.level else f"ages no further than {rules.tiers[best].name}"
    names = ", ".join(other.name for other in above)
    yield (
        ("tiers", tier.name),
        f"can starve: it has no reserve, {ceiling}, and {names} can hold the whole pool; give it a reserve, even 5%",
    )


def _idle(tier: TierRules, rules: PoolRules, *, shows_amount: bool) -> Found:
    d = int(rules.tokens == UNLIMITED)
    headroom, reserve, whole, unit = tier.headroom[d], tier.reserve[d], rules.capacity[d], _KINDS[d]
    if headroom and headroom >= reserve - 1:  # lend is 0%: one is rounded up, the other down
        part = f"{headroom / whole:.0%} of the pool"
        idle = f"{headroom:,} {unit} ({part}) stay" if shows_amount else f"{part} stays"
        yield (
            ("tiers", tier.name, "lend"),
            f"lends nothing: while it is idle, {idle} unused; lend all of it and take room back, by "
            f"preempt_after: {TAKES_BACK} here and preemptible: true in a less important tier, unless the engine "
            "cannot abort requests",
        )


def _late_emergency(tier: TierRules, rules: PoolRules) -> Found:
    """An `always_first` tier that others may crowd out until their requests end."""
    preempts = tier.preempt_after_us is not None
    if tier.always_first and has_reserve(tier) and not any(tier.headroom[:2]) and not preempts and len(rules.tiers) > 1:
        yield (
            ("tiers", tier.name),
            "lends its whole reserve and takes no room back: in a full pool it starts only when requests of others "
            f"end; write preempt_after: {TAKES_BACK} here and preemptible: true in a less important tier, or lend: 0%",
        )


def _too_large(tier: Tier, rules: PoolRules, engine_tokens: int) -> Found:
    of_pool, _ = largest_request(rules, tier.level)
    largest, what = min(
        (of_pool, "the tier's size limit of"), (engine_tokens, "the largest engine's"), key=itemgetter(0)
    )
    if tier.max_request_tokens is not None and tier.max_request_tokens > largest:
        yield (
            ("tiers", tier.name, "max_request_tokens"),
            f"{tier.max_request_tokens:,} is more than {what} {largest:,} tokens: a larger request "
            f"gets a 400 at once; write {largest} or less, or leave this out",
        )


def _single(tier: Tier, rules: PoolRules, engine_requests: int) -> Found:
    """A tier whose size limit is below 2 requests."""
    if min(largest_request(rules, tier.level)[1], engine_requests) == 1:
        yield (
            ("tiers", tier.name),
            "accepts requests of one sequence: one with n: 2 gets a 400 at once; write a larger capacity in requests, "
            "raise the tier's limit or reserve, or reserve less in the others",
        )


def _owing(tier: Tier, rules: TierRules, pool: PoolRules, largest: tuple[int, int], *, is_sized: bool) -> Found:
    """A tier that accepts requests of many reserves: each costs it its next turn for a long time."""
    if rules.always_first or not has_reserve(rules) or (tier.max_request_tokens is not None and not is_sized):
        return
    tokens, requests = map(min, largest_request(pool, tier.level), largest)
    tokens = min(tokens, tier.max_request_tokens or tokens)
    excess, size, better = max(
        (_excess(tokens, rules.reserve[0]), f"{tokens:,} tokens", "write max_request_tokens, or raise the reserve"),
        (_excess(requests, rules.reserve[1]), _sequences(requests, pool, is_sized=is_sized), "raise the reserve"),
        key=itemgetter(0),
    )
    if excess > MANY_RESERVES - 1:
        yield (
            ("tiers", tier.name),
            f"accepts requests of many times its reserve: one of {size} held a minute keeps {tier.name} from its next "
            f"turn for {int(min(excess, Fraction(MOST_EXCESS))):,} minutes; {better}",
        )


def _excess(size: int, reserve: int) -> Fraction:
    """How many reserves too much a tier holds that held nothing before; none in a dimension without a bound."""
    return Fraction(0) if reserve == UNLIMITED else Fraction(size - reserve, reserve)


def _sequences(requests: int, pool: PoolRules, *, is_sized: bool) -> str:
    return f"{requests:,} sequences" if is_sized else f"{requests / pool.requests:.0%} of the pool"


def _tenants(policy: Policy) -> Found:
    for tenant in policy.named.values():
        path: Path = ("tenants", tenant.name)
        models: Sequence[str | None] = list(policy.models) or [None]
        yield from _too_small(policy, tenant, tenant.limits, models, (*path, "limits"))
        for model, limits in tenant.limits.models.items():
            at = (*path, "limits", "models", model)
            if model in policy.models:
                yield from _too_small(policy, tenant, limits, [model], at)
            else:
                near = suggestion(model, list(policy.models), "the models are") if policy.models else "it names none"
                yield at, f"limits nothing: the pool's file has no model of this name under models; {near}"
        yield from _ending_keys(tenant.keys or (), (*path, "keys"))
        if tenant.downgrade_level is not None and not any(
            account.limits.are_counted or account.limits.budgets for account in tenant.accounts
        ):
            yield (*path, "over_limit"), "does nothing without limits by the minute or at once; add some, or remove it"


def _too_small(
    policy: Policy, tenant: Tenant, limits: AccountLimits, models: Sequence[str | None], path: Path
) -> Found:
    """A limit that each request exceeds, whichever of the models it is for."""
    if limits.tokens_per_minute is None:
        return
    most = limits.tokens_per_minute * limits.burst_us // A_MINUTE_US
    output = policy.tiers[tenant.level].default_output_tokens
    output = min(output, tenant.limits.max_output_tokens or output)
    counted = min(policy.cost_for(model).of(0, 0, output) for model in models)
    if most < counted:
        yield (
            (*path, "tokens_per_minute"),
            f"lets {most:,} tokens through at once, and a request that names no maximum counts for {counted:,} "
            "and its prompt: each is over the limit; allow more, or a longer burst",
        )


def _hours(policy: Policy) -> Found:
    of_all: dict[Path, Iterable[Hours]] = {("tiers", tier.name, "hours"): tier.hours for tier in policy.tiers}
    of_all |= {("tenants", name, "limits", "hours"): one.limits.hours for name, one in policy.named.items()}
    for path, all_hours in of_all.items():
        for hours in never_counting(tuple(all_hours)):
            yield (*path, hours), "never counts: hours before it cover all of it; write it before them"


def _ending_keys(keys: Sequence[TenantKey], path: Path) -> Found:
    now_s = time.time()
    for one in keys:
        if one.is_expired(now_s):
            yield path, f"expired: {one.title} ({one.last}); such a key gets a 401; `sidecar keys revoke` removes it"
        elif one.is_expired(now_s + SOON_S):
            yield path, f"about to expire: {one.title} ({one.last}); `sidecar keys new` makes another"
