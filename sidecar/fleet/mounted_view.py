"""The engines of a pool whose engines are mounted, as one process sees them: its own, and the others' ledgers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from sidecar.engines.view import Amount, DrainEnd, EngineDocument
from sidecar.fleet.mounted_engine import LOOK_EVERY_S, MountedEngine
from sidecar.pools.engine_reports import engine_document, no_figures
from sidecar.pools.engines import EngineFigures, name_and_incarnation
from sidecar.pools.stats import bounded


class MountedView:
    """See `EngineView`. Only the engine of this process can be drained here: the others' processes drain their own."""

    def __init__(self, engine: MountedEngine, now_s: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._now_s = now_s
        self._since_s = now_s()

    @property
    def drain_timeout_s(self) -> float:
        """See `EngineView`."""
        return self.engine.drain_timeout_s

    def documents(self) -> Sequence[EngineDocument]:
        """See `EngineView`."""
        ledgers = {ledger.id: ledger for ledger in self.engine.pool.engines()}
        rows = [self._own(ledgers.pop(self.engine.id, None)), *map(_other, ledgers.values())]
        return sorted(rows, key=lambda row: name_and_incarnation(row.id))

    async def drain(self, name: str) -> None:
        """See `EngineView`."""
        self._check(name)
        self.engine.drain()

    async def resume(self, name: str) -> None:
        """See `EngineView`."""
        self._check(name)
        await self.engine.resume()

    async def drained(self, name: str, within_s: float) -> DrainEnd:
        """See `EngineView`. The process is empty when no request of it is under way."""
        self._check(name)
        end_s = self._now_s() + within_s
        while True:
            if not self.engine.is_draining:
                return DrainEnd.RESUMED
            if self.engine.is_drained:
                return DrainEnd.EMPTY
            if self._now_s() >= end_s:
                return DrainEnd.TIMED_OUT
            await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, end_s - self._now_s())))

    def _check(self, name: str) -> None:
        if name != self.engine.name:
            raise KeyError(name)

    def _own(self, ledger: EngineFigures | None) -> EngineDocument:
        engine, size = self.engine, self.engine.size
        return engine_document(
            ledger or no_figures(engine.id),
            state=engine.state.value,
            reason=engine.reason,
            for_s=round(self._now_s() - self._since_s, 3),
            takes_new=engine.takes_new and not engine.is_draining,
            draining=engine.is_draining,
            capacity=None if size is None else Amount(*size),
            prefill=bounded(engine.prefill),
            in_flight=engine.in_flight,
            mounted=True,
        )


def _other(ledger: EngineFigures) -> EngineDocument:
    """The engine of another process; its state is that of the pool, unless that process has reported it."""
    state = "capped" if ledger.is_capped else "ready"
    return engine_document(
        ledger,
        state=state if ledger.takes_new else "gone",
        reason=None if ledger.takes_new else "its process takes no requests, or has ended",
        mounted=True,
    )
