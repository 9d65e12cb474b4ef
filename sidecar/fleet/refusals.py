"""Refusals of one tenant's requests, which say nothing about an engine's room for those of others.

An engine, or a gateway before it, may have a limit of its own for a client, and refuse only what that one asks. By the
refusal alone this looks as if the engine were full. It does not where the engine answers others all the while.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

IN_A_ROW = 5
"""So many refusals of one tenant without an answer, and so many answers to others in that time, are no chance."""
MOST_TENANTS = 256
"""Tenants that are remembered for one engine."""


@dataclass(slots=True)
class _Row:
    """A tenant's refusals by one engine since its last answer there, and others' answers to what was sent since."""

    since_us: int
    refusals: int = 0
    answers: int = 0


class Refusals:
    """The refusals by each engine, by its id. Times are microseconds of one clock."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, _Row]] = {}

    def refused(self, engine_id: str, tenant: str, now_us: int) -> bool:
        """Notes a refusal. Whether it is about the tenant, and not about the engine's room."""
        rows = self._rows.setdefault(engine_id, {})
        row = rows.get(tenant)
        if row is None:
            if len(rows) == MOST_TENANTS:
                del rows[next(iter(rows))]
            row = rows[tenant] = _Row(now_us)
        row.refusals += 1
        return row.refusals > IN_A_ROW and row.answers >= IN_A_ROW

    def answered(self, engine_id: str, tenant: str, sent_us: int) -> None:
        """The engine answers a request that was sent to it then."""
        rows = self._rows.get(engine_id)
        if not rows:
            return
        rows.pop(tenant, None)
        for row in rows.values():
            row.answers += sent_us > row.since_us

    def keep(self, engine_ids: Collection[str]) -> None:
        """Forgets all other engines."""
        for engine_id in self._rows.keys() - engine_ids:
            del self._rows[engine_id]
