"""The tenants that wait in a long queue, by weight and by how many of their tickets do.

A full queue gives the place of the newest ticket of the tenant that is furthest above its share to another. To find
that tenant among all takes 0.1 us each. So a queue of very many tenants keeps them here. Of one weight that with the
most tickets is furthest above its share.
"""

from __future__ import annotations

SEARCHED = 1_024
"""A queue of no more tenants finds one by looking at all of them: some 0.1 ms."""


class TenantsByUse:
    """Every change costs O(1). To find a tenant costs as much as there are weights, different numbers of tickets, and
    tenants that are equally far above their share: fewer than half of all, and 20 ns for each.
    """

    __slots__ = ("_tenants",)

    def __init__(self) -> None:
        self._tenants: dict[int, dict[int, dict[str, None]]] = {}  # weight -> tickets -> tenants

    def change(self, tenant: str, weight_before: int, waiting_before: int, weight: int, waiting: int) -> None:
        """A tenant had so many tickets that wait, and has so many now."""
        if waiting_before:
            of_weight = self._tenants[weight_before]
            tenants = of_weight[waiting_before]
            del tenants[tenant]
            if not tenants:
                del of_weight[waiting_before]
                if not of_weight:
                    del self._tenants[weight_before]
        if waiting:
            self._tenants.setdefault(weight, {}).setdefault(waiting, {})[tenant] = None

    def parts(self) -> list[dict[str, None]]:
        """All dicts that may be large, to be freed in slices."""
        return [tenants for of_weight in self._tenants.values() for tenants in of_weight.values()]

    def furthest_above(self, weights: int, places: int) -> str | None:
        """The tenant that is furthest above its share of the places, the first by name of equals; None if none is."""
        excess, found = 0, list[dict[str, None]]()
        for weight, of_weight in self._tenants.items():
            most = max(of_weight)
            own = most * weights - places * weight
            if own > excess:
                excess, found = own, []
            if own == excess and own:
                found.append(of_weight[most])
        return min(map(min, found)) if found else None
