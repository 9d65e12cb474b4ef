"""Use of the tenants in Redis. The header of `usage.lua` is the contract. No admission waits for this connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from sidecar.policy.store import StoreAddress
from sidecar.pools.base import StoreError
from sidecar.pools.redis.connection import Connect, SideConnection, StoreReach, connector_to
from sidecar.pools.redis.script import Script
from sidecar.tenants.usage_records import Recorded, Sums, UsageCharge, UsageFigures, UsageKey

_SCRIPT = Script.read(__package__, "usage")
_MOST_PAGES = 10_000
"""Of one day: more than any day has, so that a store that answers nonsense cannot hold a replica."""


def usage_connector(address: StoreAddress, pool: str) -> Connect:
    """Makes connections to the server that keeps the use of the tenants of the pool called `pool`."""
    return connector_to(address, pool, f"admission:usage:{{{pool}}}")


class RedisUsage:
    """The use of all replicas. `days` is for how long it is kept. Use it from one event loop.

    Every coroutine but `close` raises StoreError.
    """

    def __init__(self, connect: Connect, days: int, reach: StoreReach | None = None) -> None:
        self._connection = SideConnection(connect, reach)
        self._replica = uuid4().hex
        self._days = days

    async def add(
        self,
        part: int,
        entries: Sequence[tuple[UsageKey, UsageFigures]],
        charges: Sequence[UsageCharge],
        day: str,
        accounts: Sequence[str],
    ) -> Recorded:
        """Adds the n-th part of what this replica has counted, once, however often it is sent. Part 0 is none.

        Each list has `MOST_AT_ONCE` at most; the sums are those of the `accounts`, in `day` and its month.
        """
        listed: list[str | bytes | int] = [field for key, figures in entries for field in (*key, *figures)]
        listed += [field for charge in charges for field in charge]
        arguments = [self._replica, part, self._days, day, day[:7], len(entries), len(charges), *listed, *accounts]
        time_us, *sums = await self._call(["add", *arguments])
        try:
            figures = list(map(int, sums))
            found = {account: Sums(*figures[2 * at : 2 * at + 2]) for at, account in enumerate(accounts)}
            return Recorded(int(time_us) / 1e6, found)
        except (ValueError, TypeError) as error:
            raise StoreError(f"the store's sums cannot be read: {error}") from None

    async def use_on(self, day: str) -> Mapping[UsageKey, UsageFigures]:
        """All that was counted of a day."""
        found: dict[UsageKey, UsageFigures] = {}
        cursor = b"0"
        for _ in range(_MOST_PAGES):
            cursor, *fields = await self._call(["day", day, cursor])
            for names, figures in zip(fields[::2], fields[1::2], strict=True):
                entry = _entry(day, names, figures)
                if entry is not None:  # else another program's
                    found[entry[0]] = entry[1]
            if cursor == b"0":
                return found
        raise StoreError("the store's list of a day has no end")

    async def close(self) -> None:
        """Closes the connection, in any state."""
        await self._connection.close()

    async def _call(self, arguments: list[str | bytes | int]) -> list[Any]:
        async with self._connection.turn():
            return await self._connection.run(_SCRIPT, arguments)


def _entry(day: str, names: bytes, figures: bytes) -> tuple[UsageKey, UsageFigures] | None:
    try:
        tenant, tier, model = names.decode().split("\t")
        requests, input_tokens, output_tokens = map(int, figures.split())
    except ValueError:
        return None
    return UsageKey(day, tenant, tier, model), UsageFigures(requests, input_tokens, output_tokens)
