"""What a soak must show, each a line with its figures: every request accounted for, nothing left, memory steady."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.soak.clients import ADMITTED, LEFT, LOST, REFUSED, Ledger
from benchmarks.soak.setting import TIERS
from benchmarks.soak.watching import Counted, Memory, Sample

WARM_UP_S = 300.0
"""In the first five minutes what the replicas remember fills up, and with it their memory."""
SHORTEST_JUDGED_S = 600.0
"""Memory is judged over at least as long again; a shorter soak only shows it."""
MOST_GROWTH, MOST_PEAK = 0.05, 1.25
"""Of the median: how much memory may grow over what is judged, and how high it may be at any moment in it."""
MOST_MORE_THREADS = 8
"""An executor's threads are made one by one, up to a handful."""
MOST_MORE_HANDLES = 8
"""Open files at the end beyond those at the start: idle connections to the engine and to Redis come and go."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that must be so. `is_so` is None where this soak was too short to tell."""

    what: str
    found: str
    is_so: bool | None


def accounting(ledger: Ledger, counted: Counted) -> list[Verdict]:
    """Clients' account against the proxies'.

    A client that disconnected before it was told anything cannot know how its request ended: the proxy does, so the
    proxies' three figures must be those of the clients plus, among them, exactly those who left.
    """
    verdicts = []
    early = counted.abandoned[""]
    missing = 0
    for tier in ("", *TIERS):
        sent, told = ledger.sent[tier], _ended(counted, tier)
        if tier:
            missing += sent - told
            if not told <= sent <= told + early:
                verdicts.append(Verdict(f"{tier}: admitted + refused + abandoned = sent", f"{told} of {sent}", False))
        verdicts.append(_by_hand(tier, ledger, counted))
    total, told = sum(ledger.sent.values()), sum(_ended(counted, tier) for tier in ("", *TIERS))
    verdicts.append(Verdict("in all: admitted + refused + abandoned = sent", f"{told} of {total}", told == total))
    what = "tiers are exact, but for clients that left before their request was read"
    verdicts.append(Verdict(what, f"{missing} missing, {early} such", missing == early))
    settled, admitted = sum(counted.settled.values()), sum(counted.admitted.values())
    verdicts.append(Verdict("every lease settled once", f"{settled} of {admitted}", settled == admitted))
    lost = sum(number for (_, ended), number in ledger.ended.items() if ended == LOST)
    verdicts.append(Verdict("every request ended for its client", f"{lost} did not", lost == 0))
    return verdicts


def _by_hand(tier: str, ledger: Ledger, counted: Counted) -> Verdict:
    """What the clients know for certain is in the proxies' figures, and the rest are those who left."""
    admitted = counted.admitted[tier] - ledger.ended[tier, ADMITTED]
    refused = counted.refused[tier] - ledger.ended[tier, REFUSED]
    abandoned, left = counted.abandoned[tier], ledger.ended[tier, LEFT]
    is_so = min(admitted, refused) >= 0 and (not tier or admitted + refused + abandoned <= left)
    name = tier or "key not valid"
    return Verdict(
        f"{name}: what clients saw is what the proxy counted",
        f"{counted.admitted[tier]} admitted, {counted.refused[tier]} refused, {abandoned} abandoned; clients "
        f"{ledger.ended[tier, ADMITTED]}, {ledger.ended[tier, REFUSED]}, and {left} left untold",
        is_so,
    )


def _ended(counted: Counted, tier: str) -> int:
    return counted.admitted[tier] + counted.refused[tier] + counted.abandoned[tier]


def nothing_left(left: Sequence[str]) -> Verdict:
    """At the end, when no request comes any more."""
    return Verdict("no lease, ticket or request is left", "; ".join(left) or "none", not left)


def is_long(seconds: float) -> bool:
    """Whether a soak is long enough for memory to be judged."""
    return seconds - WARM_UP_S >= SHORTEST_JUDGED_S


def steadiness(name: str, samples: Sequence[Sample], seconds: float) -> list[Verdict]:
    """Memory, open files and threads of one process."""
    from_s = min(WARM_UP_S, seconds / 2)
    memory = Memory.of(samples, from_s)
    is_steady = (
        memory.growth_mib <= MOST_GROWTH * memory.median_mib and memory.most_mib <= MOST_PEAK * memory.median_mib
    )
    first, last = samples[0], samples[-1]
    warm = next(sample for sample in samples if sample.at_s >= from_s)
    return [
        Verdict(
            f"{name}: memory is steady behind the first {from_s / 60:.3g} min",
            f"median {memory.median_mib:.1f} MiB, slope {memory.growth_mib:+.2f} in sum, most {memory.most_mib:.1f}",
            is_steady if is_long(seconds) else None,
        ),
        Verdict(
            f"{name}: open files at the end",
            f"{last.handles} of {first.handles} at the start, {max(one.handles for one in samples)} at most",
            last.handles <= first.handles + MOST_MORE_HANDLES,
        ),
        Verdict(
            f"{name}: threads at the end",
            f"{last.threads} of {warm.threads} behind the first {from_s / 60:.3g} min",
            last.threads <= warm.threads + MOST_MORE_THREADS,
        ),
    ]


def no_defects(errors: Mapping[str, int]) -> Verdict:
    """What the replicas logged as errors."""
    said = "; ".join(f"{number} times {what}" for what, number in errors.items())
    return Verdict("no replica logged a defect", said or "none", not errors)
