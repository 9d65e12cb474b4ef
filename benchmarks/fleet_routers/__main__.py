"""One router as a process: it binds each request to an engine by a rule, and passes the answer through as it comes.

    python -m benchmarks.fleet_routers --rule cache-aware --cache-tokens 500000 http://127.0.0.1:8001 http://...

It is made of the sidecar's own server and reverse proxy, so that the rules alone differ from `sidecar serve`. It has no
health checks and no replay: the comparison is of rules, and the engines live. `GET /_router` shows the counts.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import msgspec
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from benchmarks.fleet_routers import RULES
from benchmarks.fleet_routers.rule import Request, Rule
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.server.server import run
from sidecar.tools.emulator.server import bind


class _Turn(msgspec.Struct):
    content: str = ""


class _Body(msgspec.Struct):
    messages: list[_Turn] = []
    prompt: str = ""


_decode = msgspec.json.Decoder(_Body).decode


def prompt_of(body: bytes) -> bytes:
    """The texts of a body in their order; empty where it has none that is plain text."""
    try:
        found = _decode(body)
    except msgspec.MsgspecError:
        return b""
    return (found.prompt + "".join(turn.content for turn in found.messages)).encode()


class Router:
    """ASGI app: one rule, and a proxy for each engine."""

    def __init__(self, rule: Rule, engines: Sequence[str]) -> None:
        self.rule = rule
        self.proxies = [ReverseProxy(url) for url in engines]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"] == "/_router":
            await JSONResponse({"requests": self.rule.requests})(scope, receive, send)
        elif scope["method"] != "POST":
            await self.proxies[0](scope, receive, send)
        else:
            await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        request = Request(prompt_of(body))
        engine = self.rule.choose(request)
        try:
            await self.proxies[engine](scope, _with_body(body, receive), self._watched(request, engine, send))
        finally:
            self.rule.ended(request, engine)

    def _watched(self, request: Request, engine: int, send: Send) -> Send:
        """Tells the rule of the first byte of the body, as far as the engine sends one before its end."""
        is_prefilled = False

        async def watched(message: Message) -> None:
            nonlocal is_prefilled
            if not is_prefilled and message["type"] == "http.response.body" and message.get("body"):
                is_prefilled = True
                self.rule.first_byte(request, engine)
            await send(message)

        return watched

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for proxy in self.proxies:
            await proxy.close()
        await send({"type": "lifespan.shutdown.complete"})


def _with_body(body: bytes, receive: Receive) -> Receive:
    """The body again, then what the client does."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def serve(router: Router, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    listener = bind("127.0.0.1", port)
    config = uvicorn.Config(router, http=BoundedHttpProtocol, access_log=False, log_config=None, timeout_keep_alive=75)
    server = uvicorn.Server(config)
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, lambda: setattr(server, "should_exit", True))
    listener.listen(2048)
    print(f"{router.rule.name} on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await server._serve([listener])  # `serve` would replace the signals' handlers


def main() -> int:
    """Runs one router."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=RULES, required=True)
    parser.add_argument("--cache-tokens", type=int, default=500_000, help="of each engine (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("engines", nargs="+", metavar="URL")
    args = parser.parse_args()
    logging.disable(
        logging.CRITICAL
    )  # engines that break are a part of the benchmark, and the clients count the errors
    rule = RULES[args.rule](len(args.engines), args.cache_tokens)
    run(serve(Router(rule, args.engines), args.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
