"""A stand-in for the composed sidecar, run as a process by test_server: counts what runs, refuses while draining."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from sidecar.admin.app import admin_app
from sidecar.admission.responses import send_error
from sidecar.errors import Draining
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.server import CannotServe, Served, run, serve


class Sidecar:
    def __init__(self, upstream: str) -> None:
        self._proxy = ReverseProxy(upstream)
        self._running = 0
        self._draining = False
        self._drained = asyncio.Event()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._proxy(scope, receive, send)
        if self._draining:
            return await send_error(send, Draining("shutting down", retry_after_s=1))
        self._running += 1
        try:
            return await self._proxy(scope, receive, send)
        finally:
            self._running -= 1
            if self._draining and not self._running:
                self._drained.set()

    def drain(self) -> None:
        self._draining = True
        if not self._running:
            self._drained.set()

    async def drained(self) -> None:
        await self._drained.wait()

    def readiness(self) -> list[str]:
        return ["draining"] if self._draining else []


if __name__ == "__main__":
    upstream, port, grace_s = sys.argv[1:]
    sidecar = Sidecar(upstream)
    try:
        run(
            serve(
                Served(
                    sidecar.app,
                    admin_app(state=dict, readiness=sidecar.readiness),
                    drain=sidecar.drain,
                    drained=sidecar.drained,
                ),
                address=("127.0.0.1", int(port)),
                admin=("127.0.0.1", 0),
                grace_s=float(grace_s),
                announce=lambda line: print(line, flush=True),  # noqa: T201 - what the test waits for
            )
        )
    except CannotServe as error:
        sys.exit(str(error))
