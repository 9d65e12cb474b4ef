"""Routing to the engine of this process: the app itself, which is called once for each admission.

Nothing is predicted, and nothing is sent a second time: the engine lives and ends with the process. An answer of the
app's passes as it is, with its head.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Send

from sidecar.admission.answer import EngineCall
from sidecar.admission.intake import SizedRequest
from sidecar.admission.usage import UsageReader
from sidecar.engines.speed import EngineSpeed
from sidecar.engines.watch import EngineHealth
from sidecar.errors import Draining
from sidecar.events import ReplayReason
from sidecar.fleet.mounted_engine import MountedEngine
from sidecar.fleet.prefill import Prefill
from sidecar.policy.model import Policy
from sidecar.pools import Lease


class MountedRouting:
    """See `EngineRouting`. `watch` is the app's."""

    def __init__(self, engine: MountedEngine, watch: EngineHealth) -> None:
        self.engine = engine
        self.watch = watch
        self.speed = EngineSpeed()

    def route(self, request: SizedRequest) -> MountedRoute:
        """See `EngineRouting`. Raises Draining while the engine drains."""
        self.wake()
        return MountedRoute(self, request)

    def wake(self) -> None:
        """See `EngineRouting`. Raises Draining while the engine drains."""
        if self.engine.is_draining:
            raise Draining("this server is draining and takes no new request; try another", retry_after_s=1)
        self.engine.wake()

    def url_for(self, engine_id: str) -> None:
        """See `EngineRouting`: the engine is this process."""

    def change_policy(self, policy: Policy) -> None:
        """See `EngineRouting`."""
        self.engine.change_policy(policy)


class MountedRoute:
    """One request's route to the app. See `EngineRoute`."""

    __slots__ = (
        "_is_in_flight", "_lease", "_prefill", "_request", "_routing", "_send", "_status", "barred", "hits", "replay",
        "usage",
    )  # fmt: skip

    _lease: Lease
    _send: Send
    usage: UsageReader

    def __init__(self, routing: MountedRouting, request: SizedRequest) -> None:
        self._routing = routing
        self._request = request
        self.hits: tuple[tuple[str, int], ...] = ()
        self.barred: tuple[str, ...] = ()
        self.replay: ReplayReason | None = None
        self._prefill: Prefill | None = None
        self._is_in_flight = False
        self._status = 0

    def begin(self, lease: Lease, send: Send) -> Send:
        """See `EngineRoute`. The head is not held back."""
        engine, request = self._routing.engine, self._request
        self._lease, self._send = lease, send
        self._is_in_flight, self._status = True, 0
        engine.in_flight += 1
        now_us = engine.pool.now_us()
        self._prefill = Prefill(self._routing.speed, request, request.prompt_tokens, lease, now_us)
        return self._send_noting

    def call(self) -> EngineCall:
        """See `EngineRoute`."""
        self._end_attempt()  # one that was preempted
        self.usage = UsageReader()
        return EngineCall(self._routing.watch)

    def pinned(self, app: ASGIApp) -> ASGIApp:
        """See `EngineRoute`: the app is the engine."""
        return app

    async def _send_noting(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def first_byte(self) -> None:
        """See `EngineRoute`."""
        if self._prefill is not None:
            self._prefill.first_byte(self._routing.engine.pool.now_us(), is_served=0 < self._status < 400)

    def ended(self) -> None:
        """See `EngineRoute`."""
        self._end_attempt()

    def failed(self, error: Exception) -> bool:  # noqa: ARG002  # see `EngineRoute`
        """See `EngineRoute`: an error of the app's is the server's to answer."""
        return False

    async def waits_again(self) -> bool:
        """See `EngineRoute`: only a proxy leaves a request unanswered."""
        return False

    def _end_attempt(self) -> None:
        engine = self._routing.engine
        if self._prefill is not None:
            self._prefill.end(engine.pool.now_us())
        if self._is_in_flight:
            self._is_in_flight = False
            engine.in_flight -= 1
