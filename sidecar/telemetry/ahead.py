"""Requests that went ahead of one that waited, and why, in words: for explanations, for the page and for traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sidecar.events import Admitted, Classified, Refused
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.request_record import RequestRecord

OTHER_REPLICAS = "admitted by other replicas of the pool"
NOT_KEPT = "admitted so long ago that they are not kept any more"
ELSEWHERE = "admitted by other replicas of the pool, or so long ago that they are not kept any more"
GONE = "admitted, and gone before they ran"

CLAIM = "claim"
TURN, FAIR_SHARE, BEHIND = "turn", "fair_share", "behind"
"""Rules that no event reports: it came earlier; the tenants of one tier take turns; others of its tier were first."""


class AheadGroup(msgspec.Struct, frozen=True):
    """All that went ahead and have their tier and the reason in common. `came_later`: they overtook."""

    tier: str
    came_later: bool
    rule: str
    because: str
    requests: int
    tokens: int


class UnknownAhead(msgspec.Struct, frozen=True):
    """Tokens of a tier that went ahead, too, by requests that this process does not know."""

    tier: str
    tokens: int
    where: str


def why_it_waited(
    obstacle: str | None,
    groups: Sequence[AheadGroup],
    unseen: Sequence[UnknownAhead],
    *,
    is_starved: bool,
    are_all: bool = True,
) -> str:
    """Who overtook it, or else what was in its way. Unless they `are_all`, more went ahead than the groups have."""
    at_least = "" if are_all else "at least "
    if overtook := [group for group in groups if group.came_later]:
        return at_least + went_ahead(overtook)
    if is_starved:
        by_tier = " and ".join(f"{each.tokens:,} tokens of tier {each.tier}" for each in unseen)
        return f"{by_tier} went ahead, {unseen[0].where}" if unseen else "others went ahead"
    came_first = counted(sum(group.requests for group in groups), "request")
    way = "there was no room" if obstacle is None else obstacle
    if tokens := sum(each.tokens for each in unseen):  # `unseen` has one place for all its tiers
        seen = f"{at_least}{came_first} known here and " if groups else ""
        return f"{way}; no request overtook it; {seen}{tokens:,} tokens went first, {unseen[0].where}"
    if groups:
        return f"{way}; no request overtook it, {at_least}{came_first} that had come earlier went first"
    return f"{way}; no request went ahead of it"


def went_ahead(overtook: Sequence[AheadGroup]) -> str:
    """The sentence about those that overtook a request: the tier that did most, its reasons, and the others."""
    most = overtook[0]
    of_tier = [group for group in overtook if group.tier == most.tier]
    others = sum(group.requests for group in overtook if group.tier != most.tier)
    requests = counted(sum(group.requests for group in of_tier), "request")
    separated = " because" if len(of_tier) == 1 else ":"
    also = f"; so did {counted(others, 'request')} of other tiers" if others else ""
    return f"{requests} of tier {most.tier} went ahead{separated} {reasons(of_tier)}{also}"


def reasons(of_tier: Sequence[AheadGroup]) -> str:
    """The reasons of the groups of one tier."""
    if len(of_tier) == 1:
        return of_tier[0].because
    return ", ".join(f"{group.requests:,} because {group.because}" for group in of_tier)


def new_groups(ahead: Iterable[RequestRecord], waiter: RequestRecord, tiers: Sequence[str]) -> list[AheadGroup]:
    """Groups of requests that went ahead: those that overtook first, and among them the larger first. `tiers` are the
    policy's, most important first.
    """
    alike: dict[tuple[str, bool, str, int], list[RequestRecord]] = {}
    for record in ahead:
        classified, admitted = record.classified, record.admitted
        if classified is None or admitted is None:
            continue
        rule = rule_for(record, waiter)
        key = classified.tier, record.arrived_us > waiter.arrived_us, rule, admitted.level if rule == "level" else 0
        alike.setdefault(key, []).append(record)
    worded: dict[tuple[str, bool, str, str], list[RequestRecord]] = {}
    for (tier, came_later, rule, _level), records in alike.items():
        words = because(rule, records[0], waiter, tiers)
        worded.setdefault((tier, came_later, rule, words), []).extend(records)
    groups = [AheadGroup(*key, len(records), sum(map(_tokens, records))) for key, records in worded.items()]
    return sorted(groups, key=lambda group: (not group.came_later, -group.requests))


def without_own_runs(ahead: Iterable[RequestRecord], record: RequestRecord) -> list[RequestRecord]:
    """Requests ahead that were not admitted while the request itself ran, in an attempt that was taken back."""
    if not record.lost:
        return [*ahead]
    return [each for each in ahead if each.admitted is None or not record.ran_at(each.admitted.at_us)]


def unseen(
    end: Admitted | Refused, ahead: Iterable[RequestRecord], journal: Journal, *, is_shared: bool
) -> list[UnknownAhead]:
    """Tokens that the pool counted while a request waited, beyond all those that are known to have gone ahead.

    `is_shared` says that other replicas admit out of the same pool.
    """
    known: dict[str, int] = {}
    for each in (record.classified for record in ahead):
        if each is not None:
            known[each.tier] = known.get(each.tier, 0) + each.tokens
    missing = {tier: tokens - known.get(tier, 0) for tier, tokens in end.served_ahead.items()}
    dropped_us = journal.knows_since_us
    if dropped_us is None or end.at_us - end.queue_wait_us >= dropped_us:
        where = OTHER_REPLICAS if is_shared else GONE
    else:
        where = ELSEWHERE if is_shared else NOT_KEPT
    return [UnknownAhead(tier, tokens, where) for tier, tokens in missing.items() if tokens > 0]


def rule_for(ahead: RequestRecord, waiter: RequestRecord) -> str:
    """The rule by which `ahead` was admitted before `waiter`: one of the scheduler's, or one of the three here.

    The scheduler reports no rule within one tier. There its tenants take turns; but of several engines a request that
    stands in line for one takes part in no turn, and of one tenant's requests a later one goes first only beside that.
    """
    classified, admitted, waiting = _tiers(ahead, waiter)
    if ahead.arrived_us <= waiter.arrived_us:
        return TURN
    if classified.tier == waiting.tier:
        is_claim = classified.tenant == waiting.tenant or _stood_in_line(waiter, admitted.at_us)
        return CLAIM if admitted.engine is not None and is_claim else FAIR_SHARE
    return admitted.passed.get(waiting.tier, BEHIND)


def _stood_in_line(waiter: RequestRecord, at_us: int) -> bool:
    """True if it stood in line for an engine then. Not known before it is admitted."""
    admitted = waiter.admitted
    if admitted is None or admitted.placed is None or not admitted.placed.claimed_us:
        return False
    return admitted.at_us - admitted.placed.claimed_us <= at_us


def because(rule: str, ahead: RequestRecord, waiter: RequestRecord, tiers: Sequence[str]) -> str:
    """The rule as half a sentence. `tiers` are the names of the policy's, most important first."""
    classified, admitted, waiting = _tiers(ahead, waiter)
    by, tier = classified.tier, waiting.tier
    risen_to = aged_to(by, admitted.level, tiers)
    if rule == "level" and risen_to is not None and tier in tiers[: tiers.index(by)]:
        return f"{by} had waited so long that it ranked with {risen_to}"
    return in_words(rule, by, tier)


def in_words(rule: str, by: str, tier: str) -> str:
    """The rule by which a request of the tier `by` went before one of `tier`, as half a sentence."""
    return {
        TURN: f"{by} came earlier" if by != tier else "they came earlier",
        FAIR_SHARE: f"the tenants of {tier} take turns by their share",
        BEHIND: f"others of {tier} stood before it, and had come later than {by}",
        "always_first": f"{by} always goes first",
        "reserve": f"{by} held less than its reserve",
        "reserve_turn": f"{by} held less than its reserve, and it was its turn",
        "gain": f"{by} earned more in that time",
        "level": f"{by} is more important",
        "limit": f"{tier} was at its limit",
        "guarded": f"the SLO of a more important tier left no room to {tier}",
        "passed_over": f"{tier} asked for more than the reserves of the others leave",
        CLAIM: f"{tier if by != tier else 'it'} waited for its own engine",
    }.get(rule, f"of the rule {rule}")


def aged_to(tier: str, level: int, tiers: Sequence[str]) -> str | None:
    """The tier with which a request of `tier` ranked by the time it had waited, None where that is its own."""
    return tiers[max(level, 0)] if tier in tiers and level < tiers.index(tier) else None


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or the plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(number: int) -> str:
    """How often."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _tokens(record: RequestRecord) -> int:
    return 0 if record.classified is None else record.classified.tokens


def _tiers(ahead: RequestRecord, waiter: RequestRecord) -> tuple[Classified, Admitted, Classified]:
    assert ahead.classified is not None
    assert ahead.admitted is not None
    assert waiter.classified is not None
    return ahead.classified, ahead.admitted, waiter.classified
