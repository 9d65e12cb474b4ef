"""Tenants of the store in the running policy: they are read twice a second, and changed by the operator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from sidecar.policy.declared import figures
from sidecar.policy.model import Policy
from sidecar.policy.problems import printable
from sidecar.policy.reload import UsesPolicy
from sidecar.policy.stored_tenants import InvalidTenant, StoredTenant, read_json, read_record, with_stored
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_keys import PREFIX, find_key
from sidecar.pools.base import StoreError
from sidecar.tasks import end, is_set_within
from sidecar.tenants.records import ChangeRefused, RefusedChange

if TYPE_CHECKING:
    from sidecar.tenants.stored import TenantRecords

READ_EVERY_S = 0.5
"""A change is in force on every replica within a second."""
START_WITHIN_S = 1.0
"""The longest that a start waits for the store's tenants. Until they are read, unknown keys get a 503."""
STALE_S = 5.0
"""After so long without an answer the operator is notified."""
_MOST_NOTICES = 5
_MOST_NAMED = 20

_log = logging.getLogger("sidecar.tenants")


class KeyRow(msgspec.Struct, frozen=True):
    """One key of a tenant. `hash` is the beginning of its hash, `expires` its last day or the time of its end.

    `tier` is that of its requests which name none. `is_expired`: it gets a 401.
    """

    hash: str
    name: str | None
    tier: str
    expires: str | None
    is_expired: bool


class TenantRow(msgspec.Struct, frozen=True):
    """One tenant for the operator. `source` is `file` or `store`; `unused` says why it is not in force, or is None.

    `record` has the keys of a tenant's file, without the hashes: `keys` is their number. `listed` are the API keys,
    where one tenant was asked for.
    """

    tenant: str
    source: str
    keys: int
    record: Mapping[str, Any]
    unused: str | None = None
    listed: Sequence[KeyRow] | UnsetType = UNSET


class InFiles(Exception):
    """The tenant is one of the policy's files, which are edited and not changed from here."""


class StoredTenantsRegistry:
    """The store's tenants, between the policy's files and the object that uses the policy.

    The files' policy comes in by `change_policy`; what goes on to `governed` has the tenants of both.
    """

    def __init__(self, governed: UsesPolicy, records: TenantRecords) -> None:
        self._governed = governed
        self._records = records
        self._files_policy = governed.policy
        self._texts: Mapping[str, bytes] = records.texts()
        self._found: _Found = {}
        self._stored: Mapping[str, StoredTenant] = {}
        self._unused: Mapping[str, str] = {}
        self._is_reread = False
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._problem: str | None = None
        self._read_at_s: float | None = None

    @property
    def policy(self) -> Policy:
        """The policy of the files alone."""
        return self._files_policy

    @property
    def version(self) -> int:
        """The number of the last change that is in force here."""
        return self._records.version

    def change_policy(self, policy: Policy) -> None:
        """The files have another policy. The tenants of the store come with it, where they were read."""
        before, self._files_policy = self._files_policy, policy
        try:
            self._apply()
        except BaseException:
            self._files_policy = before
            raise
        self._is_reread = True  # a tenant without keys is one where the policy has tokens or a gateway

    async def start(self) -> None:
        """Reads the tenants, and begins to follow them. Returns after `START_WITHIN_S` at the latest."""
        tried = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._follow(tried), name="sidecar tenants in the store")
        await is_set_within(tried, START_WITHIN_S)

    async def stop(self) -> None:
        """Follows them no more. Those that are known stay in force."""
        task, self._task = self._task, None
        if task is not None:
            await end(task)
        await self._records.close()

    def notices(self) -> Sequence[str]:
        """Problems for the operator: a store that does not answer, and tenants that are not in force."""
        found = []
        if self._problem is not None and (self._read_at_s is None or self._now_s() - self._read_at_s > STALE_S):
            known = "none is known" if self._read_at_s is None else "those that were read last stay in force"
            found.append(f"the tenants in the store cannot be read, {known}: {self._problem}")
        unused = [f"tenant {name} in the store is not in force: {why}" for name, why in self._reasons().items()]
        found += unused[:_MOST_NOTICES]
        if len(unused) > _MOST_NOTICES:
            found.append(f"{len(unused) - _MOST_NOTICES} more tenants in the store are not in force")
        return found

    async def synchronize(self) -> None:
        """Reads the store now. Raises StoreError."""
        await self._records.synchronize()
        await self._use()
        self._problem = None

    async def put(self, text: bytes, *, replaces: bool) -> TenantRow:
        """Writes a tenant, and returns when it is in force here.

        Raises InvalidTenant, InFiles, RefusedChange or StoreError.
        """
        tenant = read_record(text, self._files_policy)
        name = tenant.tenant.name
        self._refuse_files(name, tenant.digests)
        await self._records.put(name, lambda _: (tenant.text(), tenant.keys), replaces=replaces)
        _log.warning("tenant %s written to the store", name, extra={"event": "tenant_written"})
        await self._use()
        return _row(tenant, self._reasons().get(name))

    async def add_key(self, name: str, text: bytes) -> None:
        """Adds a key to a tenant of the store: JSON, as a tenant's file has it. Raises as `put`."""
        await self._edit_keys(name, added=[read_json(text)])

    async def revoke_key(self, name: str, called: str) -> None:
        """Takes a key from a tenant of the store: see `find_key`. Raises UnknownKey, or as `remove`."""
        await self.synchronize()
        stored = self._stored.get(name)
        await self._edit_keys(name, removed="" if stored is None else find_key(stored.tenant.keys or (), called).digest)

    async def _edit_keys(self, name: str, added: Sequence[Any] = (), removed: str = "") -> None:
        """Writes a tenant of the store with other keys; another change at the same time is kept."""

        def change(text: bytes) -> tuple[bytes, Sequence[str]]:
            if not text:
                raise RefusedChange(ChangeRefused.UNKNOWN)
            before = read_record(text, self._files_policy)
            entries = zip(before.digests, before.document.get("keys", ()), strict=True)
            keys = [*(entry for digest, entry in entries if digest != removed), *added]
            tenant = read_record(msgspec.json.encode({**before.document, "keys": keys}), self._files_policy)
            self._refuse_files(name, tenant.digests)
            return tenant.text(), tenant.keys

        self._refuse_only_in_files(name, "its keys are changed there")
        await self._records.put(name, change, replaces=True)
        _log.warning("the keys of tenant %s changed in the store", printable(name), extra={"event": "key_changed"})
        await self._use()

    async def remove(self, name: str) -> None:
        """Removes a tenant, and returns when it has no access here. Raises InFiles, RefusedChange or StoreError."""
        self._refuse_only_in_files(name, "remove it there")
        await self._records.remove(name)
        _log.warning("tenant %s removed from the store", printable(name), extra={"event": "tenant_removed"})
        await self._use()

    def rows(self, after: str, most: int) -> Sequence[TenantRow]:
        """The tenants of files and store whose names come after `after`, by name, `most` at most."""
        of_files = self._files_policy.named
        names = sorted(name for name in {*of_files, *self._records.texts()} if name > after)
        return self._rows_named(names[:most])

    def rows_named(self, name: str) -> Sequence[TenantRow]:
        """The tenants of this name: none, the one in force, or that and another of the store."""
        of_store = None if name not in self._stored else self._stored[name].tenant
        tenants = {"file": self._files_policy.named.get(name), "store": of_store}
        return [
            replace(row, listed=key_rows(tenant, self._files_policy)) if (tenant := tenants[row.source]) else row
            for row in self._rows_named([name])
        ]

    def _rows_named(self, names: Sequence[str]) -> Sequence[TenantRow]:
        # Once for all of them: there may be thousands, and requests wait meanwhile.
        of_files, reasons = self._files_policy.named, self._reasons()
        tiers = [tier.name for tier in self._files_policy.tiers]
        rows = []
        for name in names:
            if (tenant := of_files.get(name)) is not None:
                rows.append(TenantRow(name, "file", len(tenant.keys or ()), _new_record(tenant, tiers)))
            if (stored := self._stored.get(name)) is not None:
                rows.append(_row(stored, reasons.get(name)))
            elif name in self._found:
                rows.append(TenantRow(name, "store", 0, {}, reasons.get(name)))
        return rows

    def _refuse_only_in_files(self, name: str, instead: str) -> None:
        if name in self._files_policy.named and name not in self._records.texts():
            raise InFiles(f"tenant {name} is in the policy's files; {instead}")

    def _refuse_files(self, name: str, digests: Sequence[str]) -> None:
        if name in self._files_policy.named:
            raise InFiles(f"tenant {name} is in the policy's files; change it there, or write another name")
        for digest in digests:
            if (owner := self._files_policy.tenants.get(digest)) is not None:
                raise InFiles(f"one of the keys is a key of {owner.name}, which is in the policy's files")

    def _reasons(self) -> Mapping[str, str]:
        """Why tenants of the store are not in force, by name."""
        return {**dict(self._invalid()), **self._unused}

    def _invalid(self) -> Iterator[tuple[str, str]]:
        """The records that are no tenants, and why."""
        return ((name, _one_line(one)) for name, (_, one) in self._found.items() if isinstance(one, InvalidTenant))

    async def _use(self) -> None:
        """Puts the tenants in force that are known now. Those that have changed are read in a thread."""
        async with self._turn:
            texts, before = self._records.texts(), self._texts
            is_reread, self._is_reread = self._is_reread and any(self._invalid()), False
            if texts is not before or is_reread:
                known = {name: one for name, one in self._found.items() if isinstance(one[1], StoredTenant)}
                found = await asyncio.to_thread(_read_all, texts, known, self._files_policy)
                self._texts, self._found = texts, found
                self._stored = {name: one for name, (_, one) in found.items() if isinstance(one, StoredTenant)}
            is_first, self._read_at_s = self._read_at_s is None, self._now_s()
            if texts is not before or is_first or is_reread:
                self._apply()
            if changes := _changes(before, texts):
                _log.info("tenants in the store, change %d: %s", self.version, changes, extra={"event": "tenants_read"})

    def _apply(self) -> None:
        if self._read_at_s is None:
            self._governed.change_policy(self._files_policy)
            return
        merged, unused = with_stored(self._files_policy, self._stored)
        self._governed.change_policy(merged)
        before, self._unused = self._unused, unused
        for name, reason in unused.items():
            if before.get(name) != reason:
                message = "tenant %s in the store is not in force: %s"
                _log.warning(message, name, reason, extra={"event": "tenant_unused"})

    async def _follow(self, tried: asyncio.Event) -> None:
        while True:
            try:
                await self.synchronize()
            except StoreError as error:
                if self._problem is None:
                    message = "changes of the tenants in the store are not read: %s"
                    _log.warning(message, error, extra={"event": "tenants_unread"})
                self._problem = str(error)
            except Exception as defect:  # the tenants that are known stay in force
                if self._problem is None:
                    _log.exception("a defect in the sidecar: the tenants in the store", extra={"event": "defect"})
                self._problem = f"a defect in the sidecar, see the log: {type(defect).__name__}"
            tried.set()
            await asyncio.sleep(READ_EVERY_S)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


_Found = Mapping[str, tuple[bytes, StoredTenant | InvalidTenant]]


def _row(one: StoredTenant, unused: str | None) -> TenantRow:
    record = {key: value for key, value in one.document.items() if key not in ("tenant", "keys")}
    return TenantRow(one.tenant.name, "store", len(one.digests), record, unused)


def key_rows(tenant: Tenant, policy: Policy) -> list[KeyRow]:
    """The keys of a tenant for the operator."""
    now_s = time.time()
    return [
        KeyRow(
            PREFIX + one.digest[:12],
            one.name,
            policy.tiers[tenant.level if one.level is None else one.level].name,
            one.last,
            one.is_expired(now_s),
        )
        for one in tenant.keys or ()
    ]


def _new_record(tenant: Tenant, tiers: Sequence[str]) -> Mapping[str, Any]:
    """A tenant of the files, with the keys that its file may have."""
    limits = _limits_record(figures(tenant.limits))
    over = {} if tenant.downgrade_level is None else {"over_limit": {"downgrade": tiers[tenant.downgrade_level]}}
    levels = {"tier": tiers[tenant.level], "max_tier": tiers[tenant.max_level], "weight": tenant.weight}
    return {**levels, **({"limits": limits} if limits else {}), **over}


def _limits_record(limits: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in limits.items() if value is not None and name != "burst"}
    if "models" in found:
        found["models"] = {model: _limits_record(one) for model, one in limits["models"].items()}
    return {**found, "burst": f"{limits['burst']:g}s"} if found else {}


def _read_all(texts: Mapping[str, bytes], known: _Found, policy: Policy) -> _Found:
    """Records by their texts. One that is known is not read again: a process keeps its tiers."""
    found: dict[str, tuple[bytes, StoredTenant | InvalidTenant]] = {}
    for name, text in texts.items():
        if name in known and known[name][0] == text:
            found[name] = known[name]
            continue
        try:
            one: StoredTenant | InvalidTenant = read_record(text, policy)
        except InvalidTenant as invalid:
            one = invalid
        if isinstance(one, StoredTenant) and one.tenant.name != name:
            one = InvalidTenant(f"its record is that of {printable(one.tenant.name)}")
        found[name] = text, one
    return found


def _one_line(invalid: InvalidTenant) -> str:
    return "; ".join(str(invalid).splitlines())


def _changes(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """The changes, in one line of bounded length; empty where nothing has."""
    names = {
        "added": [name for name in after if name not in before],
        "changed": [name for name in after if name in before and before[name] != after[name]],
        "removed": [name for name in before if name not in after],
    }
    return ", ".join(f"{len(found)} {what} ({_few(found)})" for what, found in names.items() if found)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:_MOST_NAMED]))
    return shown if len(names) <= _MOST_NAMED else f"{shown}, ..."
