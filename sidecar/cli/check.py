"""Check a policy: report every mistake at once, with file and line, and warn about surprising settings.

Mistakes go to standard error and the exit code is 1. Otherwise the command prints what the policy gives each tier, with
warnings below it, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from sidecar.cli.arguments import add_policy, policy_path
from sidecar.cli.check_engines import engines_figures, engines_text, pools, with_engine_list
from sidecar.cli.output import bounded, say, show, write_json
from sidecar.durations import policy_duration
from sidecar.policy import fields as of
from sidecar.policy.choices import CapacitySource, Learn, Mode, StoredTenants, Unguarded
from sidecar.policy.compiler import Loaded, load_files
from sidecar.policy.declared import figures as as_figures
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError, Problem, dotted
from sidecar.policy.rules import UNLIMITED, TierRules, largest_certain_request
from sidecar.policy.size_limits import SizeLimits
from sidecar.policy.store import STORE_VARIABLE
from sidecar.policy.tenant import RateLimits, Tenant, Users
from sidecar.policy.warnings import NOMINAL, warnings
from sidecar.tools.text import table

EXAMPLE = """  sidecar check policies/
  sidecar check policies/ --json -"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the policy's path and `--json`."""
    add_policy(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON; - writes it to standard output")


def run(args: argparse.Namespace) -> int:
    """Returns 0 for a policy that can be used, 1 for one that cannot (or a JSON file that cannot), 2 for none."""
    try:
        loaded, found = with_engine_list(load_files(policy_path(args.policy)))
    except PolicyError as refused:
        count = len(refused.problems)
        say(f"{refused}\n\n{count} mistake{'s' * (count != 1)}; the policy cannot be used", sys.stderr)
        write_json(args.json, {"ok": False, "errors": _list(refused.problems)})
        return 1
    found = (*found, *warnings(loaded.policy, loaded.place), *_find_unbounded(loaded), *_without_store(loaded))
    return show(args.json, figures(loaded, found), lambda: [summary(loaded, found)])


def _list(problems: tuple[Problem, ...]) -> list[dict[str, Any]]:
    return [
        {
            "file": problem.place.file if problem.place else None,
            "line": problem.place.line if problem.place else None,
            "path": problem.path,
            "message": problem.message,
        }
        for problem in problems
    ]


def _find_unbounded(loaded: Loaded) -> Iterator[Problem]:
    """A pool whose requests the engine should bound, and does not. Mounted in the engine it does."""
    policy, path = loaded.policy, ("capacity",)
    if policy.engine_capacity is None or policy.rules.requests < UNLIMITED or policy.engine.reports_max_running:
        return
    yield Problem(
        dotted(path),
        f"{policy.engine.title} does not tell `sidecar serve` how many requests it runs at once: nothing bounds them "
        "until it is seen to be full; write the number, such as {from: engine, requests: 160}",
        loaded.place(path),
    )


def _without_store(loaded: Loaded) -> Iterator[Problem]:
    """Keys that need a store, where neither the policy nor the environment names one. That of the sidecar may."""
    policy = loaded.policy
    if policy.store is not None or os.environ.get(STORE_VARIABLE):
        return
    needing = {
        "stored_tenants": policy.stored_tenants is not StoredTenants.NONE,
        "tenants": any(tenant.has_budgets for tenant in policy.named.values()),
    }
    what = {"stored_tenants": "stored_tenants", "tenants": "tokens_per_day and tokens_per_month"}
    for key, needs in needing.items():
        if needs:
            yield Problem(
                key,
                f"no sidecar starts with {what[key]} but with a store: write its address as store, or set "
                f"{STORE_VARIABLE} where it is served",
                loaded.place((key,)),
            )


def figures(loaded: Loaded, found: tuple[Problem, ...]) -> dict[str, Any]:
    """The result as JSON types. `found` are the warnings."""
    policy = loaded.policy
    return {
        "ok": True,
        "files": list(loaded.files),
        "generation": policy.generation,
        "engine": policy.engine.name,
        "mode": policy.mode.value,
        **_pool_figures(policy),
        "learn": policy.learn.value,
        "engines": engines_figures(policy),
        "models": [
            {
                "model": name,
                "aliases": model.aliases,
                "engines": model.engines,
                **_pool_figures(policy.of_model(name)),
            }
            for name, model in policy.models.items()
        ],
        "aliases": {alias: one.model for alias, one in policy.aliases.items()},
        "unguarded": None if policy.unguarded is None else policy.unguarded.value,
        "public": policy.public_paths,
        "background": policy.background.value,
        "usage": policy.usage.value,
        "tenants": sorted(policy.named),
        **({} if (hours := policy.hours_at(time.time())) is None else {"hours": hours._asdict()}),
        "limits": {name: as_figures(tenant.limits) for name, tenant in sorted(policy.named.items())},
        "allowed_models": {name: tenant.models for name, tenant in sorted(policy.named.items()) if tenant.models},
        "silent_alerts": silent_alerts(policy),
        "warnings": _list(found),
    }


ALERTS = {
    "queue_wait": ("AdmissionQueueWaitOverSlo",),
    "ttft": ("AdmissionTtftOverSlo",),
    "starvation": ("AdmissionTierStarves", "AdmissionTierStarved"),
    "hold": ("AdmissionSloGuardInVain",),
}
"""The alerts of otel/prometheus/rules.yaml that compare with a promise of a tier, by the key of its `slo`."""


def silent_alerts(policy: Policy) -> dict[str, str]:
    """The alerts that can never fire, each with the key that no tier has in its `slo`."""
    lacking = [key for key in ALERTS if all(getattr(tier.slo, _field(key)) is None for tier in policy.tiers)]
    return {alert: key for key in lacking for alert in ALERTS[key]}


def _field(key: str) -> str:
    """The field of a tier's `slo` that has the key: times are in seconds there."""
    return key if key == "hold" else f"{key}_s"


def _pool_figures(policy: Policy) -> dict[str, Any]:
    """One pool: its capacity, and its tiers' parts of it."""
    read_from = CapacitySource.ENGINE.value if policy.reads_capacity else None
    return {
        "capacity": {**_both(policy.rules.tokens, policy.rules.requests), "from": read_from},
        "tiers": [_tier_figures(policy, tier) for tier in policy.rules.tiers],
    }


def _tier_figures(policy: Policy, tier: TierRules) -> dict[str, Any]:
    return {"tier": tier.name, **{name: _both(*pair) for name, pair in _amounts(policy, tier).items()}}


def _amounts(policy: Policy, tier: TierRules) -> dict[str, tuple[int, int]]:
    """A tier's parts of its pool, each in tokens and in requests, in the order of the table's columns."""
    tokens, requests = map(min, largest_certain_request(policy.rules, tier.level), policy.largest_engine)
    return {
        "reserve": tier.reserve[:2],
        "headroom": tier.headroom[:2],
        "limit": tier.limit[:2],
        "largest_request": SizeLimits(policy).limits(tier.level),
        "largest_certain_request": (min(tokens, policy.tiers[tier.level].max_request_tokens or tokens), requests),
    }


def _both(tokens: int, requests: int) -> dict[str, int | None]:
    return {"tokens": bounded(tokens), "requests": bounded(requests)}


def summary(loaded: Loaded, found: tuple[Problem, ...]) -> str:
    """The result for people. `found` are the warnings."""
    policy = loaded.policy
    (first, pool), *others = pools(policy)
    mode = f"mode: {policy.mode.value}{_MODES[policy.mode]}"
    learn = f"learn: {policy.learn.value}; {_HELD[policy.learn]}"
    parts = [
        f"{loaded.pool.file}: engine {policy.engine.name}, {mode}\n{first}\n{learn}",
        *_tables(pool),
        *(part for heading, other in others for part in (heading, *_tables(other))),
        *([engines] if (engines := engines_text(policy)) else []),
        "\n".join(_legend(policy)),
        _people(policy),
        *([] if (hours := policy.hours_at(time.time())) is None else [str(hours)]),
        _paths(policy),
    ]
    if silent := silent_alerts(policy):
        named = ", ".join(f"{alert} ({key})" for alert, key in silent.items())
        parts.append(f"{len(silent)} alert{'s' * (len(silent) != 1)} can never fire, as no tier promises it: {named}")
    if found:
        parts.append("\n".join([f"{len(found)} warning{'s' * (len(found) != 1)}:", *(f"  {one}" for one in found)]))
    else:
        parts.append("no warnings")
    return "\n\n".join(parts)


_MODES = {
    Mode.ENFORCE: "",
    Mode.OBSERVE: "; every request passes, and `sidecar observed` reports what enforcing would do",
    Mode.PASS: "; every request passes untouched, and nothing is checked, held, counted or limited",
}


_EXPECTED = "a lease holds prompt and expected output (its maximum, until such answers are known)"
_HELD = {
    Learn.OFF: "a lease holds prompt and maximum output",
    Learn.CAUTIOUS: _EXPECTED,
    Learn.FULL: f"{_EXPECTED}, less what ends at different times",
}


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One dimension of the pool as a table shows it. `index` is its place in a pair of tokens and requests.

    `policy` is that of a nominal pool where only the engine knows the size: the table then has shares.
    """

    title: str
    index: int
    policy: Policy
    is_share: bool = False


def _tables(policy: Policy) -> list[str]:
    return [_table(policy, dimension) for dimension in _dimensions(policy)]


def _dimensions(policy: Policy) -> Iterator[_Dimension]:
    """Dimensions that are bounded, by the policy or by the engine."""
    # What a tier's max_request_tokens are of the pool is not known.
    tiers = tuple(replace(tier, max_request_tokens=None) for tier in policy.tiers)
    nominal = replace(policy, rules=policy.rules_for(NOMINAL, NOMINAL), tiers=tiers)
    if policy.reads_capacity and not policy.is_sized:  # both have the same shares
        yield _Dimension("share of the pool", _TOKENS, nominal, is_share=True)
        return
    for index, name in enumerate(("tokens", "requests")):
        if (policy.rules.tokens, policy.rules.requests)[index] < UNLIMITED:
            yield _Dimension(f"in {name}", index, policy)
        elif policy.reads_capacity:
            yield _Dimension(f"share of {name}", index, nominal, is_share=True)


_TOKENS = 0
_HEAD = ("kept idle", "limit", "size limit", "certain size")


def _table(policy: Policy, dimension: _Dimension) -> str:
    """One row for each tier, and the rule that sets its size limit."""
    pool, index, is_share = dimension.policy, dimension.index, dimension.is_share
    sizes, rows, reasons = SizeLimits(pool), [], []
    for tier in pool.rules.tiers:
        pairs = _amounts(pool, tier)
        amounts = [pair[index] for pair in pairs.values()]
        rows.append((tier.name, *(of.percent(Fraction(it, NOMINAL)) if is_share else f"{it:,}" for it in amounts)))
        largest = pairs["largest_request"][index]
        reason = sizes.reason(tier.level, largest, tokens=index == _TOKENS and not is_share)
        most = policy.tiers[tier.level].max_request_tokens if is_share and index == _TOKENS else None
        reasons.append(reason if most is None else f"{reason}; {most:,} tokens at most, its max_request_tokens")
    floor = "floor" if policy.rules.is_by_gain else "reserve"
    lines = table([(dimension.title, floor, *_HEAD), *rows])
    return "\n".join(f"{line}  {rule}" for line, rule in zip(lines, ["size limit set by", *reasons], strict=True))


def _legend(policy: Policy) -> Sequence[str]:
    """Meaning of the columns."""
    first = policy.rules.tiers[0]
    emergency = f", even while {first.name} holds its limit" if first.always_first else ""
    engine = ""
    if policy.engines is not None:
        engine, emergency = "; it must fit one engine, too", emergency and f"{emergency} on other engines"
    kept = "reserve: what a tier always gets back; kept idle: the part of it that no other tier may use"
    if policy.rules.is_by_gain:
        kept = (
            f"floor: what a tier always gets back in fair order, {of.percent(policy.fair)} of its reserve (fair); "
            "kept idle: the part of the reserve that no other tier may use"
        )
    return (
        kept,
        "limit: the most that a tier may hold at once, all of its requests together",
        f"size limit: the largest request that a tier accepts{engine}; a larger one gets a 400 at once",
        f"certain size: what finds room in a bounded time{emergency}; without a reserve, nothing",
        "size limits and allowances count a request's prompt and its maximum output, once for each sequence",
    )


def _people(policy: Policy) -> str:
    tenants = policy.named
    lines = []
    for name, tenant in sorted(tenants.items())[:_MOST_TENANTS]:
        own, best = policy.tiers[tenant.level].name, policy.tiers[tenant.max_level].name
        keys = len(tenant.keys or ())
        upto = "" if own == best else f", may ask for {best}"
        lines.append(f"  {name}: {own}{upto}; {keys} key{'s' * (keys != 1)}, weight {tenant.weight}")
        lines += [f"    models: {', '.join(tenant.models)}"] if tenant.models else []
        lines += [f"    limits: {limits}"] if (limits := _limits(policy, tenant)) else []
        lines += [f"    users: {_users(tenant.users)}"] if tenant.users is not None else []
    if len(tenants) > _MOST_TENANTS:
        lines.append(f"  ... and {len(tenants) - _MOST_TENANTS} more")
    without_key = policy.tiers[policy.anonymous.level].name if policy.anonymous else "refused"
    count = "1 tenant" if len(tenants) == 1 else f"{len(tenants)} tenants"
    tokens = (
        [] if policy.jwt is None else [f"  with a token of {policy.jwt.issuer}: as its {policy.jwt.tenant_claim} says"]
    )
    lines += [
        f"  tokens {f'of {model} ' if model else ''}count by cost: {cost}" for model, cost in policy.costs.items()
    ]
    named = [] if policy.gateway is None else [f"  with {policy.gateway}: as it says"]
    return "\n".join([count, *lines, *tokens, *named, f"  without a key: {without_key}"])


_MOST_TENANTS = 20
"""Tenants that are listed; a pool may have thousands."""


def _limits(policy: Policy, tenant: Tenant) -> str:
    """A tenant's own limits, and what becomes of a request that exceeds them; empty where it has none."""
    parts = _counted_limits(tenant.limits)
    if tenant.limits.max_output_tokens is not None:
        parts.append(f"{tenant.limits.max_output_tokens:,} tokens in one answer (a request for more gets a 400)")
    for model, limits in tenant.limits.models.items():
        parts.append(f"of model {model} {', '.join(_counted_limits(limits)) or 'any number'}")
    if any(account.limits.are_counted or account.limits.budgets for account in tenant.accounts):
        lower = tenant.downgrade_level
        parts.append("over them 429" if lower is None else f"over them tier {policy.tiers[lower].name}")
    return "; ".join(parts)


def _users(users: Users) -> str:
    """Where a request names its user, and what each user has of the tenant's share."""
    turns = ["take turns"] if users.fair else []
    limits = [f"each {limit}" for limit in _counted_limits(users.limits)]
    return "; ".join([f"by {', '.join(users.sources)}", *turns, *limits])


def _counted_limits(limits: RateLimits) -> list[str]:
    per_minute = [
        f"{amount:,} {name}"
        for amount, name in ((limits.requests_per_minute, "requests"), (limits.tokens_per_minute, "tokens"))
        if amount is not None
    ]
    parts = []
    if per_minute:
        burst = policy_duration(limits.burst_us / 1_000_000)
        parts.append(f"{' and '.join(per_minute)} a minute ({burst} of that at once)")
    parts += [f"{tokens:,} tokens a {period}" for period, tokens in limits.budgets.items()]
    if limits.concurrent_requests is not None:
        parts.append(f"{limits.concurrent_requests:,} requests waiting or running")
    return parts


def _paths(policy: Policy) -> str:
    """The guarded paths, the treatment of the others, and the aliases."""
    chosen = "deny before an engine's server, generating in an app"
    chosen = chosen if policy.unguarded is None else policy.unguarded.value
    guarded = f"{len(policy.endpoints)} guarded paths; unguarded: {chosen}; background: {policy.background.value}"
    has_pages = policy.unguarded not in {Unguarded.ALLOW, Unguarded.GENERATING}
    lines = [guarded, *([f"on an engine's server {_public(policy)}"] if has_pages else [])]
    if policy.aliases:
        lines.append("aliases: " + ", ".join(f"{name} is {one.model}" for name, one in policy.aliases.items()))
    return "\n".join(lines)


def _public(policy: Policy) -> str:
    """Who reads which pages of an engine's server."""
    public, pages = policy.public_paths, policy.engine.routes.pages
    if public is None:
        return f"public: all, its own pages too ({', '.join(pages)}); anonymous: deny, or public, closes those"
    closed = ", ".join(page for page in pages if page not in public)
    needs = "; all else needs a key" if policy.anonymous is None else ""
    return f"public: {', '.join(public) or 'nothing'}{needs}; closed to all: {closed}"
