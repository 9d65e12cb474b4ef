"""Report of one replica, which every replica of the pool reads: its name, its policy, and what waits in it now.

It has nothing of the past: what happened is in each replica's metrics, which Prometheus adds up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sidecar.cluster.document import EngineStatus, ReplicaView, TierWaits
from sidecar.pools import PeerReport

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
