"""The engines' ledgers as a replica knows them from the store's answers.

Each answer has the ledgers that it changed, and at every heartbeat all of them: changes by other replicas are seen then
at the latest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from sidecar.pools.engines import EngineState, name_and_incarnation, sum_of
from sidecar.pools.redis.protocol import Reply


class StoredEngine(NamedTuple):
    """One engine's ledger in the store: the figures of `lua/engine_fields.lua`, in that order."""

    place: int
    is_known: int
    tokens: int
    requests: int
    prefill: int
    speed: int
    takes_new: int
    ramp_us: int
    since_us: int
    is_draining: int
    effective_tokens: int
    effective_requests: int
    effective_prefill: int
    open_requests: int
    is_capped: int
    capped_requests: int
    capped_until_us: int
    held_tokens: int
    held_requests: int
    held_prefill: int
    unprefilled_tokens: int


class EngineLedgers:
    """All ledgers, by the engines' ids. `named` are the engines that each replica names, where they differ."""

    def __init__(self) -> None:
        self.by_id: dict[str, StoredEngine] = {}
        self.named: Mapping[str, Sequence[str]] = {}
        self._claims: Sequence[str] = ()

    def hear(self, reply: Reply, *, is_complete: bool) -> None:
        """An answer of the store; a complete one has every ledger."""
        if is_complete:
            self.by_id.clear()
            self.named = {words[0]: words[1:] for words in (text.decode().split() for text in reply.named)}
        for text in reply.engines:
            engine, _, figures = text.decode().partition(" ")
            if figures:
                self.by_id[engine] = StoredEngine._make(msgspec.json.decode(figures))
            else:
                self.by_id.pop(engine, None)
        self._claims = reply.claims.decode().split(",") if reply.claims else ()

    def latest(self) -> Mapping[str, int]:
        """The latest incarnation of each name."""
        found: dict[str, int] = {}
        for engine, ledger in self.by_id.items():
            name, _, incarnation = engine.rpartition("#")
            if ledger.is_known:
                found[name] = max(found.get(name, 0), int(incarnation))
        return found

    def draining(self) -> Mapping[str, str]:
        """The ids of the engines that drain, by their names. One that has restarted does not, whatever is left."""
        latest = {name: f"{name}#{number}" for name, number in self.latest().items()}
        return {name: engine for name, engine in latest.items() if self.by_id[engine].is_draining}

    def taking(self) -> frozenset[str]:
        """The ids of the engines that take new work of some replica."""
        return frozenset(engine for engine, ledger in self.by_id.items() if ledger.place)

    def capacity(self) -> Sequence[int | None]:
        """Tokens, requests and un-prefilled tokens of the pool; None for unbounded. See `Placement`."""
        sizes = [
            (it.effective_tokens, it.effective_requests, it.effective_prefill)
            if it.place
            else (it.held_tokens, it.held_requests, it.held_prefill)
            for it in self.by_id.values()
        ]
        return [sum_of(column) for column in zip((0, 0, 0), *sizes, strict=True)]

    def states(self) -> Sequence[EngineState]:
        """See `EnginePool.engines`."""
        return [self._state(engine) for engine in sorted(self.by_id, key=name_and_incarnation)]

    def _state(self, engine: str) -> EngineState:
        it = self.by_id[engine]
        claims = int(self._claims[it.place - 1]) if 0 < it.place <= len(self._claims) else 0
        return EngineState(
            id=engine,
            takes_new=it.place > 0,
            is_capped=bool(it.is_capped),
            tokens=it.tokens,
            requests=it.requests,
            prefill=it.prefill,
            effective_tokens=it.effective_tokens,
            effective_requests=it.effective_requests,
            effective_prefill=it.effective_prefill,
            held_tokens=it.held_tokens,
            held_requests=it.held_requests,
            unprefilled_tokens=it.unprefilled_tokens,
            claims=claims,
        )
