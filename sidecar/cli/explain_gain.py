"""Explanation of a request's place under `order: gain`: its tier's floor, its objective, and what it earns.

The output and the engine's speed are those that hold before anything was measured. A running sidecar has learned both.
"""

from __future__ import annotations

from typing import Any

from sidecar.admission.intake import SizedRequest
from sidecar.admission.policy_snapshot import objective_for
from sidecar.admission.request_gain import gain_for
from sidecar.cli.output import bounded
from sidecar.durations import exact_duration, policy_duration
from sidecar.engines.speed import DEFAULTS, Coefficients
from sidecar.gain.token_deadlines import Objective, asked_slo
from sidecar.policy.model import Policy
from sidecar.policy.rules import TierRules
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
