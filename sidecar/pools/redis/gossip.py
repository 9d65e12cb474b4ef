"""Gossip of replicas through the store: each leaves a report for the others. No admission depends on it.

In a pool of at most 8 replicas each reads the reports of all others. In a larger one that would grow with the square of
their number: there one of them, the merger, reads all reports and writes one merged text, and the others read only
that. Whoever finds no merger becomes it, and stays it by writing: who does not write for 4 s loses the lease.

It has a connection of its own, opened when it is first needed: no admission waits for a large answer, and a failure
here does not count as a loss of the store. The commands are plain ones, and others may come between: two mergers for a
moment harm no one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import islice

from sidecar.pools.base import MOST_REPORT_BYTES, Merge, PeerReport, PeerReports, StoreError
from sidecar.pools.redis.connection import Connect, Reach, SideConnection

_SILENCE_MS, _LEASE_MS = 10_000, 4_000
_MOST, _FEW = 128, 8


class Gossip:
    """The reports that one replica leaves and reads. Use it from one event loop.

    Beside the `root` of the pool `ROOT:reports` is a hash, replica -> "MICROSECONDS REPORT", and `ROOT:merged`
    "MICROSECONDS TEXT"; both last for as long as a replica may be silent. `ROOT:merger` is the replica that merges, for
    its lease.
    """

    def __init__(self, replica: str, root: str, connect: Connect, reach: Reach | None = None) -> None:
        self._replica, self._own_name = replica, replica.encode()
        self._reports, self._merged, self._merger = f"{root}:reports", f"{root}:merged", f"{root}:merger"
        self._connection = SideConnection(connect, reach)

    async def share(self, report: bytes, merge: Merge) -> PeerReports:
        """See `Pool.share`."""
        _check("report", report)
        async with self._connection.turn():
            now_us = await self._now_us()
            *_, count = await self._connection.commands(
                ("HSET", self._reports, self._replica, b"%d %b" % (now_us, report)),
                ("PEXPIRE", self._reports, _SILENCE_MS),
                ("HLEN", self._reports),
            )
            if count <= _FEW:
                return PeerReports(await self._others(now_us))
            _, merger, merged = await self._connection.commands(
                ("SET", self._merger, self._replica, "NX", "PX", _LEASE_MS),
                ("GET", self._merger),
                ("GET", self._merged),
            )
            if merger != self._own_name:
                return PeerReports({}, _read(merged, now_us))
            others = await self._others(now_us)
            text = await merge({**others, self._replica: PeerReport(0.0, report)})
            _check("merged text", text)
            (merger,) = await self._connection.commands(("GET", self._merger))
            if merger == self._own_name:  # else merging took too long
                await self._connection.commands(
                    ("SET", self._merged, b"%d %b" % (now_us, text), "PX", _SILENCE_MS),
                    ("PEXPIRE", self._merger, _LEASE_MS),
                )
            return PeerReports(others)

    async def close(self) -> None:
        """Removes this replica's report, where it has left one and the store can be reached."""
        with contextlib.suppress(StoreError):  # the report expires
            async with self._connection.turn():
                if (connection := self._connection.open) is not None:
                    _, merger = await connection.commands(("HDEL", self._reports, self._replica), ("GET", self._merger))
                    if merger == self._own_name:
                        await connection.commands(("DEL", self._merger))
        await self._connection.close()

    async def _now_us(self) -> int:
        ((seconds, microseconds),) = await self._connection.commands(("TIME",))
        return int(seconds) * 1_000_000 + int(microseconds)

    async def _others(self, now_us: int) -> Mapping[str, PeerReport]:
        (fields,) = await self._connection.commands(("HGETALL", self._reports))
        found = {name: _read(written, now_us) for name, written in zip(fields[::2], fields[1::2], strict=True)}
        if silent := [name for name, report in found.items() if report is None]:
            await self._connection.commands(("HDEL", self._reports, *silent))
        others = ((name, report) for name, report in found.items() if report is not None and name != self._own_name)
        return {name.decode(): report for name, report in islice(others, _MOST)}


def _check(what: str, text: bytes) -> None:
    if len(text) > MOST_REPORT_BYTES:
        raise StoreError(f"a {what} of {len(text)} bytes is more than the {MOST_REPORT_BYTES} that it may have")


def _read(written: bytes | None, now_us: int) -> PeerReport | None:
    """None where there is none, or one that is too old, too long or no report."""
    stamp, _, report = (written or b"").partition(b" ")
    if not stamp.isdigit() or len(report) > MOST_REPORT_BYTES:
        return None
    age_us = max(0, now_us - int(stamp))
    return PeerReport(age_us / 1e6, report) if age_us <= 1_000 * _SILENCE_MS else None
