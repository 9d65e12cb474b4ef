"""Wording of the overview: figures for people, and the headline that names the tier that starves and its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidecar.cluster.document import ReplicaView, TenantView, TierGuard, TierView
from sidecar.durations import short_duration
from sidecar.lengths.estimator import EngineSizesDocument
from sidecar.policy.choices import Mode
from sidecar.telemetry.ahead import in_words, times
from sidecar.telemetry.recent import Overtakings

STARVES_FROM_S = 0.05
"""A request that was overtaken for less is not shown as starving: a decision or two take that long."""

FLOODS_FROM, FLOODS_BY = 20, 0.75
"""A tenant is named with so many waiting requests, if they are this part of all that wait."""
MOST_NAMED = 3
"""Replicas named in a sentence."""
_OF_THIS_REPLICA = " of this replica"


def count(number: int) -> str:
    """A number of tokens or requests, in at most four figures."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size * 10 or (number >= size and letter != "k"):
            return f"{number / size:.{1 if number < 100 * size else 0}f}".removesuffix(".0") + letter
    return f"{number:,}"


def preempted(tier: TierView) -> str:
    """How often a tier's requests were preempted in the last five minutes, and what that cost; empty where none was."""
    number = sum(bucket.preempted for bucket in tier.recent)
    lost_s = sum(bucket.engine_lost_s for bucket in tier.recent)
    return f"preempted {times(number)}, {short_duration(lost_s)} at the engine lost" if number else ""


def as_promised(tiers: Sequence[TierView]) -> str:
    """The requests and tokens of each tier that came as promised, lately; empty where no tier has an objective."""
    parts = []
    for tier in tiers:
        offered = sum(bucket.offered for bucket in tier.recent)
        attainable = sum(bucket.gain_attainable for bucket in tier.recent)
        if offered:
            met = sum(bucket.met for bucket in tier.recent)
            earned = sum(bucket.gain_earned for bucket in tier.recent)
            in_time = f", {100 * earned / attainable:.0f}% of tokens in time" if attainable else ""
            parts.append(f"{tier.tier} {100 * met / offered:.0f}% of {count(offered)}{in_time}")
    return "; ".join(parts)


def as_guarded(guard: TierGuard, hold: float, met: int, missed: int) -> str:
    """Half a sentence about a tier whose SLO is held: what its requests saw lately, and what that leaves to others."""
    seen = f"{100 * met / (met + missed):.1f}% met of {count(met + missed)}" if met + missed else "none ended lately"
    room = f"others may fill the pool to {guard.share:.0%}, and {guard.total:.0%} of it is held"
    vain = "; they are not why it misses" if guard.is_in_vain else ""
    return f"{seen} ({100 * hold:.4g}% promised), {room}{vain}"


def lease_sizes(rows: Sequence[EngineSizesDocument]) -> str:
    """Sentence on lease sizes at all engines, and on the quantile in force; empty where no output length is learned."""
    if not rows:
        return ""
    held, used = sum(row.held_tokens for row in rows), sum(row.used_tokens for row in rows)
    part = f" ({100 * used / held:.0f}%)" if held else ""
    expected = count(sum(row.expected_tokens for row in rows))
    growths = sum(row.growths for row in rows)
    counted = [row.preemptions for row in rows if row.preemptions is not None]
    lost = f", {count(sum(counted))} preempted by the engine" if counted else ""
    return (
        f"hold {count(held)} tokens, use {count(used)}{part}, expect {expected}; "
        f"quantile {_range([row.quantile for row in rows])}, overlap {_range([row.overlap for row in rows])}; "
        f"grew {count(growths)}x{lost}"
    )


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.4g}", f"{max(values):.4g}"
    return most if least == most else f"{least} to {most}"


def main_overtaking(overtaken_by: Mapping[str, Overtakings]) -> tuple[str, str] | None:
    """The tier that overtook most often in the last five minutes, and its most frequent rule; None where none did."""
    if not overtaken_by:
        return None
    by, counted = max(overtaken_by.items(), key=lambda pair: pair[1].requests)
    return by, max(counted.rules.items(), key=lambda pair: pair[1])[0]


def waits_at_its_limit(overtaken_by: Mapping[str, Overtakings]) -> bool:
    """True if others pass a tier as its operator wants it: it has all that its `limit` or another tier's SLO allows."""
    found = main_overtaking(overtaken_by)
    return found is not None and found[1] in ("limit", "guarded")


def starving(tiers: Sequence[TierView]) -> str | None:
    """The tier whose oldest request starves most, None where none does."""
    most = max(tiers, key=_starvation_s, default=None)
    return most.tier if most is not None and _starvation_s(most) >= STARVES_FROM_S else None


def headline(tiers: Sequence[TierView], *, is_alone: bool = True) -> str:
    """The tier that starves most now and what overtook it; else the one that waits longest; else that none waits.

    The last minutes are those of this process, which `is_alone` in its pool, or one of several replicas.
    """
    most = starving(tiers)
    if most is not None:
        return _starves(next(tier for tier in tiers if tier.tier == most), is_alone=is_alone)
    longest = max(tiers, key=_wait_s, default=None)
    if longest is not None and longest.oldest is not None:
        reason = ", at its own limit" if longest.is_at_limit else ""
        return f"No request starves. {longest.tier} waits longest: {short_duration(_wait_s(longest))}{reason}."
    return f"No request waits.{_starved_before(tiers, is_alone=is_alone)}"


def crowd(tenants: Sequence[TenantView], *, is_alone: bool = True) -> str:
    """The tenant whose requests are most of those that wait, as a sentence to follow the headline; empty for none.

    The tenants are those of this process, which `is_alone` in its pool, or one of several replicas.

    Not where it is the only one that holds or waits: it is in no other tenant's way.
    """
    waiting = sum(tenant.waiting for tenant in tenants)
    most = max(tenants, key=lambda tenant: tenant.waiting, default=None)
    if most is None or len(tenants) < 2 or most.waiting < max(FLOODS_FROM, FLOODS_BY * waiting):
        return ""
    here = "" if is_alone else _OF_THIS_REPLICA
    return f" {most.waiting:,} of the {waiting:,} waiting requests{here} are from tenant {most.tenant}."


def engine_headline(replicas: Sequence[ReplicaView], waiting: int, mode: Mode) -> str | None:
    """Which replicas cannot use their engine, why and for how long, with how many requests wait; None where all can."""
    without = [(one, one.engine) for one in replicas if one.engine is not None and one.engine.reason]
    if not without:
        return None
    worst, engine = max(without, key=lambda pair: pair[1].for_s)
    for_s = short_duration(engine.for_s + worst.seen_s_ago)
    if len(without) < len(replicas):
        names = ", ".join(f"{one.host} {one.replica[:8]}" for one, _ in without[:MOST_NAMED])
        more = f" and {len(without) - MOST_NAMED} more" if len(without) > MOST_NAMED else ""
        cannot = f"{len(without)} of {len(replicas)} replicas cannot use the engine ({names}{more})"
        sentence = f"{cannot}: {engine.reason}, for {for_s}."
    elif engine.state == "mismatch":
        sentence = f"Another engine than the policy's answers, for {for_s}: {engine.reason}."
    elif engine.reason.startswith("no engine "):  # of a pool of several
        sentence = f"N{engine.reason[1:]}, for {for_s}."
    else:
        sentence = f"The engine does not answer: {engine.reason}, for {for_s}."
    if mode is not Mode.ENFORCE:
        return f"{sentence} No request is held (mode: {mode.value})."
    waits = "No request waits" if not waiting else "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
    return f"{sentence} {waits}."


def sentence_for(mode: Mode, sentence: str) -> str:
    """The sentence for that mode: in `observe`, it is about the requests that would be held; `pass` decides nothing."""
    if mode is Mode.PASS:
        return "Every request passes untouched (mode: pass). Nothing is checked, held, counted or limited."
    if mode is Mode.ENFORCE:
        return sentence
    rest = f"no {sentence[3:]}" if sentence.startswith("No ") else sentence
    return f"No request is held (mode: observe). If they were: {rest}"


def _starves(tier: TierView, *, is_alone: bool) -> str:
    waits, starved = short_duration(_wait_s(tier)), short_duration(_starvation_s(tier))
    reason = _overtaker(tier, is_alone=is_alone)
    return f"{tier.tier} starves: its oldest request has waited {waits} and starved {starved}. {reason}".rstrip()


def _overtaker(tier: TierView, *, is_alone: bool) -> str:
    """The tier that overtook this one most often in the last five minutes and why, as a sentence; empty where
    nothing did.
    """
    found = main_overtaking(tier.overtaken_by)
    if found is None:
        return ""
    by, rule = found
    whom = "it" if is_alone else f"requests{_OF_THIS_REPLICA}"
    often = times(tier.overtaken_by[by].requests)
    return f"{by} overtook {whom} {often} in 5 minutes, because {in_words(rule, by, tier.tier)}."


def _starved_before(tiers: Sequence[TierView], *, is_alone: bool) -> str:
    bound_by_others = [tier for tier in tiers if not waits_at_its_limit(tier.overtaken_by)]
    longest = {tier.tier: max((it.starvation_max_s for it in tier.recent), default=0.0) for tier in bound_by_others}
    if not longest or max(longest.values()) < STARVES_FROM_S:
        return ""
    most = max(longest, key=lambda name: longest[name])
    reason = next(_overtaker(tier, is_alone=is_alone) for tier in tiers if tier.tier == most)
    who = most if is_alone else f"{most}{_OF_THIS_REPLICA}"
    return f" In the last 5 minutes {who} starved for up to {short_duration(longest[most])}. {reason}".rstrip()


def _wait_s(tier: TierView) -> float:
    return 0.0 if tier.oldest is None else tier.oldest.wait_s


def _starvation_s(tier: TierView) -> float:
    return 0.0 if tier.oldest is None or tier.is_at_limit else tier.oldest.starvation_s
