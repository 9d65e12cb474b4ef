"""The engines of a pool as its operator sees them, and the drain of one: the interface between admin pages and fleet.

A pool of one engine, without `engines` in its policy, has none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Protocol

import msgspec

from sidecar.figures import REQUESTS, TOKENS, Over, amounts, counter, gauge

STATES = ("ready", "starting", "capped", "suspect", "down", "draining", "gone", "unreachable")
_REASON, _STATE = "admission.reason", "admission.engine.state"


class Amount(msgspec.Struct, frozen=True):
    """Tokens and requests; None where there is no bound."""

    tokens: int | None = None
    requests: int | None = None


class EngineDocument(msgspec.Struct, frozen=True):
    """One incarnation of an engine: `GET /engines` answers it. JSON names are the field names.

    `state` is one of `STATES`; `reason` says why it gets no requests, None where it does, or where the state says it
    all. `for_s` is for how long it has answered, or has not, as far as this process knows; None where it has never
    asked it.

    `held`, `unprefilled_tokens` and `claims` are the pool's, of all its processes. `capacity` is None until the engine
    has stated it; `effective` is what counts of it now: less in a slow start. `in_flight`, `ejections` (by cause),
    `replays` (by reason), and the sums of tokens are this process's: `prompt_tokens` were sent to the engine, of which
    it was predicted to have `predicted_tokens`; it reported that it had `measured_tokens`, None where it reports none.

    `hit_rate` is the part that it had of the `recent_tokens` of prompts of the last five minutes, by its own count
    where `is_measured`, else by prediction; None where there were none.

    `mounted`: the engine is a process that mounts the middleware, and only that process can use it.
    """

    name: str
    id: str
    url: str | None
    state: Annotated[
        str,
        gauge(
            _STATE,
            "1 for the engine's state, as this process sees it, and 0 for each other.",
            labels=(_STATE,),
            values=STATES,
        ),
    ]
    reason: str | None
    for_s: float | None
    takes_new: bool
    draining: bool
    capacity: Annotated[
        Amount | None,
        amounts("admission.engine.capacity", "that the engine has room for, all of them also in a slow start."),
    ]
    effective: Amount
    prefill: int | None
    speed: float
    held: Annotated[
        Amount,
        amounts("admission.engine.held", "that leases hold on the engine."),
    ]
    unprefilled_tokens: Annotated[
        int,
        gauge(
            "admission.engine.unprefilled.tokens",
            "Prompt tokens that were sent and have no first byte yet.",
            TOKENS,
        ),
    ]
    claims: Annotated[int, gauge("admission.engine.claims", "Requests in line for this engine.", REQUESTS)]
    in_flight: Annotated[
        int, gauge("admission.engine.in_flight", "Admitted requests of this process at the engine.", REQUESTS, Over.SUM)
    ]
    ejections: Annotated[
        dict[str, int],
        counter(
            "admission.engine.ejections",
            "How often this process stopped to use the engine, by what it found.",
            "{ejection}",
            labels=(_REASON,),
        ),
    ] = {}
    replays: Annotated[
        dict[str, int],
        counter(
            "admission.replays",
            "Requests that left the engine before their first byte, and waited again, by the reason.",
            REQUESTS,
            labels=(_REASON,),
        ),
    ] = {}
    prompt_tokens: Annotated[
        int, counter("admission.prompt.tokens", "Tokens of the prompts sent to the engine.", TOKENS)
    ] = 0
    predicted_tokens: Annotated[
        int,
        counter(
            "admission.prefix.tokens.predicted",
            "Tokens of these prompts that the engine was predicted to have cached.",
            TOKENS,
        ),
    ] = 0
    measured_tokens: Annotated[
        int | None,
        counter(
            "admission.prefix.tokens.measured",
            "Tokens of these prompts that the engine has reported as cached, where it reports them.",
            TOKENS,
        ),
    ] = None
    recent_tokens: int = 0
    hit_rate: float | None = None
    is_measured: bool = False
    mounted: bool = False


class DrainEnd(Enum):
    """How a wait for a drain ended: the engine is empty, it was not in time, or it was resumed meanwhile."""

    EMPTY = "empty"
    TIMED_OUT = "timed_out"
    RESUMED = "resumed"


class PoolEngines(Protocol):
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
