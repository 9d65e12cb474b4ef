"""Amounts that one replica holds, as sums of its leases by tier and engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from sidecar.pools.calls import Cell, Sums
from sidecar.scheduling.amounts import Amount, plus
from sidecar.scheduling.tickets import ScheduledLease

Sides: TypeAlias = tuple[str, str]
"""The tier and the engine of a cell."""

NO_SUMS = (0, 0, 0, 0, 0, 0, 0)


def added(a: Sums, b: Sums, sign: int) -> Sums:
    """The one, and the other added or taken off."""
    return (
        a[0] + sign * b[0],
        a[1] + sign * b[1],
        a[2] + sign * b[2],
        a[3] + sign * b[3],
        a[4] + sign * b[4],
        a[5] + sign * b[5],
        a[6] + sign * b[6],
    )


class Row:
    """The sums, and which of them changed since they were stated."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._tiers = tiers
        self.sums: dict[Sides, Sums] = {}
        self.changed: set[Sides] = set()

    def add(self, lease: ScheduledLease, sign: int) -> None:
        """Counts a lease, or counts it no more."""
        ticket = lease.ticket
        key = self._tiers[ticket.tier], lease.engine
        sums = added(self.sums.get(key, NO_SUMS), (*ticket.amount, lease.sent, *ticket.on_floor), sign)
        if sums == NO_SUMS:
            self.sums.pop(key, None)
        else:
            self.sums[key] = sums
        self.changed.add(key)

    def state(self, all_of_them: bool) -> list[Cell]:
        """The cells to state: all, or those that changed."""
        keys = self.sums if all_of_them else self.changed
        cells = [Cell(*key, *self.sums.get(key, NO_SUMS)) for key in sorted(keys)]
        self.changed = set()
        return cells

    def by_tier(self) -> dict[str, Amount]:
        """Amounts that each tier holds."""
        found: dict[str, Amount] = {}
        for (tier, _), sums in self.sums.items():
            held = sums[0], sums[1], sums[2]
            found[tier] = plus(found[tier], held) if tier in found else held
        return found


def sum_cells(tiers: Sequence[str], leases: Iterable[ScheduledLease]) -> list[Cell]:
    """The sums of some leases."""
    part = Row(tiers)
    for lease in leases:
        part.add(lease, 1)
    return part.state(all_of_them=True)
