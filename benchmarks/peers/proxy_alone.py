"""Our reverse proxy without admission, in the server of `sidecar serve`: what the proxy itself costs.

python -m benchmarks.peers.proxy_alone URL
"""

from __future__ import annotations

import sys

from starlette.types import Receive, Scope, Send

from sidecar.proxy.proxy import ReverseProxy
from sidecar.server import server


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Admin pages, which this process has none of."""
    del scope, receive
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Serves until SIGTERM, and prints its addresses as `sidecar serve` does."""
    own = ("127.0.0.1", 0)
    served = server.Served(ReverseProxy(sys.argv[1]), _nothing)
    server.run(server.serve(served, address=own, admin=own, grace_s=0.0, announce=lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
