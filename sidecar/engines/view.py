"""The engines of a pool as its operator sees them, and the drain of one: the interface between admin pages and fleet.

A pool of one engine, without `engines` in its policy, has none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import msgspec


class Amount(msgspec.Struct, frozen=True):
    """Tokens and requests; None where there is no bound."""

    tokens: int | None = None
    requests: int | None = None


class EngineDocument(msgspec.Struct, frozen=True):
    """One incarnation of an engine: `GET /engines` answers it. JSON names are the field names.

    `state` is `ready`, `starting`, `capped`, `suspect`, `down`, `draining`, `gone` or `unreachable`; `reason` says why
    it gets no requests, None where it does, or where the state says it all. `for_s` is for how long it has answered, or
    has not, as far as this process knows; None where it has never asked it.

    `held`, `unprefilled_tokens` and `claims` are the pool's, of all its processes. `capacity` is None until the engine
    has said it; `effective` is what counts of it now: less in a slow start. `in_flight`, `ejections` (by cause),
    `replays` (by reason), and the sums of tokens are this process's: `prompt_tokens` were sent to the engine, of which
    it was predicted to have `predicted_tokens`; it reported that it had `measured_tokens`, None where it reports none.

    `hit_rate` is the part that it had of the `recent_tokens` of prompts of the last five minutes, by its own count
    where `is_measured`, else by prediction; None where there were none.

    `mounted`: the engine is a process that mounts the middleware, and only that process can use it.
    """

    name: str
    id: str
    url: str | None
    state: str
    reason: str | None
    for_s: float | None
    takes_new: bool
    draining: bool
    capacity: Amount | None
    effective: Amount
    prefill: int | None
    speed: float
    held: Amount
    unprefilled_tokens: int
    claims: int
    in_flight: int
    ejections: dict[str, int] = {}
    replays: dict[str, int] = {}
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    measured_tokens: int | None = None
    recent_tokens: int = 0
    hit_rate: float | None = None
    is_measured: bool = False
    mounted: bool = False


class DrainEnd(Enum):
    """How a wait for a drain ended: the engine is empty, it was not in time, or it was resumed meanwhile."""

    EMPTY = "empty"
    TIMED_OUT = "timed_out"
    RESUMED = "resumed"


class EngineView(Protocol):
    """The engines of one pool, as one process sees them. All is called in the event loop.

    Engines are named as the operator names them. The methods that name one raise KeyError where there is none.
    """

    @property
    def drain_timeout_s(self) -> float:
        """The longest wait for a drain, by the policy."""

    def documents(self) -> Sequence[EngineDocument]:
        """Every engine, by name and incarnation; also earlier incarnations that still hold something."""

    async def drain(self, name: str) -> None:
        """The engine gets no new requests until `resume`, or until it is a new incarnation. Harmless when repeated."""

    async def resume(self, name: str) -> None:
        """Ends `drain`. Harmless when repeated."""

    async def drained(self, name: str, within_s: float) -> DrainEnd:
        """Waits until a draining engine is empty: nothing in its ledger, and none of this process's requests there.

        It may be canceled at any time; the engine drains on.
        """
