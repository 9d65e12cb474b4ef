"""Explanation of a request's place under `order: gain`: its tier's floor, its objective, and what it earns.

The output and the engine's speed are those that hold before anything was measured. A running sidecar has learned both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidecar.admission.intake import SizedRequest
from sidecar.admission.model_names import ModelNames
from sidecar.admission.policy_snapshot import objective_for
from sidecar.admission.request_gain import gain_for
from sidecar.cli.output import bounded
from sidecar.durations import exact_duration, policy_duration
from sidecar.engines.speed import DEFAULTS, Coefficients
from sidecar.gain.token_deadlines import Objective, asked_slo
from sidecar.policy.fields import UNBOUNDED
from sidecar.policy.fleet import Affinity, Discovery, EngineAddress, FleetPolicy, offered
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED, TierRules
from sidecar.pools import Pool
from sidecar.pools.engines import EngineOffer
from sidecar.scheduling.guard import first_state
from sidecar.scheduling.tickets import TicketGain
from sidecar.telemetry.ahead import counted

Found = dict[str, Any]


def gain(policy: Policy, request: SizedRequest) -> Found | None:
    """The place of a request that was sized and appraised, as JSON types; None where the policy orders by level."""
    rules, level = policy.rules, request.classification.level
    if not rules.is_by_gain:
        return None
    tier = policy.tiers[level]
    own = objective = objective_for(tier)
    ignored: list[str] = []
    if objective is not None:
        objective, ignored = asked_slo(request.headers, objective)
    return {
        "always_first": rules.tiers[level].always_first,
        "floor": _floor(policy, request, rules.tiers[level]),
        "weight": tier.gain.weight if objective is not None else None,
        "ttft_s": None if objective is None else objective.ttft_us / 1e6,
        "tpot_s": None if objective is None else objective.tpot_us / 1e6,
        "is_loosened": objective != own,
        "ignored": ignored,
        "why_not": _why_not(objective, request),
        "speed": _speed(DEFAULTS),
        "earns": None if request.gain is None else _earns(request.gain, request.prompt_tokens),
        "densities": {tier.name: _density(objective_for(tier), request) for tier in policy.tiers},
    }


def _why_not(objective: Objective | None, request: SizedRequest) -> str | None:
    """Why it can earn nothing."""
    if objective is None:
        return "its tier has no `slo` with both `ttft` and `tpot`"
    return "it generates no tokens, or no one waits for them" if request.gain is None else None


def _floor(policy: Policy, request: SizedRequest, rules: TierRules) -> Found:
    """Rule 9: the fair part of the tier's reserve, and no less than what it never lends."""
    share = policy.tiers[request.classification.level]
    part = max(share.reserve * policy.fair, share.reserve * (1 - share.lend))
    tokens, requests, _ = rules.reserve
    return {
        "fair": float(policy.fair),
        "reserve": float(share.reserve),
        "lend": float(share.lend),
        "part": float(part),
        "tokens": bounded(tokens),
        "requests": bounded(requests),
        "fits": request.tokens <= tokens and request.requests <= requests and bool(part),
    }


def _speed(speed: Coefficients) -> Found:
    return {
        "prefill_ns": speed.prefill_ns,
        "output_ns": speed.output_ns,
        "token_us": speed.token_us,
        "first_us": speed.first_us,
    }


def _earns(figures: TicketGain, prompt_tokens: int) -> Found:
    return {
        "prompt_tokens": prompt_tokens,
        "output_tokens": figures.tokens,
        "gain": figures.weight * figures.tokens,
        "cost_us": figures.cost_us,
        "density": figures.earned_after(0),
        "start_by_s": figures.start_by_us / 1e6,
        "slack_s": figures.slack_us / 1e6,
        "nothing_after_s": (figures.start_by_us + figures.tokens * figures.slack_us) / 1e6,
    }


def _density(objective: Objective | None, request: SizedRequest) -> int | None:
    """The density of the same request with a tier's objective; None where that has none, or where it earns nothing."""
    if objective is None or request.assumed_output < 1 or request.payload.background:
        return None
    output = request.assumed_output * request.payload.shown_sequences
    return gain_for(objective, DEFAULTS, request.prompt_tokens, output).earned_after(0)


def gain_lines(found: Found, tier: str) -> list[str]:
    """Lines for people: what it earns, then its place, from the first to the last."""
    if found["always_first"]:
        return [f"   tier {tier} is always first: before all that is ordered by gain   (rule always_first)"]
    rows = [("floor", _floor_sentence(found["floor"], tier))]
    if found["earns"] is not None:
        rows += _earning(found)
    rows += _first(found)
    rows += _place(found)
    return [f"   {label:<9} {sentence}" for label, sentence in rows]


def _floor_sentence(floor: Found, tier: str) -> str:
    of = f"fair {_percent(floor['fair'])} of its reserve, {_percent(floor['reserve'])}"
    if floor["part"] > floor["fair"] * floor["reserve"]:
        of = f"what it never lends of its reserve, {_percent(floor['reserve'])}"
    return f"tier {tier} has {_share(floor)} ({of})" if floor["part"] else f"tier {tier} has none ({of})"


def _share(found: Found) -> str:
    units = (("tokens", "token"), ("requests", "request"))
    sizes = [counted(found[name], noun) for name, noun in units if found[name] is not None]
    return " and ".join(sizes) if sizes else f"{_percent(found['part'])} of the pool"


def _percent(part: float) -> str:
    return f"{part * 100:.4g}%"


def _earning(found: Found) -> list[tuple[str, str]]:
    earns, speed = found["earns"], found["speed"]
    loosened = ", loosened by its headers" if found["is_loosened"] else ""
    ignored = f"; ignored: {', '.join(found['ignored'])}" if found["ignored"] else ""
    rows = [
        (
            "promised",
            f"the first token within {policy_duration(found['ttft_s'])}, then one every "
            f"{policy_duration(found['tpot_s'])}{loosened}{ignored}",
        ),
        (
            "expected",
            f"{counted(earns['output_tokens'], 'output token')}, the most that it may have, until lengths are learned; "
            f"x weight {found['weight']} = {earns['gain']:,}",
        ),
        (
            "costs",
            f"{exact_duration(earns['cost_us'] / 1e6)} of the engine: {earns['prompt_tokens']:,} prompt x "
            f"{speed['prefill_ns'] / 1e3:g} us + {earns['output_tokens']:,} output x {speed['output_ns'] / 1e3:g} us",
        ),
        (
            "takes",
            f"{exact_duration(speed['first_us'] / 1e6)} and its prompt to a first token, then "
            f"{exact_duration(speed['token_us'] / 1e6)} for each; these four are defaults until they are measured",
        ),
        ("density", f"{earns['density']:,} for each second of the engine: weight x the part of its tokens in time"),
    ]
    each = [f"{name} {'none' if value is None else f'{value:,}'}" for name, value in found["densities"].items()]
    return [*rows, ("", f"by the tiers' own objectives it would have: {', '.join(each)}")] if len(each) > 1 else rows


def _first(found: Found) -> list[tuple[str, str]]:
    """Where it is before all that is ordered by gain."""
    if found["floor"]["fits"]:
        return [("first", "where it fits into what is free of its tier's floor, in fair order   (rule reserve)")]
    if found["floor"]["part"]:
        return [
            ("first", "while its tier's floor, which is smaller than it, is not full: by turns   (rule reserve_turn)")
        ]
    return []


def _place(found: Found) -> list[tuple[str, str]]:
    earns = found["earns"]
    if earns is None:
        return [("last", f"by level, in fair order: {found['why_not']}   (rule level)")]
    start_s, end_s = earns["start_by_s"], exact_duration(earns["nothing_after_s"])
    return [
        ("then", f"the highest density first; after it waited {exact_duration(start_s)} its density falls, for tokens"),
        ("", "would come late   (rule gain)"),
        (
            "last",
            f"after it waited {end_s}, when no token can be in time; or while its tenant is ahead of the others of",
        ),
        ("", "its tier by two of the largest requests: by level, in fair order   (rule level)"),
    ]


# -- Explanation of rule 10 for a request's tier: whose SLO keeps it from filling the pool, and whom its own keeps.


def guards(policy: Policy, pool: Pool, level: int) -> Found | None:
    """The guarded tiers that are more important, and the tier itself where it is one, as JSON types.

    None where there are none. The shares are those of a pool that has seen no request yet.
    """
    always_first = policy.rules.tiers[level].always_first
    found = []
    for guard in pool.guards():
        of = policy.level_for(guard.tier)
        if of is not None and (of == level or (of < level and not always_first)):
            slo = policy.tiers[of].slo
            found.append(
                {
                    "tier": guard.tier,
                    "is_own": of == level,
                    "share": _first_share(policy, of),
                    "ttft_s": slo.ttft_s,
                    "tpot_s": slo.tpot_s,
                    "hold": float(policy.tiers[of].hold),
                }
            )
    if not found:
        return None
    has_reserve = policy.tiers[level].reserve > 0
    return {"tiers": found, "has_reserve": has_reserve}


def _first_share(policy: Policy, level: int) -> float:
    """The share at which a guard begins: a tenth of the pool, or the floors of the less important tiers."""
    below = [tier for tier in policy.tiers[level + 1 :] if not tier.always_first]
    fair = policy.fair if policy.rules.is_by_gain else 1
    return first_state(float(sum(tier.reserve for tier in below) * fair)).share


def guard_lines(found: Found) -> list[str]:
    """The guards in lines for people."""
    lines = []
    for guard in found["tiers"]:
        promise = (
            f"{100 * guard['hold']:.4g}% of {guard['tier']} within {policy_duration(guard['ttft_s'])} to the first "
            f"token and {policy_duration(guard['tpot_s'])} between tokens"
        )
        if guard["is_own"]:
            lines.append(f"   its own tier is held to its SLO: {promise}")
            lines.append(
                f"   beyond their reserves, less important tiers may fill the pool to {guard['share']:.0%} at first; "
                f"that share moves with the SLO of {guard['tier']}"
            )
        else:
            beyond = "beyond its reserve" if found["has_reserve"] else "it has no reserve, so"
            lines.append(
                f"   {beyond} it may fill the pool to {guard['share']:.0%} at first, or run alone of such work"
            )
            lines.append(f"   that share moves with the SLO of {guard['tier']}: {promise}")
    return lines


# -- Explanation of the pool and the engines that a policy with `engines` has for a request.


def of_model(policy: Policy, request: SizedRequest) -> Policy:
    """The policy of the pool that serves a request. Raises InvalidBody or ModelNotFound where none does."""
    model, tenant = request.payload.model, request.classification.tenant
    return policy.of_model(ModelNames(policy).model_for(model, request.body, tenant)) if policy.models else policy


def empty_pool(policy: Policy) -> Pool:
    """The pool of a policy before its first request. Where no engine is known yet, it is one of no bound."""
    known = () if policy.engines is None else _find_engines(policy.engines)
    if policy.engines is None or not known:
        return Pool(policy)
    pool = Pool(policy, weight_percent=policy.engines.affinity.weight_percent)
    pool.set_engines([_offer(engine) for engine in known])
    return pool


def _offer(engine: EngineAddress) -> EngineOffer:
    tokens, requests = map(offered, engine.capacity.size(None, None))
    return EngineOffer(f"{engine.name}#1", tokens, requests, engine.prefill)


def _find_engines(engines: FleetPolicy) -> Sequence[EngineAddress]:
    """The engines that the policy names, or the one of the process that mounts the middleware."""
    if engines.mounted:
        return (EngineAddress(Discovery.MOUNTED.value, "", engines.capacity, engines.prefill),)
    return engines.static


def placement(policy: Policy, pool: Policy, holds: Found) -> Found | None:
    """The engines for a request that holds so much, as JSON types; None for a pool with one engine of no name."""
    if policy.engines is None or pool.engines is None:
        return None
    known = _find_engines(pool.engines)
    fits = [engine.name for engine in known if _holds(engine, holds)]
    return {
        "model": pool.pool.removeprefix(f"{policy.pool}/") if policy.models else None,
        "discovery": pool.engines.discovery.value,
        "engines": [engine.name for engine in known],
        "too_small": [engine.name for engine in known if engine.name not in fits],
        "prompt_tokens": holds["prompt_tokens"],
        "prefill": {
            engine.name: None if engine.prefill == UNLIMITED else engine.prefill
            for engine in known
            if engine.name in fits
        },
        "affinity": _affinity(pool.engines.affinity),
    }


def _holds(engine: EngineAddress, holds: Found) -> bool:
    """True if an engine that is empty has room, as far as the policy says it."""
    tokens, requests = engine.capacity.size(None, None)
    return (tokens is None or holds["tokens"] <= tokens) and (requests is None or holds["requests"] <= requests)


def _affinity(affinity: Affinity) -> Found:
    return {
        "prefix": affinity.prefix,
        "weight": affinity.weight_percent / 100,
        "session": [name.decode() for name in affinity.session],
    }


def placement_lines(found: Found) -> list[str]:
    """Lines for people on the placement."""
    if found["discovery"] == Discovery.MOUNTED.value:
        return ["   that of the process which got the request: no other can run it", *_bound(found)]
    lines = [] if found["model"] is None else [f"   the pool of model {found['model']}"]
    names = ", ".join(found["engines"]) or f"those that {found['discovery']} names"
    lines.append(f"   one of its engines: {names}")
    if found["too_small"]:
        lines.append(f"   never {', '.join(found['too_small'])}: too small for it")
    affinity = found["affinity"]
    caches = f", less {affinity['weight']:g} times what its prefix cache is likely to have of the prompt"
    is_drawn = affinity["weight"] and (affinity["prefix"] or affinity["session"])
    lines.append(f"   the one with the least prompt tokens to prefill{caches if is_drawn else ''}")
    return [*lines, *_bound(found)]


def _bound(found: Found) -> list[str]:
    lines = []
    bounds = {UNBOUNDED if most is None else f"{most:,}" for most in found["prefill"].values()}
    if bounds and bounds != {UNBOUNDED}:
        most = " or ".join(sorted(bounds))
        lines.append(f"   when that has room: its {found['prompt_tokens']:,} prompt tokens count until the first byte,")
        lines.append(f"   and an engine may have {most} of such tokens, or one prompt that is larger")
    return lines
