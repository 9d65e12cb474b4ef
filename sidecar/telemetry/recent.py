"""The last five minutes of this process by tier: what was admitted and refused, how long it waited, who overtook it.

Kept in 60 buckets of 5 seconds of calendar time, so that the buckets of several replicas can be added up. A bucket that
is written again five minutes later is emptied first: memory is bounded by the tiers, and nothing has to be cleaned up.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidecar.events import Admitted, Classified, Event, FirstByte, Preempted, Received, Refused, Settled
from sidecar.telemetry.preemption import end_of_wait, engine_time_us
from sidecar.telemetry.telemetry import Tell, Trace

BUCKET_S = 5
BUCKETS = 60
MOST_TIERS = 64
"""More than any policy has: a changed policy may bring new names, and a process that sees many must not grow."""
_BUCKET_US = BUCKET_S * 1_000_000


class Bucket(msgspec.Struct):
    """Five seconds from `t_s` on, in seconds since 1970.

    The sums are over the requests whose wait ended in them, the maxima also over those that waited on at their end.
    `ttft_max_s` is the longest time from arrival to the first byte of a streamed answer. `preempted` counts how often a
    request gave its room back, `engine_lost_s` for how long the engine had worked on them.
    """

    t_s: int
    admitted: int = 0
    refused: int = 0
    wait_sum_s: float = 0.0
    wait_max_s: float = 0.0
    starvation_sum_s: float = 0.0
    starvation_max_s: float = 0.0
    ttft_max_s: float = 0.0
    preempted: int = 0
    engine_lost_s: float = 0.0


class Overtakings(msgspec.Struct):
    """By one tier, of the first in line of another: how many requests and tokens went ahead, and by which rules."""

    requests: int = 0
    tokens: int = 0
    rules: dict[str, int] = {}


class TierRecent(msgspec.Struct):
    """One tier's last five minutes: its buckets, the oldest first, and who overtook it."""

    buckets: list[Bucket]
    overtaken_by: dict[str, Overtakings]


class Recent:
    """Listens to every request. Costs about a microsecond and a half for each."""

    def __init__(self) -> None:
        self._tiers: dict[str, _Tier] = {}

    def begin(self, received: Received, _: Trace | None) -> Tell:
        """See `Listener.begin`."""
        return _Request(self, received).tell

    def waits(self, tier: str, at_s: float, wait_s: float, starvation_s: float) -> None:
        """Notes how long the oldest of a tier has waited so far: a wait shows before it has ended."""
        bucket = self.tier(tier).at(int(at_s) // BUCKET_S)
        bucket.wait_max_us = max(bucket.wait_max_us, round(wait_s * 1e6))
        bucket.starvation_max_us = max(bucket.starvation_max_us, round(starvation_s * 1e6))

    def read(self, tier: str, at_s: float) -> TierRecent:
        """The five minutes up to `at_s`, the bucket that `at_s` is in included."""
        kept = self._tiers.get(tier)
        last = int(at_s) // BUCKET_S
        numbers = range(last - BUCKETS + 1, last + 1)
        if kept is None:
            return TierRecent([Bucket(number * BUCKET_S) for number in numbers], {})
        buckets = [kept.buckets[number % BUCKETS] for number in numbers]
        current = [bucket for bucket, number in zip(buckets, numbers, strict=True) if bucket.number == number]
        return TierRecent([kept.read(number) for number in numbers], _sum(current))

    def tier(self, name: str) -> _Tier:
        """What is kept of a tier; one too many shares the place of the others that are."""
        tier = self._tiers.get(name)
        if tier is None:
            if len(self._tiers) >= MOST_TIERS:
                name = ""
            tier = self._tiers.setdefault(name, _Tier())
        return tier


class _Bucket:
    """Whole microseconds; `overtaken_by` has (tokens, requests) of every tier and rule by which another went first."""

    __slots__ = (
        "admitted", "engine_lost_us", "number", "overtaken_by", "preempted", "refused", "starvation_max_us",
        "starvation_sum_us", "ttft_max_us", "wait_max_us", "wait_sum_us",
    )  # fmt: skip

    def __init__(self) -> None:
        self.begin(-1)

    def begin(self, number: int) -> None:
        self.number = number
        self.admitted = self.refused = self.preempted = self.engine_lost_us = 0
        self.wait_sum_us = self.wait_max_us = self.starvation_sum_us = self.starvation_max_us = self.ttft_max_us = 0
        self.overtaken_by: dict[tuple[str, str], tuple[int, int]] = {}

    def waited(self, wait_us: int, starvation_us: int, told: tuple[int, int] = (0, 0)) -> None:
        """`told` is what was noted of the same wait and starvation before."""
        self.wait_sum_us += wait_us - told[0]
        self.starvation_sum_us += starvation_us - told[1]
        self.wait_max_us = max(self.wait_max_us, wait_us)
        self.starvation_max_us = max(self.starvation_max_us, starvation_us)

    def overtaken(self, tier: str, rule: str, tokens: int) -> None:
        by = tier, rule
        counted_tokens, counted = self.overtaken_by.get(by, (0, 0))
        self.overtaken_by[by] = counted_tokens + tokens, counted + 1


class _Tier:
    __slots__ = ("buckets",)

    def __init__(self) -> None:
        self.buckets = [_Bucket() for _ in range(BUCKETS)]

    def at(self, number: int) -> _Bucket:
        bucket = self.buckets[number % BUCKETS]
        if bucket.number != number:
            bucket.begin(number)
        return bucket

    def read(self, number: int) -> Bucket:
        kept, start_s = self.buckets[number % BUCKETS], number * BUCKET_S
        if kept.number != number:
            return Bucket(start_s)
        return Bucket(
            start_s,
            kept.admitted,
            kept.refused,
            _seconds(kept.wait_sum_us),
            _seconds(kept.wait_max_us),
            _seconds(kept.starvation_sum_us),
            _seconds(kept.starvation_max_us),
            _seconds(kept.ttft_max_us),
            kept.preempted,
            _seconds(kept.engine_lost_us),
        )


class _Request:
    """One request: which tier it is of, and how its clock stands to the calendar's. `_lost` was taken back."""

    __slots__ = (
        "_admitted_last",
        "_lost",
        "_offset_us",
        "_received_us",
        "_recent",
        "_streams",
        "_tier",
        "_tier_name",
        "_tokens",
    )

    def __init__(self, recent: Recent, received: Received) -> None:
        self._recent = recent
        self._received_us = received.at_us
        self._offset_us = received.wall_ns // 1000 - received.at_us
        self._tier: _Tier | None = None
        self._admitted_last: Admitted | None = None
        self._lost: Admitted | None = None

    def tell(self, event: Event) -> None:
        kind = type(event)
        if kind is Classified:
            self._classified(event)  # type: ignore[arg-type]  # by its type, which is quicker than isinstance
        elif self._tier is None:
            return  # refused before anybody knew which tier it is of
        elif kind is Admitted:
            self._admitted(event, self._tier)  # type: ignore[arg-type]
        elif kind is FirstByte:
            self._answered(event, self._tier)  # type: ignore[arg-type]
        elif kind is Refused:
            self._refused(event, self._tier)  # type: ignore[arg-type]
        elif kind is Preempted:
            self._preempted(event, self._tier)  # type: ignore[arg-type]
        elif kind is Settled and self._admitted_last is None and self._lost is not None:
            self._refused(end_of_wait(self._lost, event), self._tier)  # type: ignore[arg-type]

    def _classified(self, event: Classified) -> None:
        self._tier = self._recent.tier(event.tier)
        self._tier_name, self._tokens, self._streams = event.tier, event.tokens, event.stream

    def _admitted(self, event: Admitted, tier: _Tier) -> None:
        number = (event.at_us + self._offset_us) // _BUCKET_US
        bucket = tier.at(number)
        bucket.admitted += self._lost is None
        if event.queue_wait_us:
            bucket.waited(event.queue_wait_us, event.starvation_us, _waited(self._lost))
        self._admitted_last = event
        for overtaken, rule in event.passed.items():
            self._recent.tier(overtaken).at(number).overtaken(self._tier_name, rule, self._tokens)

    def _preempted(self, event: Preempted, tier: _Tier) -> None:
        bucket = tier.at((event.at_us + self._offset_us) // _BUCKET_US)
        bucket.preempted += 1
        bucket.engine_lost_us += engine_time_us(event)
        self._lost, self._admitted_last = self._admitted_last, None

    def _refused(self, event: Refused, tier: _Tier) -> None:
        bucket = tier.at((event.at_us + self._offset_us) // _BUCKET_US)
        bucket.waited(event.queue_wait_us, event.starvation_us, _waited(self._lost))
        if event.status is not None:  # else: it left by itself
            bucket.refused += 1

    def _answered(self, event: FirstByte, tier: _Tier) -> None:
        if self._streams and event.status < 400:
            bucket = tier.at((event.at_us + self._offset_us) // _BUCKET_US)
            bucket.ttft_max_us = max(bucket.ttft_max_us, event.at_us - self._received_us)


def _sum(buckets: Sequence[_Bucket]) -> dict[str, Overtakings]:
    summed: dict[str, Overtakings] = {}
    for bucket in buckets:
        for (tier, rule), (tokens, requests) in bucket.overtaken_by.items():
            by = summed.setdefault(tier, Overtakings())
            by.requests += requests
            by.tokens += tokens
            by.rules[rule] = by.rules.get(rule, 0) + requests
    return summed


def _waited(lost: Admitted | None) -> tuple[int, int]:
    return (0, 0) if lost is None else (lost.queue_wait_us, lost.starvation_us)


def _seconds(us: int) -> float:
    return us / 1e6
