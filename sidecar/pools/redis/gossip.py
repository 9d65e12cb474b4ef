"""Gossip of replicas through the store: each leaves a report for the others. No admission depends on it.

It has a connection of its own, opened when it is first needed: no admission waits for a large answer, and a failure
here does not count as a loss of the store. The header of `gossip.lua` is the contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any

from sidecar.pools.base import MOST_REPORT_BYTES, Merge, NotShared, PeerReport, PeerReports
from sidecar.pools.redis.connection import Connect, Reach, Script, SideConnection, StoreError

SOURCE = (files(__package__) / "lua" / "gossip.lua").read_text(encoding="utf-8")
_SCRIPT = Script.of(SOURCE)


class Gossip:
    """The reports that one replica leaves and reads. Use it from one event loop."""

    def __init__(self, replica: str, connect: Connect, reach: Reach | None = None) -> None:
        self._replica = replica
        self._connection = SideConnection(connect, reach)
        self._turn = asyncio.Lock()

    async def share(self, report: bytes, merge: Merge) -> PeerReports:
        """See `Pool.share`."""
        if len(report) > MOST_REPORT_BYTES:
            raise NotShared(f"a report of {len(report)} bytes is more than the {MOST_REPORT_BYTES} that it may have")
        async with self._turn:
            try:
                return await self._shared(report, merge)
            except BaseException as error:  # also canceled: a late answer must not be taken for the next
                await self._connection.disconnect()
                if isinstance(error, StoreError):
                    raise NotShared(str(error)) from None
                raise

    async def _shared(self, report: bytes, merge: Merge) -> PeerReports:
        kind, *rest = await self._connection.run(_SCRIPT, ["share", self._replica, report])
        if kind == b"merged":
            return PeerReports({}, PeerReport(int(rest[0]) / 1e6, rest[1]) if rest else None)
        others = _read(rest)
        if kind == b"merge":
            text = await merge({**others, self._replica: PeerReport(0.0, report)})
            if len(text) > MOST_REPORT_BYTES:
                raise NotShared(f"a merged text of {len(text)} bytes is more than {MOST_REPORT_BYTES}")
            await self._connection.run(_SCRIPT, ["merged", self._replica, text])
        return PeerReports(others)

    async def close(self) -> None:
        """Removes this replica's report, where it has left one and the store can be reached."""
        async with self._turn:
            try:
                if self._connection.open is not None:
                    await self._connection.open.run(_SCRIPT, ["leave", self._replica])
            except StoreError:
                pass  # the report expires
            finally:
                await self._connection.disconnect()


def _read(answer: Sequence[Any]) -> Mapping[str, PeerReport]:
    triples = zip(*(islice(answer, start, None, 3) for start in range(3)), strict=True)
    return {name.decode(): PeerReport(int(age_us) / 1e6, report) for name, age_us, report in triples}
