"""Many sidecars before one engine: how many, and the store through which they share one pool."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from sidecar.policy.store import StoreAddress, store_address


@dataclass(frozen=True, slots=True)
class Sharing:
    """`store` is the address as it was written, its password included; as text, this shows none.

    `pool` is this demo's own, so that it disturbs no other in the same store. Raises ValueError, when asked for the
    address, for one that cannot be read.
    """

    replicas: int
    store: str = field(repr=False)
    pool: str = field(default_factory=lambda: f"demo-{secrets.token_hex(8)}")

    def __str__(self) -> str:
        return f"{self.replicas} replica{'' if self.replicas == 1 else 's'} through {self.address}"

    @property
    def address(self) -> StoreAddress:
        """The store's address, read."""
        return store_address(self.store)
