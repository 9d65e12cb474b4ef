"""The last five minutes of this process by tier: admissions, refusals, waits, and the tiers that overtook it.

Kept in 60 buckets of 5 seconds of calendar time, so that the buckets of several replicas can be added up. A bucket that
is written again five minutes later is emptied first: memory is bounded by the tiers, and nothing has to be cleaned up.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidecar.events import Admitted, FirstByte, Preempted, Refused, Settled
from sidecar.telemetry.request_record import EventHandlers, RequestRecord, engine_time_us

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
    """A listener. Costs about a microsecond for each request."""

    def __init__(self) -> None:
        self._tiers: dict[str, _Tier] = {}
        self.handlers: EventHandlers = {
            Admitted: self._admitted,
            FirstByte: self._first_byte,
            Preempted: self._preempted,
            Refused: self._refused,
            Settled: self._settled,
        }

    def waits(self, tier: str, at_s: float, wait_s: float, starvation_s: float) -> None:
        """Notes how long the oldest of a tier has waited so far: a wait shows before it has ended."""
        bucket = self._tier(tier).at(int(at_s) // BUCKET_S)
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

    def _admitted(self, record: RequestRecord, event: Admitted) -> None:
        classified = record.classified
        if classified is None:
            return
        number = _number(record, event.at_us)
        bucket = self._tier(classified.tier).at(number)
        bucket.admitted += not record.lost
        if event.queue_wait_us:
            bucket.add_wait(record, event)
        for overtaken, rule in event.passed.items():
            self._tier(overtaken).at(number).add_overtaking(classified.tier, rule, classified.tokens)

    def _preempted(self, record: RequestRecord, event: Preempted) -> None:
        if record.classified is not None:
            bucket = self._tier(record.classified.tier).at(_number(record, event.at_us))
            bucket.preempted += 1
            bucket.engine_lost_us += engine_time_us(event)

    def _refused(self, record: RequestRecord, event: Refused) -> None:
        if record.classified is not None:
            bucket = self._tier(record.classified.tier).at(_number(record, event.at_us))
            bucket.add_wait(record, event)
            bucket.refused += event.status is not None  # else the client disconnected, or the server stopped

    def _settled(self, record: RequestRecord, _: Settled) -> None:
        if record.refused is not None:  # preempted, and not admitted again
            self._refused(record, record.refused)

    def _first_byte(self, record: RequestRecord, event: FirstByte) -> None:
        classified = record.classified
        if classified is not None and classified.stream and event.status < 400:
            bucket = self._tier(classified.tier).at(_number(record, event.at_us))
            bucket.ttft_max_us = max(bucket.ttft_max_us, event.at_us - record.at_us)

    def _tier(self, name: str) -> _Tier:
        """The figures of a tier; above the limit, further tiers share one."""
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers.setdefault(name if len(self._tiers) < MOST_TIERS else "", _Tier())
        return tier


class _Bucket:
    """Whole microseconds; `overtaken_by` has (tokens, requests) of every tier and rule by which another went first."""

    __slots__ = (
        "admitted", "engine_lost_us", "number", "overtaken_by", "preempted", "refused", "starvation_max_us",
        "starvation_sum_us", "ttft_max_us", "wait_max_us", "wait_sum_us"
    )  # fmt: skip

    def __init__(self) -> None:
        self.begin(-1)

    def begin(self, number: int) -> None:
        self.number = number
        self.admitted = self.refused = self.preempted = self.engine_lost_us = 0
        self.wait_sum_us = self.wait_max_us = self.starvation_sum_us = self.starvation_max_us = self.ttft_max_us = 0
        self.overtaken_by: dict[tuple[str, str], tuple[int, int]] = {}

    def add_wait(self, record: RequestRecord, end: Admitted | Refused) -> None:
        """The wait before a preemption is part of the one after it, and has been added before."""
        wait_us, starvation_us = end.queue_wait_us, end.starvation_us
        self.wait_max_us = max(self.wait_max_us, wait_us)
        self.starvation_max_us = max(self.starvation_max_us, starvation_us)
        if record.lost:
            wait_us -= record.lost[-1].admitted.queue_wait_us
            starvation_us -= record.lost[-1].admitted.starvation_us
        self.wait_sum_us += wait_us
        self.starvation_sum_us += starvation_us

    def add_overtaking(self, tier: str, rule: str, tokens: int) -> None:
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
            kept.wait_sum_us / 1e6,
            kept.wait_max_us / 1e6,
            kept.starvation_sum_us / 1e6,
            kept.starvation_max_us / 1e6,
            kept.ttft_max_us / 1e6,
            kept.preempted,
            kept.engine_lost_us / 1e6,
        )


def _number(record: RequestRecord, at_us: int) -> int:
    """The number of the bucket that a moment on the pool's clock is in."""
    return (at_us + record.wall_ns // 1000 - record.at_us) // _BUCKET_US


def _sum(buckets: Sequence[_Bucket]) -> dict[str, Overtakings]:
    summed: dict[str, Overtakings] = {}
    for bucket in buckets:
        for (tier, rule), (tokens, requests) in bucket.overtaken_by.items():
            by = summed.setdefault(tier, Overtakings())
            by.requests += requests
            by.tokens += tokens
            by.rules[rule] = by.rules.get(rule, 0) + requests
    return summed
