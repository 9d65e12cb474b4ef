"""The engines of a pool of several, as the middleware sees them. The package `fleet` implements this.

A request has one route. Each time it is admitted, its route begins an attempt at the engine that its grant names. An
attempt that ends before the first byte of the response's body may be repeated: the request waits again.
"""

from __future__ import annotations

import random
from typing import Protocol

from starlette.types import ASGIApp, Send

from sidecar.admission.answer import EngineCall
from sidecar.admission.intake import SizedRequest
from sidecar.admission.usage import UsageReader
from sidecar.durations import short_duration
from sidecar.engines.watch import EngineHealth, EngineState
from sidecar.errors import NoEngine
from sidecar.events import ReplayReason
from sidecar.policy.model import Policy
from sidecar.pools import Lease

SOONEST_S, LATEST_S = 1.0, 60.0
"""When a client may come again that found no engine: see `no_engine`."""


class EngineRoute(Protocol):
    """One request's way to the engines of its pool.

    `hits` are the prompt's tokens that engines are predicted to have, by their ids. `barred` are the names of the
    engines that broke the request in its last attempt. `replay` is why it was sent, or is to be sent, to an engine
    again: the last of the reasons, None before the first.
    """

    hits: tuple[tuple[str, int], ...]
    barred: tuple[str, ...]
    replay: ReplayReason | None
    usage: UsageReader
    """Reads the response of the present attempt."""

    def begin(self, lease: Lease, send: Send) -> Send:
        """Begins an attempt at the engine of the lease's grant. Returns the app's `send`.

        What it passes on to `send` begins with the first byte of the body.
        """

    def call(self) -> EngineCall:
        """The call of the app in the next attempt."""

    def pinned(self, app: ASGIApp) -> ASGIApp:
        """The app, for further questions to the engine of the present attempt."""

    def failed(self, error: Exception) -> bool:
        """The app raised an error. Whether the request may wait again: nothing of a response was passed on."""

    async def waits_again(self) -> bool:
        """True if the failed attempt is repeated. Call it once, before the lease is handed back.

        False: the call's `error` is the request's answer.
        """

    def first_byte(self) -> None:
        """The first byte of the response's body is there."""

    def ended(self) -> None:
        """The request is over."""


class EngineRouting(Protocol):
    """Routes for the requests of one pool."""

    def route(self, request: SizedRequest) -> EngineRoute:
        """The route of a request that enters the pool next."""

    def change_policy(self, policy: Policy) -> None:
        """Another policy counts from now on."""

    def wake(self) -> None:
        """A lease of a request without a route enters the pool next. Raises Draining as `route` does."""

    def url_for(self, engine_id: str) -> str | None:
        """The address of an engine, by its id; None where it runs in this process, or is gone."""


def no_engine(watch: EngineHealth) -> NoEngine:
    """The refusal while no request can be sent to the engine. Its address and the trouble are for the operator alone.

    A client comes again after as long as the engine has been away already, within `SOONEST_S` and `LATEST_S`.
    """
    lasted_s = watch.for_s
    if watch.state is EngineState.MISMATCH:
        why = "another engine answers than the one that this server is set up for"
    else:
        why = f"the engine has not answered for {short_duration(lasted_s)}"
    retry_after_s = min(LATEST_S, max(SOONEST_S, lasted_s)) * random.uniform(0.8, 1.2)
    return NoEngine(f"{why}, and no request is sent to it; try again later", retry_after_s=retry_after_s)
