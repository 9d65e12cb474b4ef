"""A real uvicorn server around an ASGI app, in the test's own event loop and on a free port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn


@dataclass(frozen=True)
class Served:
    """Where the server listens, and the server itself for tests that look inside."""

    url: str
    port: int
    server: uvicorn.Server


@asynccontextmanager
async def serving(app: Any, *, port: int = 0, **settings: Any) -> AsyncIterator[Served]:
    """Serves `app` (lifespan included) until the block ends; then closes every connection and cancels what runs.

    `settings` go to `uvicorn.Config`. Starts and stops in about a millisecond: uvicorn's own loop, which only looks at
    its flags every 100 ms, is not run.
    """
    defaults: dict[str, Any] = {
        "lifespan": "on",
        "log_level": "critical",
        "http": "httptools",
        "ws": "none",
        "proxy_headers": False,
    }
    config = uvicorn.Config(app, **{**defaults, "server_header": False, "date_header": False, **settings})
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # asyncio turns Nagle's algorithm off only where the socket names its protocol; else every answer takes 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    port = listener.getsockname()[1]
    await server.startup(sockets=[listener])
    try:
        yield Served(f"http://127.0.0.1:{port}", port, server)
    finally:
        for accepting in server.servers:
            accepting.close()
        tasks = list(server.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await server.lifespan.shutdown()
        await asyncio.sleep(0)
