"""What one replica holds, as sums of its leases by tier and engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidecar.core.amounts import NOTHING, Amount, plus
from sidecar.core.calls import Cell
from sidecar.core.tickets import Lease

_NOTHING = (0,) * 7


def _figures(lease: Lease) -> Sequence[int]:
    return *lease.amount, lease.sent, *lease.ticket.on_floor


class Row:
    """The sums, and which of them changed since they were stated."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._tiers = tiers
        self._sums: dict[tuple[int, str], tuple[int, ...]] = {}
        self.changed: set[tuple[int, str]] = set()

    def add(self, lease: Lease, sign: int) -> None:
        """Counts a lease, or counts it no more."""
        key = lease.ticket.tier, lease.engine
        before = self._sums.pop(key, _NOTHING)
        after = tuple(a + sign * b for a, b in zip(before, _figures(lease), strict=True))
        if any(after):
            self._sums[key] = after
        self.changed.add(key)

    def state(self, all_of_them: bool) -> list[Cell]:
        """The cells to state: all, or those that changed."""
        keys = self._sums if all_of_them else self.changed
        cells = [Cell(self._tiers[tier], e, *self._sums.get((tier, e), _NOTHING)) for tier, e in sorted(keys)]
        self.changed = set()
        return cells

    def by_engine(self) -> dict[str, tuple[int, int, int]]:
        """Tokens, requests and sent prompts."""
        found: dict[str, tuple[int, int, int]] = {}
        for (_, engine), sums in self._sums.items():
            tokens, requests, sent = found.get(engine, (0, 0, 0))
            found[engine] = tokens + sums[0], requests + sums[1], sent + sums[3]
        return found

    def by_tier(self) -> dict[int, Amount]:
        """What each tier holds."""
        found: dict[int, Amount] = {}
        for (tier, _), sums in self._sums.items():
            found[tier] = plus(found.get(tier, NOTHING), (sums[0], sums[1], sums[2]))
        return found

    def of(self, leases: Iterable[Lease]) -> list[Cell]:
        """The sums of some leases."""
        part = Row(self._tiers)
        for lease in leases:
            part.add(lease, 1)
        return part.state(True)
