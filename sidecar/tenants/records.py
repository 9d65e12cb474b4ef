"""Interface of the records of tenants in a store. It imports no client of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol


class ChangeRefused(Enum):
    """Why the store did not take a change."""

    EXISTS = "exists"
    UNKNOWN = "unknown"
    FULL = "full"
    KEY = "key"


class RefusedChange(Exception):
    """A change that the store did not take. For KEY `owner` is the tenant that has one of the keys."""

    def __init__(self, reason: ChangeRefused, owner: str | None = None) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.owner = owner


Change = Callable[[bytes], tuple[bytes, Sequence[str]]]
"""A tenant's next text, with the hashes of keys in it, by its last; that is empty where there is none."""


class StoredRecords(Protocol):
    """The tenants in a store, each a JSON text by its name. Every coroutine but `close` raises StoreError."""

    @property
    def version(self) -> int:
        """The number of the last change that is known."""

    def texts(self) -> Mapping[str, bytes]:
        """The tenants as they were read last: the same object as long as nothing changes."""

    async def synchronize(self) -> None:
        """Reads what has changed, and writes what the store lost."""

    async def put(self, tenant: str, change: Change, *, replaces: bool) -> None:
        """Writes what `change` makes of a tenant's last text, and reads what has changed. Raises RefusedChange.

        `change` is called again where another replica has written meanwhile, or where an answer was lost.
        """

    async def remove(self, tenant: str) -> None:
        """Removes one tenant, and reads what has changed. Raises RefusedChange."""

    async def close(self) -> None:
        """Closes the connection, in any state."""
