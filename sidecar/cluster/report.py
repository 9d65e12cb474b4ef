"""Report of one replica, which every replica of the pool reads to show the whole pool. Its size is bounded."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sidecar.cluster.document import EngineView, OldestWaiter, RefusalView, TenantView
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.engines.view import EngineDocument
from sidecar.events import Refused
from sidecar.lengths.lease_size import EngineSizesDocument
from sidecar.policy.model import Policy
from sidecar.pools import Grant, Pool
from sidecar.pools.base import MOST_REPORT_BYTES
from sidecar.telemetry.dry_run import DryRunReport
from sidecar.telemetry.metrics.tenants import TenantHolding
from sidecar.telemetry.recent import Bucket, Overtakings, Recent
from sidecar.telemetry.request_record import RequestRecord

MOST_TENANTS, MOST_REFUSALS, MOST_MESSAGE = 20, 20, 400
_MOST_BYTES = 2**20
"""Unpacked. A report of 5 tiers under load is 40 KiB so, and 3 to 5 KiB as it travels."""


class TierReport(msgspec.Struct, frozen=True):
    """One tier in this process. Buckets in which nothing happened are left out. `queued_tokens` and `queued_requests`
    are what it has waiting.
    """

    tier: str
    oldest: OldestWaiter | None
    recent: list[Bucket]
    overtaken_by: dict[str, Overtakings]
    queued_tokens: int = 0
    queued_requests: int = 0


class EngineReport(msgspec.Struct, frozen=True):
    """An engine of a pool of several, as a process sees it; see `EngineDocument`. Those that it does not list are left
    out.
    """

    name: str
    id: str
    state: str
    in_flight: int
    recent_tokens: int = 0
    hit_rate: float | None = None
    is_measured: bool = False
    mounted: bool = False


class ReplicaReport(msgspec.Struct, frozen=True):
    """One process. `at_s` is its own calendar's; `generation` is its policy's, empty where it does not say.

    It is all processes of a pool where `replica` is empty: see `PoolReport`.

    `observed` is None where nothing has been observed, `engine` where the process does not look at its engine. `mode`
    is its policy's, empty where an older version does not say. `engines` are None in a pool of one. `lease_sizes` are
    those of its own leases, and `lengths` is the summary of what it learned (`lengths.summary`); both are empty where
    it learns nothing. Nothing is taken for granted of `lengths` here: `LengthExchange` hands it on unread.
    `engine_speeds` are those that it has measured.
    """

    replica: str
    host: str
    at_s: float
    leases: int
    waiting: int
    tiers: list[TierReport]
    tenants: list[TenantView]
    refusals: list[RefusalView]
    generation: str = ""
    observed: DryRunReport | None = None
    engine: EngineView | None = None
    mode: str = ""
    engines: list[EngineReport] | None = None
    lease_sizes: list[EngineSizesDocument] = []
    lengths: Any = None
    engine_speeds: list[EngineSpeedDocument] = []


class Unreadable(Exception):
    """A report of another version of this program, or none at all."""


_encode = msgspec.msgpack.Encoder().encode
_Told = TypeVar("_Told")


def pack(report: msgspec.Struct) -> bytes:
    """A report as it travels."""
    return zlib.compress(_encode(report), 1)


def packed_if_it_fits(report: msgspec.Struct) -> bytes | None:
    """A report as it travels; None where it is larger than others read."""
    plain = _encode(report)
    packed = zlib.compress(plain, 1) if len(plain) <= _MOST_BYTES else plain
    return packed if len(packed) <= MOST_REPORT_BYTES else None


def unpack(packed: bytes) -> ReplicaReport:
    """The report. Raises Unreadable."""
    report = unpack_as(ReplicaReport, packed)
    if not math.isfinite(report.at_s):  # it shifts all other times of the report
        raise Unreadable("its time is not a number")
    return report


def unpack_as(kind: type[_Told], packed: bytes) -> _Told:
    """A report of this kind. Raises Unreadable."""
    try:
        return msgspec.msgpack.decode(zlib.decompressobj().decompress(packed, _MOST_BYTES), type=kind)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise Unreadable(str(error)) from None


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the overview gets its figures. All are called in the event loop, at most a few times a second.

    `policy` is the one in force. `tenants` are those that hold or wait for something in this process; `refusals` the
    last requests that were refused, at most so many, newest first; `notices` are for the operator;
    `observed` what enforcing would have done, of at most so many tenants; `engine` is None where it is not looked at.
    `oldest` are the pool's oldest waits that began under the mode in force. `engines` is None in a pool of one.
    `lease_sizes` are those of this process's leases, empty where no output length is learned. `engine_speeds` are empty
    where no service gain is measured.
    """

    policy: Callable[[], Policy]
    pool: Pool
    recent: Recent
    tenants: Callable[[], Mapping[str, TenantHolding]]
    refusals: Callable[[int], Sequence[RequestRecord]]
    notices: Callable[[], Sequence[str]]
    observed: Callable[[int], DryRunReport | None] = lambda _: None
    engine: Callable[[], EngineView | None] = lambda: None
    oldest: Callable[[], Sequence[Grant | None]] | None = None
    engines: Callable[[], Sequence[EngineDocument] | None] = lambda: None
    lease_sizes: Callable[[], Sequence[EngineSizesDocument]] = tuple
    engine_speeds: Callable[[], Sequence[EngineSpeedDocument]] = tuple


def own_report(sources: Sources, state: Mapping[str, Any], replica: str, host: str, at_s: float) -> ReplicaReport:
    """The report of this process at `at_s`; `state` is its pool's. Notes in `recent` how long the oldest waits."""
    own = state["store"]["own"] if "store" in state else state
    oldest = sources.pool.oldest() if sources.oldest is None else sources.oldest()
    tiers = [
        _tier(sources.recent, tier, grant, replica, at_s) for tier, grant in zip(state["tiers"], oldest, strict=True)
    ]
    tenants = [TenantView(name, *holding) for name, holding in sources.tenants().items()]
    tenants.sort(key=lambda one: (-one.tokens_held, -one.waiting, one.tenant))
    refusals = [_refusal(record, replica) for record in sources.refusals(MOST_REFUSALS)]
    counts, policy = (own["leases"], own["waiting"]), sources.policy()
    return ReplicaReport(
        replica,
        host,
        at_s,
        *counts,
        tiers,
        tenants[:MOST_TENANTS],
        refusals,
        generation=policy.generation,
        observed=sources.observed(MOST_TENANTS),
        engine=sources.engine(),
        mode=policy.mode.value,
        engines=_engines(sources.engines()),
        lease_sizes=list(sources.lease_sizes()),
        engine_speeds=list(sources.engine_speeds()),
    )


def _engines(rows: Sequence[EngineDocument] | None) -> list[EngineReport] | None:
    if rows is None:
        return None
    return [
        EngineReport(
            row.name,
            row.id,
            row.state,
            row.in_flight,
            row.recent_tokens,
            row.hit_rate,
            is_measured=row.is_measured,
            mounted=row.mounted,
        )
        for row in rows
        if row.for_s is not None
    ]


def _tier(recent: Recent, tier: Mapping[str, Any], grant: Grant | None, replica: str, at_s: float) -> TierReport:
    name, queued, oldest = tier["tier"], tier["queued"], None
    if grant is not None:
        waited_s, starved_s = grant.queue_wait_us / 1e6, grant.starvation_us / 1e6
        oldest = OldestWaiter(waited_s, starved_s, dict(grant.served_ahead), replica)
        recent.waits(name, at_s, waited_s, starved_s)
    read = recent.read(name, at_s)
    buckets = [bucket for bucket in read.buckets if has_any(bucket)]
    return TierReport(name, oldest, buckets, read.overtaken_by, queued["tokens"], queued["requests"])


def has_any(bucket: Bucket) -> bool:
    """Whether anything happened in these five seconds."""
    return bool(
        bucket.admitted
        or bucket.refused
        or bucket.wait_max_s
        or bucket.ttft_max_s
        or bucket.preempted
        or bucket.offered
    )


def _refusal(record: RequestRecord, replica: str) -> RefusalView:
    refused = record.refused or _failure(record)
    return RefusalView(
        at_s=record.wall_s(refused.at_us),
        tier=record.tier,
        tenant=record.tenant,
        code=refused.code,
        status=refused.status,
        message=refused.message[:MOST_MESSAGE],
        request_id=record.request_id,
        waited_s=refused.queue_wait_us / 1e6,
        replica=replica,
        preempted=record.preemptions,
    )


def _failure(record: RequestRecord) -> Refused:
    """The proxy's answer to a request that the engine failed, after its wait."""
    settled, admitted = record.settled, record.admitted
    assert settled is not None
    wait_us = 0 if admitted is None else admitted.queue_wait_us
    return Refused(settled.at_us, settled.error or "", settled.message or "", settled.status, wait_us)
