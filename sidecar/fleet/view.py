"""The engines of a fleet as its operator sees them: its members, the pool's ledgers and the predicted hits together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sidecar.engines.view import Amount, DrainEnd, EngineDocument
from sidecar.engines.watch import OutageCause
from sidecar.events import ReplayReason
from sidecar.fleet.member import EngineMember
from sidecar.fleet.routing import FleetRouting
from sidecar.pools.engine_reports import engine_document, no_figures
from sidecar.pools.engines import EngineFigures, name_and_incarnation
from sidecar.pools.stats import bounded

LOOK_EVERY_S = 0.1
"""Between two looks at the ledger of an engine that drains: a shared pool says nothing when it is empty."""
RECENT_S = 300.0
_NOTED_EVERY_S = 5.0

_UNNAMED = "the engine list of this process does not name it; another replica's does"
_GONE = "its last requests end"


class Prompts(NamedTuple):
    """Tokens of prompts: sent, predicted to be cached, and, of those whose engine counts, in all and cached."""

    sent: int = 0
    predicted: int = 0
    counted: int = 0
    measured: int = 0

    def since(self, before: Prompts) -> Prompts:
        """Difference to an earlier sum."""
        return Prompts(*(now - then for now, then in zip(self, before, strict=True)))


class RecentPrompts:
    """The sums of one engine, as they were in the last minutes: at most one a few seconds is kept."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, Prompts]] = deque()

    def note(self, now_s: float, sums: Prompts) -> Prompts:
        """Sums of the last five minutes, up to these sums."""
        noted = self._noted
        while len(noted) > 1 and noted[1][0] <= now_s - RECENT_S:
            noted.popleft()
        if not noted or now_s - noted[-1][0] >= _NOTED_EVERY_S:
            noted.append((now_s, sums if noted else Prompts()))
        return sums.since(noted[0][1])


class FleetView:
    """See `EngineView`. In a shared pool a drain is known to all replicas."""

    def __init__(self, routing: FleetRouting, now_s: Callable[[], float] = time.monotonic) -> None:
        self.routing = routing
        self.fleet = routing.fleet
        self.pool = routing.pool
        self._now_s = now_s
        self._recent: dict[str, RecentPrompts] = {}

    @property
    def drain_timeout_s(self) -> float:
        """See `EngineView`."""
        return self.routing.drain_timeout_s

    def documents(self) -> Sequence[EngineDocument]:
        """See `EngineView`."""
        ledgers = {ledger.id: ledger for ledger in self.pool.engines()}
        members = {member.id: member for member in self.fleet.members()}
        names = {member.name for member in members.values()}
        self._recent = {name: self._recent.get(name) or RecentPrompts() for name in names}
        rows = [self._member_document(member, ledgers.get(engine_id)) for engine_id, member in members.items()]
        rows += [_other(ledger) for engine_id, ledger in ledgers.items() if engine_id not in members]
        return sorted(rows, key=lambda row: name_and_incarnation(row.id))

    async def drain(self, name: str) -> None:
        """See `EngineView`."""
        if self.fleet.drain(name) is None:
            raise KeyError(name)
        self.pool.drain_engine(name, drains=True)

    async def resume(self, name: str) -> None:
        """See `EngineView`."""
        if self.fleet.resume(name) is None:
            raise KeyError(name)
        self.pool.drain_engine(name, drains=False)

    async def drained(self, name: str, within_s: float) -> DrainEnd:
        """See `EngineView`. A new incarnation ends it, too, when nothing of the one before is left."""
        member = self._member(name)
        engine_id, end_s = member.id, self._now_s() + within_s
        while True:
            if not member.is_draining and member.id == engine_id:
                return DrainEnd.RESUMED
            if self._is_empty(member, engine_id):
                return DrainEnd.EMPTY
            if self._now_s() >= end_s:
                return DrainEnd.TIMED_OUT
            await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, end_s - self._now_s())))

    def _member(self, name: str) -> EngineMember:
        for member in self.fleet.members():
            if member.name == name:
                return member
        raise KeyError(name)

    def _is_empty(self, member: EngineMember, engine_id: str) -> bool:
        """True if the pool places nothing there any more, nothing is held there, and nothing is under way."""
        ledgers = [ledger for ledger in self.pool.engines() if ledger.id == engine_id]
        is_idle = member.id != engine_id or not member.open_requests
        return is_idle and not any(ledger.takes_new or ledger.held_requests for ledger in ledgers)

    def _member_document(self, member: EngineMember, ledger: EngineFigures | None) -> EngineDocument:
        prompts = self._prompts(member.name)
        recent = self._recent[member.name].note(self._now_s(), prompts)
        is_measured = recent.counted > 0
        part, whole = (recent.measured, recent.counted) if is_measured else (recent.predicted, recent.sent)
        size = member.size
        return engine_document(
            ledger or no_figures(member.id),
            url=member.address.url,
            state=member.state.value,
            reason=member.reason,
            for_s=round(member.watch.for_s, 3),
            takes_new=member.takes_new,
            draining=member.is_draining,
            capacity=None if size is None else Amount(*size),
            prefill=bounded(member.address.prefill),
            speed=member.address.speed / 1000,
            in_flight=member.in_flight,
            ejections={cause.value: member.ejections[cause] for cause in OutageCause},
            replays=self._replays(member.name),
            prompt_tokens=prompts.sent,
            predicted_tokens=prompts.predicted,
            measured_tokens=prompts.measured if prompts.counted else None,
            recent_tokens=whole,
            hit_rate=round(part / whole, 4) if whole > 0 else None,
            is_measured=is_measured,
        )

    def _prompts(self, name: str) -> Prompts:
        counts = self.routing
        return Prompts(
            counts.prompt_tokens[name],
            counts.predicted_tokens[name],
            counts.counted_tokens[name],
            counts.cached_tokens[name],
        )

    def _replays(self, name: str) -> dict[str, int]:
        return {reason.value: self.routing.replays[name, reason] for reason in ReplayReason}


def _other(ledger: EngineFigures) -> EngineDocument:
    """An engine that is no member here: an earlier incarnation, or one that only other replicas name."""
    state, reason = ("unreachable", _UNNAMED) if ledger.takes_new else ("gone", _GONE)
    return engine_document(ledger, state=state, reason=reason)
