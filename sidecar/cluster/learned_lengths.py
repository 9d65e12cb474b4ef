"""Exchange of learned output lengths: each replica's summary travels with its report to the other replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from sidecar.cluster.report import ReplicaReport, pack
from sidecar.pools.base import MOST_REPORT_BYTES

MOST_SUMMARY_BYTES = 16 * 1024
"""Of JSON: some 80 tenants and kinds of requests. A report of 5 tiers under load leaves several times this."""
_LEAST_SUMMARY_BYTES = 512


class Lengths(Protocol):
    """What this process learned itself, and what it makes of others' summaries; `LengthEstimator` is one."""

    def summary(self, most_bytes: int) -> Mapping[str, Any]:
        """What was learned here, in at most so many bytes of JSON."""

    def hear(self, replica: str, document: object, *, has_own: bool = False) -> None:
        """Takes another replica's summary, whatever it is, in place of its last one; `has_own`: this one's is in it."""

    def forget(self, replica: str) -> None:
        """Forgets what a replica told."""


class LengthExchange:
    """The summaries that one process sends and has heard."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._heard: dict[str, object] = {}

    def packed(self, report: ReplicaReport) -> bytes:
        """A report as it travels, with as much of the summary as there is room for."""
        most_bytes = MOST_SUMMARY_BYTES
        while most_bytes >= _LEAST_SUMMARY_BYTES:
            told = pack(msgspec.structs.replace(report, lengths=self._lengths.summary(most_bytes)))
            if len(told) <= MOST_REPORT_BYTES:
                return told
            most_bytes //= 2
        return pack(report)

    def hear(self, reports: Iterable[ReplicaReport], *, has_own: bool = False) -> None:
        """The reports of all other replicas that are there now: what others told is forgotten.

        With `has_own`, what this replica learned is in what they tell.
        """
        told = {report.replica: report.lengths for report in reports if report.lengths is not None}
        for replica in self._heard.keys() - told.keys():
            self._lengths.forget(replica)
        for replica, document in told.items():
            if self._heard.get(replica) != document:
                self._lengths.hear(replica, document, has_own=has_own)
        self._heard = told
