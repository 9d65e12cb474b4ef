"""What each tenant holds and waits for now, in this process, by what was told of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Holding(NamedTuple):
    """One tenant's tokens and leases that are held, and requests that wait."""

    tokens_held: int
    leases: int
    waiting: int


class Tenancy:
    """One tenant, while it holds or waits for something."""

    __slots__ = ("leases", "tokens_held", "waiting")

    def __init__(self) -> None:
        self.tokens_held = self.leases = self.waiting = 0


class Holdings:
    """All tenants of one door; no larger than what is under way. Changed in one thread, read in any."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenancy] = {}

    def waits(self, tenant: str) -> None:
        """One more request of this tenant waits."""
        self._of(tenant).waiting += 1

    def waits_no_more(self, tenant: str) -> None:
        """One of those that waited does so no longer, whatever became of it."""
        tenancy = self._of(tenant)
        tenancy.waiting -= 1
        self._forget(tenant, tenancy)

    def holds(self, tenant: str, tokens: int) -> None:
        """One more lease, of so many tokens."""
        tenancy = self._of(tenant)
        tenancy.leases += 1
        tenancy.tokens_held += tokens

    def gives_back(self, tenant: str, tokens: int) -> None:
        """One of the leases is over."""
        tenancy = self._of(tenant)
        tenancy.leases -= 1
        tenancy.tokens_held -= tokens
        self._forget(tenant, tenancy)

    def held(self) -> Mapping[str, Holding]:
        """Every tenant that holds or waits for something."""
        return {
            name: Holding(tenancy.tokens_held, tenancy.leases, tenancy.waiting)
            for name, tenancy in list(self._tenants.items())
        }

    def _of(self, tenant: str) -> Tenancy:
        tenancy = self._tenants.get(tenant)
        if tenancy is None:
            tenancy = self._tenants[tenant] = Tenancy()
        return tenancy

    def _forget(self, tenant: str, tenancy: Tenancy) -> None:
        if not tenancy.leases and not tenancy.waiting:
            del self._tenants[tenant]
