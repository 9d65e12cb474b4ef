"""Tenants in the store, as one replica knows them: it reads what has changed, writes, and restores what the store lost.

The header of `tenants.lua` is the contract. No admission depends on the connection here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from sidecar.policy.store import StoreAddress
from sidecar.pools.base import StoreError
from sidecar.pools.redis.connection import Connect, SideConnection, StoreReach, connector_to
from sidecar.pools.redis.script import Script
from sidecar.tenants.records import Change, ChangeRefused, RefusedChange

_SCRIPT = Script.read(__package__, "tenants")

MOST_TENANTS = 10_000
"""A pool that needs more names them by tokens of an issuer, in groups that have limits."""
_PUSHED_AT_ONCE = 200
_MOST_REMOVED = 1_000
"""As in the script."""
_MOST_ROUNDS = 500
"""Of one synchronization: more than any list needs, so that a store that answers nonsense cannot hold a replica."""

_Records = Mapping[str, tuple[int, bytes]]
_Argument = str | bytes | int


def tenants_key(pool: str) -> str:
    """The key that the tenants in the store begin with. Other than the pool's, it is the same for every layout."""
    return f"admission:tenants:{{{pool}}}"


def tenants_connector(address: StoreAddress, pool: str) -> Connect:
    """Makes connections to the server that keeps the tenants of the pool called `pool`."""
    return connector_to(address, pool, tenants_key(pool))


@dataclass(frozen=True, slots=True)
class _List:
    """The list of tenants in some version: the texts with the versions in which they were written, and what is gone."""

    birth: str = ""
    epoch: int = 0
    version: int = 0
    floor: int = 0
    records: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)

    def place(self) -> list[_Argument]:
        """Which list this is, as the script takes it."""
        return [self.birth, self.epoch, self.version, self.floor]

    def with_page(self, page: _Page) -> _List:
        """The list with the changes of a page."""
        records, removed = dict(self.records), dict(self.removed)
        for tenant, version, text in page.changes:
            records.pop(tenant, None)
            removed.pop(tenant, None)
            if text:
                records[tenant] = version, text
            else:
                removed[tenant] = version
        for tenant in list(islice(removed, max(0, len(removed) - _MOST_REMOVED))):
            del removed[tenant]
        return _List(page.birth, page.epoch, page.up_to, page.floor, records, removed)

    def after(self, version: int) -> list[tuple[int, str, bytes]]:
        """The changes after a version, in their order."""
        written = ((at, tenant, text) for tenant, (at, text) in self.records.items())
        removed = ((at, tenant, b"") for tenant, at in self.removed.items())
        return sorted(change for change in (*written, *removed) if change[0] > version)


class _Page(NamedTuple):
    """A part of what the script says has changed. The rest follows where `up_to` is less than `version`."""

    birth: str
    epoch: int
    version: int
    floor: int
    up_to: int
    changes: Sequence[tuple[str, int, bytes]]

    @classmethod
    def of(cls, answer: Sequence[bytes]) -> _Page:
        """Reads an answer of the script. Raises StoreError."""
        try:
            birth, epoch, version, floor, up_to, *rest = answer
            tenants, versions, texts = (rest[start::3] for start in range(3))
            changes = [(t.decode(), int(v), text) for t, v, text in zip(tenants, versions, texts, strict=True)]
            return cls(birth.decode(), int(epoch), int(version), int(floor), int(up_to), changes)
        except (ValueError, AttributeError, TypeError) as error:
            raise StoreError(f"the store's list of tenants cannot be read: {error}") from error


class TenantRecords:
    """The tenants in a store, each a JSON text by its name. Use it from one event loop.

    Every coroutine but `close` raises StoreError.
    """

    def __init__(self, connect: Connect, reach: StoreReach | None = None) -> None:
        self._connection = SideConnection(connect, reach)
        self._known = _List()
        self._texts: Mapping[str, bytes] = {}

    @property
    def version(self) -> int:
        """The number of the last change that is known."""
        return self._known.version

    def texts(self) -> Mapping[str, bytes]:
        """The tenants as they were read last: the same object as long as nothing changes."""
        return self._texts

    async def synchronize(self) -> None:
        """Reads what has changed, and writes what the store lost."""
        await self._in_turn(self._catch_up())

    async def put(self, tenant: str, change: Change, *, replaces: bool) -> None:
        """Writes what `change` makes of a tenant's last text, and reads what has changed. Raises RefusedChange.

        `change` is called again where another replica has written meanwhile, or where an answer was lost.
        """

        def changed(records: _Records) -> list[_Argument]:
            text, keys = change(records.get(tenant, (0, b""))[1])
            return [tenant, text, "replace" if replaces else "create", MOST_TENANTS, *keys]

        def is_made(records: _Records) -> bool:
            return tenant in records and changed(records)[1] == records[tenant][1]

        await self._in_turn(self._change("put", changed, is_made))

    async def remove(self, tenant: str) -> None:
        """Removes one tenant, and reads what has changed. Raises RefusedChange."""
        await self._in_turn(self._change("remove", lambda _: [tenant], lambda records: tenant not in records))

    async def close(self) -> None:
        """Closes the connection, in any state."""
        await self._connection.close()

    async def _in_turn(self, work: Coroutine[Any, Any, None]) -> None:
        async with self._connection.turn():
            before = self._known
            try:
                await work
            finally:
                if self._known is not before:
                    self._texts = {tenant: text for tenant, (_, text) in self._known.records.items()}

    async def _change(
        self, action: str, change: Callable[[_Records], list[_Argument]], is_made: Callable[[_Records], bool]
    ) -> None:
        """Makes a change to the last version. Another replica may write at the same time, which is `late`.

        A call whose answer was lost is sent again. It is late then, too, and its change may be made already.
        """
        for attempt in range(_MOST_ROUNDS):
            await self._catch_up()
            if attempt and is_made(self._known.records):
                return None
            place = self._known.place()
            if not self._known.birth:
                place[0] = secrets.token_hex(8)
            kind, *rest = await self._run([action, *place, *change(self._known.records)])
            if kind == b"done":
                return await self._catch_up()
            if kind != b"late":
                raise RefusedChange(ChangeRefused(kind.decode()), rest[0].decode() if rest else None)
        raise StoreError("others change the tenants without end")

    async def _catch_up(self) -> None:
        """Brings the replica and the store to the same version. What is known is replaced as a whole."""
        reading = self._known
        for _ in range(_MOST_ROUNDS):
            kind, *rest = await self._run(["changes", *reading.place()])
            if kind in (b"none", b"older"):
                if not self._known.version:
                    return
                is_known = reading is self._known  # else the store was emptied while it was read
                is_same = not is_known or await self._push(int(rest[0]) if rest else 0)
                reading = self._known if is_same else _List()
                continue
            page = _Page.of(rest)
            if page.up_to == reading.version and kind == b"changed":
                return
            reading = (_List() if kind == b"all" else reading).with_page(page)
            if page.up_to == page.version:
                self._known = reading
                return
        raise StoreError("the store's list of tenants has no end")

    async def _push(self, version: int) -> bool:
        """Writes a part of what the store lost: what came after its version. False where it has another list."""
        changes = self._known.after(version)[:_PUSHED_AT_ONCE]
        parts: list[_Argument] = [part for at, tenant, text in changes for part in (tenant, at, text)]
        (kind,) = await self._run(["push", *self._known.place(), *parts])
        return bool(kind == b"done")

    async def _run(self, arguments: list[_Argument]) -> list[Any]:
        return await self._connection.run(_SCRIPT, arguments)
