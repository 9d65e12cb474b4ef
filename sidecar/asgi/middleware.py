"""The door as ASGI middleware: requests on the policy's endpoints are exchanges, all others pass or are refused."""

from __future__ import annotations

import posixpath

from sidecar.asgi.door import Door
from sidecar.asgi.exchange import Exchange
from sidecar.asgi.observe.observing import Observing
from sidecar.asgi.types import Receive, Scope, Send
from sidecar.asgi.unguarded import pass_or_refuse, route_path
from sidecar.policy.model import Endpoint


class Admission(Door):
    """Guards the policy's endpoints of an ASGI app; `unguarded` decides on everything else."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection, as ASGI has it."""
        endpoint = self._guarded(scope)
        if endpoint is None:
            await pass_or_refuse(self, scope, receive, send)
        elif self.is_observing:
            await Observing(self, endpoint, scope, receive, send).run()
        else:
            # A list of our own: uvicorn appends trailers to the one it gave, behind what we have read of it.
            scope = {**scope, "headers": list(scope["headers"])}
            await Exchange(self, endpoint, scope, receive, send).run()

    def _guarded(self, scope: Scope) -> Endpoint | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path = route_path(scope)
        return self.endpoints.get(path) or self._guarded_otherwise_written(path)

    def _guarded_otherwise_written(self, path: str) -> Endpoint | None:
        """What a server behind us may take for a guarded path: nginx, for one, merges slashes and resolves dots."""
        if "//" not in path and "/." not in path and not path.endswith("/"):
            return None
        return self.endpoints.get(posixpath.normpath("/" + path.lstrip("/")))
