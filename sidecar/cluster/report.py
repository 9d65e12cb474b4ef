"""Report of one replica, which every replica of the pool reads: its name, its policy, and what waits in it now.

It has nothing of the past: what happened is in each replica's metrics, which Prometheus adds up.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.cluster.document import (
    EngineRow,
    EngineStatus,
    OldestWaiter,
    Promised,
    ReplicaView,
    TierGuard,
    TierShare,
    TierWaits,
)
from sidecar.engines.view import Amount, EngineDocument
from sidecar.events import StoreState
from sidecar.policy.model import Policy
from sidecar.policy.tier import ServiceObjectives
from sidecar.pools import Grant, PeerReport

_MOST_BYTES = 2**18
"""Unpacked. A report of 5 tiers and 64 engines is 6 KiB so."""


class EngineReport(msgspec.Struct, frozen=True):
    """An engine of a pool of several, as a process sees it; see `EngineDocument`. Those that it does not list are left
    out.
    """

    name: str
    id: str
    state: str
    in_flight: int = 0
    mounted: bool = False


class ReplicaReport(msgspec.Struct, frozen=True):
    """One process. `generation` and `mode` are its policy's, empty where it does not say.

    `engine` is None where the process does not look at its engine, `engines` in a pool of one.
    """

    replica: str
    host: str
    leases: int
    waiting: int
    generation: str = ""
    mode: str = ""
    engine: EngineStatus | None = None
    engines: list[EngineReport] | None = None
    tiers: list[TierWaits] = []


def pack(report: ReplicaReport) -> bytes:
    """A report as it travels."""
    return zlib.compress(msgspec.msgpack.encode(report), 1)


def unpack(packed: bytes) -> ReplicaReport | None:
    """The report; None where it is one of another version of this program, or none at all."""
    try:
        return msgspec.msgpack.decode(zlib.decompressobj().decompress(packed, _MOST_BYTES), type=ReplicaReport)
    except (zlib.error, msgspec.MsgspecError):
        return None


@dataclass(frozen=True, slots=True)
class ReceivedReport:
    """A report that is `age_s` old."""

    report: ReplicaReport
    age_s: float


@dataclass(frozen=True, slots=True)
class PeerReports:
    """The other replicas' reports as of `at_s`, and the names of those whose reports could not be read."""

    received: Sequence[ReceivedReport] = ()
    unreadable: Sequence[str] = ()
    at_s: float = 0.0

    def recent(self, at_s: float, forget_after_s: float) -> list[ReceivedReport]:
        """Reports that are recent enough at `at_s`, with their ages then."""
        more_s = max(0.0, at_s - self.at_s)
        aged = (ReceivedReport(one.report, one.age_s + more_s) for one in self.received)
        return [one for one in aged if one.age_s <= forget_after_s]


def read_peers(peers: Mapping[str, PeerReport], at_s: float) -> PeerReports:
    """Reports that the other replicas left, read `at_s`."""
    found = {name: unpack(peer.report) for name, peer in peers.items()}
    received = [ReceivedReport(report, peers[name].age_s) for name, report in found.items() if report is not None]
    return PeerReports(received, [name for name, report in found.items() if report is None], at_s)


def replica_views(received: Iterable[ReceivedReport]) -> list[ReplicaView]:
    """All replicas with a report, in the order of their names."""
    found = [
        ReplicaView(it.replica, it.host, it.leases, it.waiting, round(one.age_s, 1), it.generation, it.engine)
        for one in received
        for it in [one.report]
    ]
    return sorted(found, key=lambda replica: (replica.host, replica.replica))


# -- Engines of a pool of several: their rows, and the replicas that see or list them otherwise.

LASTING_S = 10.0
"""Replicas look discovery up at different moments, and report every two seconds."""
MOST_NAMED = 3
_USABLE = frozenset(("ready", "starting", "capped", "draining"))


def engine_reports(documents: Sequence[EngineDocument] | None) -> list[EngineReport] | None:
    """The engines that this process lists, as it reports them."""
    if documents is None:
        return None
    return [msgspec.convert(it, EngineReport, from_attributes=True) for it in documents if it.for_s is not None]


def engine_rows(documents: Sequence[EngineDocument], others: Iterable[ReplicaReport]) -> list[EngineRow]:
    """A row for each engine that this process knows, with the replicas that see it otherwise."""
    reports = [report for report in others if report.engines is not None]
    return [_row(document, reports) for document in documents]


def _row(document: EngineDocument, reports: Sequence[ReplicaReport]) -> EngineRow:
    theirs = [(report, _latest(document.name, report)) for report in reports]
    same = [seen for _, seen in theirs if seen is not None and seen.id == document.id]
    shown = msgspec.structs.replace(
        document,
        state=same[0].state if document.mounted and same else document.state,
        reason=document.reason or "",
        capacity=document.capacity or Amount(),
        in_flight=document.in_flight + sum(seen.in_flight for seen in same),
    )
    elsewhere = "" if document.url is None else _elsewhere(document, theirs)
    return msgspec.structs.replace(msgspec.convert(shown, EngineRow, from_attributes=True), elsewhere=elsewhere)


def _elsewhere(document: EngineDocument, theirs: Sequence[tuple[ReplicaReport, EngineReport | None]]) -> str:
    """Replicas that can use an engine that this one cannot, or the reverse, or do not list it."""
    by_state: dict[str, list[str]] = {}
    for report, found in theirs:
        if found is None:
            by_state.setdefault("not listed", []).append(_who(report))
        elif (found.state in _USABLE) is not (document.state in _USABLE):
            by_state.setdefault(found.state, []).append(_who(report))
    return "; ".join(f"{state} at {_join(replicas)}" for state, replicas in sorted(by_state.items()))


def _latest(name: str, report: ReplicaReport) -> EngineReport | None:
    """The latest incarnation of an engine in a report."""
    return next((found for found in reversed(report.engines or []) if found.name == name), None)


def _who(report: ReplicaReport) -> str:
    return f"{report.host} {report.replica[:8]}"


def _join(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"


class EngineLists:
    """The names of the engines that each other replica lists, and since when they differ from this process's.

    Times are seconds on one calendar, `at_s` is now.
    """

    def __init__(self) -> None:
        self._differs: Mapping[str, tuple[str, float]] = {}  # replica -> the sentence, and since when

    def compare(self, reports: Iterable[ReplicaReport], own: ReplicaReport, at_s: float) -> None:
        """The other replicas that are there, as they are now."""
        differs: dict[str, tuple[str, float]] = {}
        mine = _names(own)
        for report in reports:
            theirs = _names(report)
            if mine is not None and theirs is not None and mine != theirs:
                sentence, before = _difference(report, mine, theirs), self._differs.get(report.replica)
                is_as_before = before is not None and before[0] == sentence
                differs[report.replica] = before if before and is_as_before else (sentence, at_s)
        self._differs = differs

    def notices(self, at_s: float) -> list[str]:
        """Differences that last, in a sentence for each replica."""
        lasting = [(sentence, at_s - since_s) for sentence, since_s in self._differs.values()]
        return [f"{sentence}, for {for_s:.0f} s" for sentence, for_s in lasting if for_s >= LASTING_S]


def _names(report: ReplicaReport) -> frozenset[str] | None:
    if report.engines is None or any(engine.mounted for engine in report.engines):
        return None  # each process has an engine of its own
    return frozenset(engine.name for engine in report.engines if engine.state != "gone")


def _difference(report: ReplicaReport, mine: frozenset[str], theirs: frozenset[str]) -> str:
    parts = [
        f"{verb} {_join(sorted(names))}"
        for verb, names in (("lacks", mine - theirs), ("has also", theirs - mine))
        if names
    ]
    return f"the engine list of replica {report.replica[:8]} on {report.host} {' and '.join(parts)}"


# -- Tiers of a pool as documents: what each holds, what it has waiting in one process and in all, and what guarded ones
# met lately.

_LATELY_S, _EVERY_S = 300.0, 5.0


def is_alone(state: Mapping[str, Any]) -> bool:
    """True if a pool's state is this replica's alone: the pool is shared, and its store does not decide."""
    return "store" in state and state["store"]["state"] != StoreState.SHARED.value


def tier_shares(policy: Policy, state: Mapping[str, Any]) -> Sequence[TierShare]:
    """Room of the pool that each tier holds and may hold; `state` is the pool's."""
    return [
        TierShare(
            tier.name,
            held=Amount(**of["held"]),
            reserve=Amount(**of["reserve"]),
            limit=Amount(**of["limit"]),
            borrowed_tokens=of.get("borrowed", 0),
            lent_tokens=of.get("lent", 0),
            slo=_promised(tier.slo),
            guard=TierGuard(**of["guard"]) if "guard" in of else None,
        )
        for tier, of in zip(policy.tiers, state["tiers"], strict=True)
    ]


def _promised(slo: ServiceObjectives) -> Promised:
    hold = None if slo.hold is None else float(slo.hold)
    return Promised(slo.ttft_s, slo.queue_wait_s, slo.starvation_s, slo.tpot_s, hold)


def tier_waits(state: Mapping[str, Any], oldest: Sequence[Grant | None], replica: str = "") -> Sequence[TierWaits]:
    """Requests of each tier that wait in this process, `replica`."""
    return [
        TierWaits(tier["tier"], Amount(**tier["queued"]), _oldest_waiter(grant, replica))
        for tier, grant in zip(state["tiers"], oldest, strict=True)
    ]


def _oldest_waiter(grant: Grant | None, replica: str) -> OldestWaiter | None:
    if grant is None:
        return None
    return OldestWaiter(grant.queue_wait_us / 1e6, grant.starvation_us / 1e6, dict(grant.served_ahead), replica)


def sum_waits(tier: str, reports: Iterable[ReplicaReport]) -> TierWaits:
    """Requests of a tier that wait in all replicas, and the one that has waited longest."""
    found = [waits for report in reports for waits in report.tiers if waits.tier == tier]
    longest = max(found, key=lambda waits: waits.oldest.wait_s if waits.oldest is not None else -1.0, default=None)
    return TierWaits(
        tier,
        Amount(sum(it.queued.tokens or 0 for it in found), sum(it.queued.requests or 0 for it in found)),
        None if longest is None else longest.oldest,
        longest is not None and longest.is_at_limit,
    )


class GuardHistory:
    """The counts of each guarded tier as they were in the last five minutes, one for each five seconds."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[tuple[float, int, int]]] = {}

    def note(self, shares: Sequence[TierShare], at_s: float) -> None:
        """The tiers as they are now."""
        guards = {share.tier: share.guard for share in shares if share.guard is not None}
        self._kept = {tier: self._kept.get(tier, deque()) for tier in guards}
        for tier, guard in guards.items():
            kept = self._kept[tier]
            if not kept or at_s - kept[-1][0] >= _EVERY_S:
                kept.append((at_s, guard.requests["met"], guard.requests["missed"]))
            while len(kept) > 1 and at_s - kept[1][0] >= _LATELY_S:
                kept.popleft()

    def lately(self, share: TierShare) -> tuple[int, int]:
        """Requests of a guarded tier that met its SLO and that missed it, in the last five minutes."""
        assert share.guard is not None
        kept = self._kept.get(share.tier)
        _, met, missed = kept[0] if kept else (0.0, 0, 0)
        return share.guard.requests["met"] - met, share.guard.requests["missed"] - missed
