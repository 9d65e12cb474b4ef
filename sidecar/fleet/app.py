"""The fleet as an ASGI app: an admitted request goes to the engine of its grant, any other to one that answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence

from starlette.types import Receive, Scope, Send

from sidecar.admission.handover import ENGINE_ID_KEY, is_internal
from sidecar.engines.watch import EngineHealth, EngineState
from sidecar.errors import EngineUnreachable
from sidecar.fleet.fleet import Fleet
from sidecar.proxy.proxy import SOON_S, answer_failure


class FleetApp:
    """Forwards each HTTP request to one engine of `fleet`, as `ReverseProxy` does to its one.

    The scope names an admitted request's engine (`ENGINE_ID_KEY`). A grant whose engine has restarted or gone since was
    not sent to any: the request waits again. The lifespan's shutdown closes the fleet; its start is `Fleet.open`.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def __repr__(self) -> str:
        return f"FleetApp({self.fleet!r})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope. WebSockets are refused: no API that is admitted uses them."""
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1011, "reason": "this proxy does not forward WebSockets"})
        elif scope["type"] == "lifespan":
            await serve_lifespan(receive, send, [self.fleet])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine_id = scope.get(ENGINE_ID_KEY)
        if engine_id is None:
            member = self.fleet.usable(is_client=not is_internal(scope))
        else:
            member = self.fleet.member(engine_id)
        if member is not None:
            await member.serve(scope, receive, send, is_admitted=engine_id is not None)
        elif engine_id is None:
            await _fail("no engine can be used now", "; ".join(self.fleet.readiness()), scope, send)
        else:
            await _fail("its engine has restarted or gone", f"engine {engine_id} is there no more", scope, send)


class FleetsApp:
    """Forwards requests that no pool admits to an engine of any of the fleets in `apps`, the first that has one.

    It serves the lifespan of all of them. An admitted request goes to the `FleetApp` of its own pool.
    """

    def __init__(self, apps: Sequence[FleetApp]) -> None:
        self.apps = apps

    def __repr__(self) -> str:
        return f"FleetsApp({', '.join(map(repr, self.apps))})"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] != "lifespan":
            usable = (app for app in self.apps if not app.fleet.readiness())
            await next(usable, self.apps[0])(scope, receive, send)
            return
        await serve_lifespan(receive, send, [app.fleet for app in self.apps])


async def serve_lifespan(receive: Receive, send: Send, fleets: Sequence[Fleet]) -> None:
    """Serves a lifespan whose shutdown closes the fleets; their start is `Fleet.open`."""
    await receive()
    try:
        await send({"type": "lifespan.startup.complete"})
        await receive()
    finally:
        await asyncio.gather(*(fleet.close() for fleet in fleets))
    await send({"type": "lifespan.shutdown.complete"})


async def _fail(reason: str, trouble: str, scope: Scope, send: Send) -> None:
    """Ends a request that was sent to no engine."""
    message, retry_after_s = f"the engine could not be reached: {reason}", SOON_S * random.uniform(1, 2)
    error = EngineUnreachable(message, trouble=trouble, is_connected=False, retry_after_s=retry_after_s)
    await answer_failure(error, scope, send, was_sent=False)


# -- Health of a whole fleet: whether requests can be sent at all. Each engine has a watch of its own.


class FleetHealth(EngineHealth):
    """Health of a fleet, which is up while one of its engines is. `FleetApp` closes it with the server's lifespan."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        fleet.on_state = self._look

    @property
    def reason(self) -> str | None:
        """See `EngineHealth`."""
        return "; ".join(self._fleet.readiness()) or None

    async def open(self) -> None:
        """Finds the engines, and looks at each once."""
        await self._fleet.open()
        self._look()

    def _look(self) -> None:
        if self._fleet.is_starting:
            return
        state = self._present_state()
        if state is not self.state:
            self.state, self.since_s = state, time.monotonic()
            self._changed()

    def _present_state(self) -> EngineState:
        if not self._fleet.readiness():
            return EngineState.UP
        found = {member.watch.state for member in self._fleet.members()}
        return EngineState.MISMATCH if found == {EngineState.MISMATCH} else EngineState.DOWN

    def readiness(self) -> Sequence[str]:
        """See `EngineHealth`."""
        return () if self.state is EngineState.UNKNOWN else self._fleet.readiness() or self._fleet.idleness()

    def notices(self) -> Sequence[str]:
        """See `EngineHealth`."""
        return self._fleet.notices()

    def document(self) -> Mapping[str, object]:
        """See `EngineHealth`."""
        return {**super().document(), **self._fleet.document()}
