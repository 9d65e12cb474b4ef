"""Changes of tenants in a store. It imports no client of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum


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
