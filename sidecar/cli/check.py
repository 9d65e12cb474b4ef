"""Check a policy: report every mistake at once, with file and line, and warn about surprising settings.

Mistakes go to standard error and the exit code is 1. Otherwise the command prints what the policy gives each tier, with
warnings below it, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from sidecar.cli.output import aligned, write_json
from sidecar.policy import fields as of
from sidecar.policy.compiler import Loaded, load_files
from sidecar.policy.model import CapacitySource, Policy
from sidecar.policy.problems import PolicyError, Problem
from sidecar.policy.rules import UNLIMITED, TierRules, largest_certain_request, largest_request
from sidecar.policy.warnings import nominal_rules, warnings

EXAMPLE = """  sidecar check policies/
  sidecar check policies/ --json -"""


_HEAD = ("tier", "reserve", "kept idle", "limit", "size limit", "certain size")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the policy's path and `--json`."""
    parser.add_argument("policy", metavar="POLICY", help="a policy file, or a folder with policy.yaml in it")
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON; - writes it to standard output")


def run(args: argparse.Namespace) -> int:
    """Returns 0 for a policy that can be used, 1 for one that cannot, or where the JSON file cannot be written."""
    try:
        loaded = load_files(args.policy)
    except PolicyError as refused:
        print(refused, file=sys.stderr)
        count = len(refused.problems)
        print(f"\n{count} mistake{'s' * (count != 1)}; the policy cannot be used", file=sys.stderr)
        write_json(args.json, {"ok": False, "errors": _listed(refused.problems)})
        return 1
    found = warnings(loaded.policy, loaded.place)
    if args.json != "-":
        print(_summary(loaded, found))
    return 0 if write_json(args.json, _figures(loaded, found)) else 1


def _listed(problems: tuple[Problem, ...]) -> list[dict[str, Any]]:
    return [
        {
            "file": problem.place.file if problem.place else None,
            "line": problem.place.line if problem.place else None,
            "path": problem.path,
            "message": problem.message,
        }
        for problem in problems
    ]


def _figures(loaded: Loaded, found: tuple[Problem, ...]) -> dict[str, Any]:
    policy = loaded.policy
    open_from = None if policy.engine_capacity is None else CapacitySource.ENGINE.value
    return {
        "ok": True,
        "files": list(loaded.files),
        "generation": policy.generation,
        "engine": policy.engine.name,
        "capacity": {**_both(policy.rules.tokens, policy.rules.requests), "from": open_from},
        "tiers": [_tier_figures(policy, tier) for tier in policy.rules.tiers],
        "unguarded": None if policy.unguarded is None else policy.unguarded.value,
        "background": policy.background.value,
        "tenants": sorted({tenant.name for tenant in policy.tenants.values()}),
        "warnings": _listed(found),
    }


def _tier_figures(policy: Policy, tier: TierRules) -> dict[str, Any]:
    return {
        "tier": tier.name,
        "reserve": _both(tier.reserve_tokens, tier.reserve_requests),
        "headroom": _both(tier.headroom_tokens, tier.headroom_requests),
        "limit": _both(tier.limit_tokens, tier.limit_requests),
        "largest_request": _both(*_largest(policy, tier.level)),
        "largest_certain_request": _both(*_certain(policy, tier.level)),
    }


def _both(tokens: int, requests: int) -> dict[str, int | None]:
    return {
        "tokens": None if tokens >= UNLIMITED else tokens,
        "requests": None if requests >= UNLIMITED else requests,
    }


def _largest(policy: Policy, level: int) -> tuple[int, int]:
    """The size limit of a tier."""
    tokens, requests = largest_request(policy.rules, level)
    return min(tokens, policy.tiers[level].max_request_tokens or tokens), requests


def _certain(policy: Policy, level: int) -> tuple[int, int]:
    """The part of the size limit that is certain even in an emergency."""
    tokens, requests = largest_certain_request(policy.rules, level)
    return min(tokens, policy.tiers[level].max_request_tokens or tokens), requests


def _summary(loaded: Loaded, found: tuple[Problem, ...]) -> str:
    policy = loaded.policy
    parts = [
        f"{loaded.pool.file}: engine {policy.engine.name}, capacity {_capacity(policy)}",
        _amount_table(policy) if policy.is_sized else _share_table(policy),
        _people(policy),
        _paths(policy),
    ]
    if found:
        parts.append("\n".join([f"{len(found)} warning{'s' * (len(found) != 1)}:", *(f"  {one}" for one in found)]))
    else:
        parts.append("no warnings")
    return "\n\n".join(parts)


def _capacity(policy: Policy) -> str:
    written = _amounts(policy.rules.tokens, policy.rules.requests)
    from_engine = policy.engine_capacity
    if from_engine is None:
        return written
    rest = (
        f"what the engine holds, {of.percent(from_engine.fraction)} of its tokens, and {from_engine.waiting} requests "
        "that wait in it"
    )
    return f"{written}, and otherwise {rest}" if written else rest


def _share_table(policy: Policy) -> str:
    """Shares of a pool whose size only the engine knows."""
    rules = nominal_rules(policy)
    rows = [
        (
            shares.name,
            of.percent(shares.reserve),
            of.percent((1 - shares.lend) * shares.reserve),
            of.percent(shares.limit),
            _share(largest_request(rules, level)[1], rules.requests),
            _share(largest_certain_request(rules, level)[1], rules.requests),
        )
        for level, shares in enumerate(policy.shares)
    ]
    capped = [
        f"size limit of {tier.name} in tokens: {tier.max_request_tokens:,} at most, its max_request_tokens"
        for tier in policy.tiers
        if tier.max_request_tokens is not None
    ]
    return "\n".join([*aligned([_HEAD, *rows]), "(shares of what the engine says it holds)", *capped, *_sizes(policy)])


def _amount_table(policy: Policy) -> str:
    """Every amount as tokens / requests."""
    rows = [
        (
            tier.name,
            _short(tier.reserve_tokens, tier.reserve_requests),
            _short(tier.headroom_tokens, tier.headroom_requests),
            _short(tier.limit_tokens, tier.limit_requests),
            _short(*_largest(policy, tier.level)),
            _short(*_certain(policy, tier.level)),
        )
        for tier in policy.rules.tiers
    ]
    return "\n".join([*aligned([_HEAD, *rows]), "(tokens / requests)", *_sizes(policy)])


def _sizes(policy: Policy) -> Sequence[str]:
    """Meaning of the last two columns of either table."""
    first = policy.rules.tiers[0]
    emergency = f", even while {first.name} holds its limit" if first.always_first else ""
    return (
        "size limit: the largest request that a tier accepts; a larger one gets a 400 at once",
        f"certain size: what finds room in a bounded time{emergency}; without a reserve, nothing",
    )


def _share(amount: int, of_all: int) -> str:
    return f"{amount * 100 / of_all:g}%"


def _people(policy: Policy) -> str:
    tenants = {tenant.name: tenant for tenant in policy.tenants.values()}
    lines = []
    for name, tenant in sorted(tenants.items()):
        own, best = policy.tiers[tenant.level].name, policy.tiers[tenant.max_level].name
        keys = sum(other is tenant for other in policy.tenants.values())
        upto = "" if own == best else f", may ask for {best}"
        lines.append(f"  {name}: {own}{upto}; {keys} key{'s' * (keys != 1)}, weight {tenant.weight}")
    shown = [*lines[:20], f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else lines
    without_key = policy.tiers[policy.anonymous.level].name if policy.anonymous else "refused"
    count = "1 tenant" if len(tenants) == 1 else f"{len(tenants)} tenants"
    return "\n".join([count, *shown, f"  without a key: {without_key}"])


def _paths(policy: Policy) -> str:
    """The guarded paths, and the treatment of the others."""
    chosen = "deny before an engine's server, generating in an app"
    chosen = chosen if policy.unguarded is None else policy.unguarded.value
    return f"{len(policy.endpoints)} guarded paths; unguarded: {chosen}; background: {policy.background.value}"


def _short(*amounts: int) -> str:
    return " / ".join("any" if amount >= UNLIMITED else f"{amount:,}" for amount in amounts)


def _amounts(tokens: int, requests: int) -> str:
    named = [(tokens, "tokens"), (requests, "requests")]
    return " and ".join(f"{amount:,} {name}" for amount, name in named if amount < UNLIMITED)
