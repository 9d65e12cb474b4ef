"""Gossip of replicas through the store: each leaves a report for the others. No admission depends on it.

It has a connection of its own, opened when it is first needed: no admission waits for a large answer, and a failure
here does not count as a loss of the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import islice

from sidecar.pools.base import MOST_REPORT_BYTES, PeerReport, StoreError
from sidecar.pools.redis.connection import Connect, SideConnection, StoreReach

_SILENCE_MS = 10_000
_MOST = 128


class Gossip:
    """The reports that one replica leaves and reads. Use it from one event loop.

    Beside the `root` of the pool `ROOT:reports` is a hash, replica -> "MICROSECONDS REPORT". It lasts for as long as a
    replica may be silent.
    """

    def __init__(self, replica: str, root: str, connect: Connect, reach: StoreReach | None = None) -> None:
        self._replica, self._own_name = replica, replica.encode()
        self._reports = f"{root}:reports"
        self._connection = SideConnection(connect, reach)

    async def share(self, report: bytes) -> Mapping[str, PeerReport]:
        """See `Pool.share`."""
        if len(report) > MOST_REPORT_BYTES:
            raise StoreError(f"a report of {len(report)} bytes is more than the {MOST_REPORT_BYTES} that it may have")
        async with self._connection.turn():
            now_us = await self._now_us()
            *_, fields = await self._connection.commands(
                ("HSET", self._reports, self._replica, b"%d %b" % (now_us, report)),
                ("PEXPIRE", self._reports, _SILENCE_MS),
                ("HGETALL", self._reports),
            )
            found = {name: _read(written, now_us) for name, written in zip(fields[::2], fields[1::2], strict=True)}
            if silent := [name for name, read in found.items() if read is None]:
                await self._connection.commands(("HDEL", self._reports, *silent))
        others = ((name, read) for name, read in found.items() if read is not None and name != self._own_name)
        return {name.decode(): read for name, read in islice(others, _MOST)}

    async def close(self) -> None:
        """Removes this replica's report, where it has left one and the store can be reached."""
        with contextlib.suppress(StoreError):  # the report expires
            async with self._connection.turn():
                if (connection := self._connection.open) is not None:
                    await connection.commands(("HDEL", self._reports, self._replica))
        await self._connection.close()

    async def _now_us(self) -> int:
        ((seconds, microseconds),) = await self._connection.commands(("TIME",))
        return int(seconds) * 1_000_000 + int(microseconds)


def _read(written: bytes, now_us: int) -> PeerReport | None:
    """None where it is too old, too long or no report."""
    stamp, _, report = written.partition(b" ")
    if not stamp.isdigit() or len(report) > MOST_REPORT_BYTES:
        return None
    age_us = max(0, now_us - int(stamp))
    return PeerReport(age_us / 1e6, report) if age_us <= 1_000 * _SILENCE_MS else None
