"""What replicas tell each other of themselves through the store. No decision depends on it.

On a connection of its own, which is opened when it is first needed: behind a large answer no admission waits, and a
failure here is nobody's loss of the store. The script's header is the contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.resources import files
from itertools import islice
from typing import Any

from sidecar.pools.pool import NotShared, Shared
from sidecar.pools.redis.connection import Connect, Connection, Script, StoreError
from sidecar.pools.redis.protocol import Argument

SOURCE = (files(__package__) / "lua" / "gossip.lua").read_text(encoding="utf-8")
MOST_BYTES = 64 * 1024
_SCRIPT = Script.of(SOURCE)


class Reports:
    """One replica's, called `replica`. Use it from one event loop."""

    def __init__(self, replica: str, connect: Connect) -> None:
        self._replica = replica
        self._connect = connect
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def share(self, report: bytes) -> Mapping[str, Shared]:
        """See `Pool.share`."""
        if len(report) > MOST_BYTES:
            raise NotShared(f"a report of {len(report)} bytes is more than the {MOST_BYTES} that it may have")
        async with self._turn:
            try:
                return await self._shared(report)
            except BaseException as error:  # also canceled: whatever is still on its way must not be the next answer
                await self._let_go()
                if isinstance(error, StoreError):
                    raise NotShared(str(error)) from None
                raise

    async def _shared(self, report: bytes) -> Mapping[str, Shared]:
        arguments: list[Argument] = ["share", self._replica, report]
        if self._connection is not None:
            try:
                return _read(await self._connection.run(_SCRIPT, arguments))
            except StoreError:  # a server that was away in between: a connection that worked is made anew, once
                await self._let_go()
        self._connection = await self._connect()
        return _read(await self._connection.run(_SCRIPT, arguments))

    async def close(self) -> None:
        """Takes its own report back, where it has left one and the store is there to hear it."""
        async with self._turn:
            try:
                if self._connection is not None:
                    await self._connection.run(_SCRIPT, ["leave", self._replica])
            except StoreError:
                pass  # it vanishes by itself
            finally:
                await self._let_go()

    async def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _read(answer: list[Any]) -> Mapping[str, Shared]:
    triples = zip(*(islice(answer, start, None, 3) for start in range(3)), strict=True)
    return {name.decode(): Shared(int(age_us) / 1e6, report) for name, age_us, report in triples}
