"""The last five minutes of this process by tier: admissions, refusals, waits, and the tiers that overtook it.

A change of mode begins them anew: in `mode: observe` the waits are those of shadow requests, and real ones never mix
with them.

Kept in 60 buckets of 5 seconds of calendar time, so that the buckets of several replicas can be added up. A bucket that
is written again five minutes later is emptied first: memory is bounded by the tiers, and nothing has to be cleaned up.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sidecar.events import Admitted, FirstByte, Preempted, Refused, ServiceGain, Settled
from sidecar.telemetry.request_record import EventHandlers, RequestRecord, engine_time_us

BUCKET_S = 5
BUCKETS = 60
MOST_TIERS = 64
"""More than any policy has: a changed policy may bring new names, and a process that sees many must not grow."""
_BUCKET_US = BUCKET_S * 1_000_000
MET = "met"
"""`ServiceGain.slo` of a request that got what its tier promises."""


class Bucket(msgspec.Struct):
    """Five seconds from `t_s` on, in seconds since 1970.

    The sums are over the requests whose wait ended in them, the maxima also over those that waited on at their end.
    `ttft_max_s` is the longest time from arrival to the first byte of a streamed answer. `preempted` counts how often a
    request gave its room back, `engine_lost_s` for how long the engine had worked on them. Of a tier whose service gain
    is measured, `offered` requests ended, `met` of them as promised, and they earned so much of what was attainable.
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
    offered: int = 0
    met: int = 0
    gain_earned: int = 0
    gain_attainable: int = 0


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
        self._since_ns = 0
        self.handlers: EventHandlers = {
            Admitted: self._admitted,
            FirstByte: self._first_byte,
            Preempted: self._preempted,
            Refused: self._refused,
            Settled: self._settled,
        }

    def begin_anew(self, now_ns: int) -> None:
        """Forgets everything. Waits of requests that came before `now_ns` (since 1970) are not counted any more."""
        self._tiers.clear()
        self._since_ns = now_ns

    def waits(self, tier: str, at_s: float, wait_s: float, starvation_s: float) -> None:
        """Notes how long the oldest of a tier has waited so far: a wait shows before it has ended."""
        bucket = self._tier(tier).at(int(at_s) // BUCKET_S)
        bucket.wait_max_s = max(bucket.wait_max_s, wait_s)
        bucket.starvation_max_s = max(bucket.starvation_max_s, starvation_s)

    def read(self, tier: str, at_s: float) -> TierRecent:
        """The five minutes up to `at_s`, the bucket that `at_s` is in included."""
        kept, last = self._tiers.get(tier) or _Tier(), int(at_s) // BUCKET_S
        read = TierRecent([], {})
        for number in range(last - BUCKETS + 1, last + 1):
            bucket = kept.buckets[number % BUCKETS]
            if bucket.t_s == number * BUCKET_S:
                read.buckets.append(msgspec.structs.replace(bucket))
                add_overtakings(read.overtaken_by, kept.overtaken_by[number % BUCKETS])
            else:
                read.buckets.append(Bucket(number * BUCKET_S))
        return read

    def _admitted(self, record: RequestRecord, event: Admitted) -> None:
        classified = record.classified
        if classified is None:
            return
        number = _number(record, event.at_us)
        bucket = self._tier(classified.tier).at(number)
        bucket.admitted += not record.lost
        if event.queue_wait_us and record.wall_ns >= self._since_ns:
            _add_wait(bucket, record, event)
        for overtaken, rule in event.passed.items():
            tier = self._tier(overtaken)
            tier.at(number)  # begins it where it is another time's
            one = Overtakings(1, classified.tokens, {rule: 1})
            add_overtakings(tier.overtaken_by[number % BUCKETS], {classified.tier: one})

    def _preempted(self, record: RequestRecord, event: Preempted) -> None:
        if record.classified is not None and not event.is_unreached:
            bucket = self._tier(record.classified.tier).at(_number(record, event.at_us))
            bucket.preempted += 1
            bucket.engine_lost_s = round(bucket.engine_lost_s + engine_time_us(event) / 1e6, 6)

    def _refused(self, record: RequestRecord, event: Refused) -> None:
        if (tier := record.tier) is not None:
            bucket = self._tier(tier).at(_number(record, event.at_us))
            if record.wall_ns >= self._since_ns:
                _add_wait(bucket, record, event)
            bucket.refused += event.status is not None  # else the client disconnected, or the server stopped
            if event.gain is not None and record.settled is None:
                _add_gain(bucket, event.gain)

    def _settled(self, record: RequestRecord, event: Settled) -> None:
        if event.gain is not None and record.classified is not None:
            _add_gain(self._tier(record.classified.tier).at(_number(record, event.at_us)), event.gain)
        if record.refused is not None:  # preempted, and not admitted again
            self._refused(record, record.refused)

    def _first_byte(self, record: RequestRecord, event: FirstByte) -> None:
        classified = record.classified
        if classified is not None and classified.stream and event.status < 400:
            bucket = self._tier(classified.tier).at(_number(record, event.at_us))
            bucket.ttft_max_s = max(bucket.ttft_max_s, (event.at_us - record.at_us) / 1e6)

    def _tier(self, name: str) -> _Tier:
        """The figures of a tier; above the limit, further tiers share one."""
        tier = self._tiers.get(name)
        if tier is None:
            tier = self._tiers.setdefault(name if len(self._tiers) < MOST_TIERS else "", _Tier())
        return tier


class _Tier:
    """A tier's buckets, and beside each of them the tiers that overtook it in that time."""

    __slots__ = ("buckets", "overtaken_by")

    def __init__(self) -> None:
        self.buckets = [Bucket(-BUCKET_S)] * BUCKETS  # none of them is written to: `at` replaces it
        self.overtaken_by: list[dict[str, Overtakings]] = [{}] * BUCKETS

    def at(self, number: int) -> Bucket:
        place = number % BUCKETS
        if self.buckets[place].t_s != number * BUCKET_S:
            self.buckets[place], self.overtaken_by[place] = Bucket(number * BUCKET_S), {}
        return self.buckets[place]


def add_overtakings(into: dict[str, Overtakings], more: Mapping[str, Overtakings]) -> None:
    """Adds those of another bucket or replica."""
    for tier, counted in more.items():
        by = into.setdefault(tier, Overtakings())
        by.requests += counted.requests
        by.tokens += counted.tokens
        for rule, requests in counted.rules.items():
            by.rules[rule] = by.rules.get(rule, 0) + requests


def _add_gain(bucket: Bucket, gain: ServiceGain) -> None:
    bucket.offered += 1
    bucket.met += gain.slo == MET
    bucket.gain_earned += gain.earned
    bucket.gain_attainable += gain.attainable


def _add_wait(bucket: Bucket, record: RequestRecord, end: Admitted | Refused) -> None:
    """The wait before a preemption is part of the one after it, and has been added before."""
    wait_us, starvation_us = end.queue_wait_us, end.starvation_us
    bucket.wait_max_s = max(bucket.wait_max_s, wait_us / 1e6)
    bucket.starvation_max_s = max(bucket.starvation_max_s, starvation_us / 1e6)
    if record.lost:
        wait_us -= record.lost[-1].admitted.queue_wait_us
        starvation_us -= record.lost[-1].admitted.starvation_us
    # Rounded to whole microseconds: a sum of many floats drifts.
    bucket.wait_sum_s = round(bucket.wait_sum_s + wait_us / 1e6, 6)
    bucket.starvation_sum_s = round(bucket.starvation_sum_s + starvation_us / 1e6, 6)


def _number(record: RequestRecord, at_us: int) -> int:
    """The number of the bucket that a moment on the pool's clock is in."""
    return (at_us + record.wall_ns // 1000 - record.at_us) // _BUCKET_US
