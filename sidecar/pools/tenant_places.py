"""The places of one tier's queue, by tenant: each has a share of them by its weight, and who is above it gives way.

In a tenant whose users take turns, the user with the most requests gives way.
"""

from __future__ import annotations

from sidecar.pools.base import Ask, Lease


class TenantPlaces:
    """The requests of one tier that wait, those that came back apart: they give their place to nobody.

    A tenant has the weight of its latest request.
    """

    def __init__(self) -> None:
        self._leases: dict[str, dict[int, Lease]] = {}
        self._of_users: dict[str, dict[str, dict[int, Lease]]] = {}
        self._weights: dict[str, int] = {}
        self._sum = 0

    def add(self, lease: Lease) -> None:
        """A request waits."""
        tenant, weight = lease.ask.tenant, lease.ask.weight
        self._leases.setdefault(tenant, {})[lease.id] = lease
        if lease.ask.user is not None:
            self._of_users.setdefault(tenant, {}).setdefault(lease.ask.user, {})[lease.id] = lease
        self._sum = self._with(tenant, weight)
        self._weights[tenant] = weight

    def remove(self, lease: Lease) -> None:
        """A request waits no more. Nothing changes where it had come back."""
        tenant, user = lease.ask.tenant, lease.ask.user
        mine = self._leases.get(tenant, {})
        if user is not None and lease.id in mine:
            users = self._of_users[tenant]
            del users[user][lease.id]
            if not users[user]:
                del users[user]
        if mine.pop(lease.id, None) is not None and not mine:
            del self._leases[tenant]
            self._sum -= self._weights.pop(tenant)

    def is_within_share(self, tenant: str, weight: int, places: int, promised: int = 0) -> bool:
        """True if one more request of a tenant, with the places `promised` to it, is within its share of all places."""
        waiting = len(self._leases.get(tenant, ()))
        return (waiting + promised + 1) * self._with(tenant, weight) <= places * weight

    def displaced(self, ask: Ask, places: int) -> Lease | None:
        """The newest request of the tenant furthest above its share: a newcomer within its own takes that place.

        Else it may take that of another user of its tenant, who has more requests than its own then has. It looks at
        all tenants that wait, and at the users of one: 0.1 us each.
        """
        tenant, weight = ask.tenant, ask.weight
        if not self.is_within_share(tenant, weight, places):
            users = self._of_users.get(tenant, {})
            own, longest = users.get(ask.user or "", ()), max(users.values(), key=len, default={})
            return None if ask.user is None or len(longest) <= len(own) + 1 else longest[next(reversed(longest))]
        weights, most, furthest = self._with(tenant, weight), 0, ""
        for name, leases in self._leases.items():
            excess = len(leases) * weights - places * self._weights[name]
            if excess > most or (excess == most > 0 and name < furthest):
                most, furthest = excess, name
        if not most:
            return None
        found = max(self._of_users.get(furthest, {}).values(), key=len, default=self._leases[furthest])
        return found[next(reversed(found))]

    def _with(self, tenant: str, weight: int) -> int:
        """The weights of all tenants that wait, and of this one."""
        return self._sum + weight - self._weights.get(tenant, 0)
