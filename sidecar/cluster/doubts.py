"""Doubts about a dry run: why its figures are not to be trusted at this load, and what to do.

Each doubt stands for a premise of `sidecar.admission.dry_run` that does not hold. A doubt of one tier may be one of
all: requests of one tier take the room of the others. So only what concerns the wishes of a tier's own clients is the
tier's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from sidecar.durations import short_duration
from sidecar.events import ShadowHolds
from sidecar.telemetry.dry_run import DryRunCounts

FEWEST = 5
"""Fewer requests than this say nothing of a figure's error."""
MOST_SHARE = 0.05
"""The part of the requests whose times may be wrong: more may move a 99th percentile or a number of refusals."""
MOST_GUESSED, MOST_APART = 0.1, 0.25
"""Drawn lengths are right on average where their sum is within a quarter, and rare ones do not matter."""
FEWEST_ARRIVALS, MOST_BY_CHANCE = 30, 0.6
"""See `sidecar.admission.dry_run.arrivals`: 26% follow by chance, and 18 of 30 in one case of 20,000."""
FEW_IN_TAIL, TAIL_FROM_S, TAIL_TIMES = 100, 0.5, 1.5
"""Of so few, one request alone makes a 99th percentile: it is doubted where it is this far beyond the 90th."""
_OWN_FAULT = frozenset(("too_many_shadows", "defect"))


class Doubt(msgspec.Struct, frozen=True):
    """One reason, in a sentence, and what to do. `tier` is empty where it concerns all."""

    tier: str
    reason: str
    advice: str


def doubts(total: DryRunCounts, by_tier: Mapping[str, DryRunCounts], holds: Mapping[str, ShadowHolds]) -> list[Doubt]:
    """All doubts about these figures. `total` is the sum of `by_tier`."""
    if not holds and not total.unknown:
        return []
    summed = _add_up(holds.values())
    of_all = [*_engine_doubts(summed), *_client_doubts(summed), *_unknown_doubts(total)]
    return [*of_all, *_tier_doubts(holds), *_tail_doubts(by_tier)]


def _add_up(all_holds: Iterable[ShadowHolds]) -> ShadowHolds:
    """The sum of all."""
    summed = ShadowHolds()
    for holds in all_holds:
        for name in ShadowHolds.__struct_fields__:
            setattr(summed, name, getattr(summed, name) + getattr(holds, name))
    return summed


def _engine_doubts(holds: ShadowHolds) -> Iterator[Doubt]:
    if _is_much(holds.unlearned, holds.shadows):
        yield Doubt(
            "",
            f"{holds.unlearned:,} of {holds.shadows:,} requests came while the engine ran more than the pool admits, "
            "and before it was known how long it takes when it runs less.",
            "Let it observe quieter traffic first; a later period of the same process knows it.",
        )
    if _is_much(holds.lost, holds.shadows):
        yield Doubt(
            "",
            f"The engine refused or failed {holds.lost:,} of {holds.shadows:,} requests itself; how long they would "
            "have run is a guess.",
            "Find out why (its own queue limit, a restart), or observe at a time without it.",
        )
    is_used = holds.guessed >= FEWEST and holds.guessed > MOST_GUESSED * holds.shadows
    if is_used and not _agrees(holds):
        yield Doubt(
            "",
            f"{holds.guessed:,} of {holds.shadows:,} requests would have ended before they did, and their output "
            "lengths could not be guessed from earlier ones.",
            "Let it observe longer; clients that set `max_tokens` make lengths easier to know.",
        )


def _agrees(holds: ShadowHolds) -> bool:
    """True if the drawn times are right on average, as far as they are known since."""
    is_known = holds.guessed_and_known >= max(FEWEST, holds.guessed // 4)
    return is_known and abs(holds.guessed_s - holds.known_s) <= MOST_APART * holds.known_s


def _client_doubts(holds: ShadowHolds) -> Iterator[Doubt]:
    if _is_much(holds.left, holds.shadows):
        yield Doubt(
            "",
            f"{holds.left:,} of {holds.shadows:,} clients disconnected because the engine was slow, and would have "
            "been served; how long their requests would have run is a guess.",
            "Observe at a time when clients do not give up, or lower the load on the engine.",
        )


def _unknown_doubts(total: DryRunCounts) -> Iterator[Doubt]:
    dropped = sum(number for code, number in total.unknown.items() if code in _OWN_FAULT)
    if dropped and dropped > 0.01 * total.requests:
        yield Doubt(
            "",
            f"{dropped:,} of {total.requests:,} requests were not followed (too many at once, or a defect).",
            "Enforce with more capacity first, or observe with more replicas; the log has the defect, if it is one.",
        )


def _tier_doubts(holds: Mapping[str, ShadowHolds]) -> Iterator[Doubt]:
    for tier, one in holds.items():
        if one.arrivals >= FEWEST_ARRIVALS and one.followed > MOST_BY_CHANCE * one.arrivals:
            share = round(100 * one.followed / one.arrivals)
            yield Doubt(
                tier,
                f"Clients of {tier} seem to send their next request when the last one was answered ({share}% of "
                f"{one.arrivals:,} came directly after an end): when enforcing they would send at another pace.",
                "Take the figures of this tier as a direction, and enforce for a trial hour.",
            )


def _tail_doubts(by_tier: Mapping[str, DryRunCounts]) -> Iterator[Doubt]:
    for tier, counts in by_tier.items():
        p90_s, p99_s = counts.wait_us(0.9) / 1e6, counts.wait_us(0.99) / 1e6
        if tier and counts.admitted <= FEW_IN_TAIL and p99_s > max(p90_s + TAIL_FROM_S, p90_s * TAIL_TIMES):
            yield Doubt(
                tier,
                f"The P99 of {tier} is one request's: of {counts.admitted:,}, nine in ten would have waited for at "
                f"most {short_duration(p90_s)}, and the longest for {short_duration(p99_s)}.",
                "Let it observe longer: which single request waits longest is chance.",
            )


def _is_much(number: int, of: int) -> bool:
    return number >= FEWEST and number > MOST_SHARE * of
