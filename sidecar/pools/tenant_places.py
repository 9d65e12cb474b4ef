"""The places of one tier's queue, by tenant: each has a share of them by its weight, and who is above it gives way."""

from __future__ import annotations

from sidecar.pools.base import Lease


class TenantPlaces:
    """The requests of one tier that wait, those that came back apart: they give their place to nobody.

    A tenant has the weight of its latest request.
    """

    def __init__(self) -> None:
        self._leases: dict[str, dict[int, Lease]] = {}
        self._weights: dict[str, int] = {}
        self._sum = 0

    def add(self, lease: Lease) -> None:
        """A request waits."""
        tenant, weight = lease.ask.tenant, lease.ask.weight
        self._leases.setdefault(tenant, {})[lease.id] = lease
        self._sum = self._with(tenant, weight)
        self._weights[tenant] = weight

    def remove(self, lease: Lease) -> None:
        """A request waits no more. Nothing changes where it had come back."""
        tenant = lease.ask.tenant
        mine = self._leases.get(tenant, {})
        if mine.pop(lease.id, None) is not None and not mine:
            del self._leases[tenant]
            self._sum -= self._weights.pop(tenant)

    def is_within_share(self, tenant: str, weight: int, places: int, promised: int = 0) -> bool:
        """True if one more request of a tenant, with the places `promised` to it, is within its share of all places."""
        waiting = len(self._leases.get(tenant, ()))
        return (waiting + promised + 1) * self._with(tenant, weight) <= places * weight

    def displaced(self, tenant: str, weight: int, places: int) -> Lease | None:
        """The newest request of the tenant furthest above its share: a newcomer within its own takes that place.

        It looks at all tenants that wait: 0.1 us each.
        """
        if not self.is_within_share(tenant, weight, places):
            return None
        weights, most, furthest = self._with(tenant, weight), 0, ""
        for name, leases in self._leases.items():
            excess = len(leases) * weights - places * self._weights[name]
            if excess > most or (excess == most > 0 and name < furthest):
                most, furthest = excess, name
        return self._leases[furthest][next(reversed(self._leases[furthest]))] if most else None

    def _with(self, tenant: str, weight: int) -> int:
        """The weights of all tenants that wait, and of this one."""
        return self._sum + weight - self._weights.get(tenant, 0)
