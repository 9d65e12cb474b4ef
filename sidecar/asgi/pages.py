"""An engine's pages as the app behind the door gives them: a reverse proxy's, or those of the server that we are in."""

from __future__ import annotations

import asyncio
from urllib.parse import quote, urlsplit

from sidecar.asgi.types import ASGIApp, Message, Receive, Scope, Send
from sidecar.engines.pages import NoAnswer, Page, Unread

ANSWER_WITHIN_S = 2.0
"""A page is a matter of milliseconds, also for an engine at work; whoever waits for it longer learns nothing new."""
MOST_BYTES = 8 * 2**20
OWN = "sidecar.own"
"""Among the `extensions` of a request that is ours and no client's: whoever asked says what went wrong with it."""
_UNREACHABLE = frozenset((502, 504))


class AppPages:
    """Around an app, which it passes everything to: asks it for pages as a client would. See `engines.pages.Pages`.

    Neither the network nor the event loop is left where the engine serves in this process. `key` is sent as an API key.
    `host` is what the server calls the app, as soon as it has called it.
    """

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        self._app = app
        self._key = key
        self.host: object | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        if self.host is None:
            self.host = scope.get("app")
        await self._app(scope, receive, send)

    async def get(self, path: str) -> Page:
        """See `Pages.get`."""
        return await page_of(self._app, self._scope(path))

    def _scope(self, path: str) -> Scope:
        parts = urlsplit(path)
        headers = [(b"host", b"127.0.0.1"), (b"accept", b"*/*"), (b"user-agent", b"admission-sidecar")]
        if self._key is not None:
            headers.append((b"authorization", f"Bearer {self._key}".encode()))
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": parts.path,
            "raw_path": quote(parts.path).encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": ("127.0.0.1", 80),
            "state": {},
            "extensions": {OWN: {}},
        }
        if self.host is not None:
            scope["app"] = self.host
        return scope


async def page_of(app: ASGIApp, scope: Scope) -> Page:
    """What an app answers to a request of ours without a body. Raises Unread, or NoAnswer where it takes too long."""
    answer, asked = _Answer(), f"{scope['method']} {scope['path']}"
    try:
        await asyncio.wait_for(app(scope, answer.receive, answer.send), ANSWER_WITHIN_S)
    except asyncio.TimeoutError:  # in Python 3.10 not yet the builtin TimeoutError
        raise NoAnswer(f"{asked} was not answered within {ANSWER_WITHIN_S:g} s") from None
    except Unread:
        raise
    except Exception as error:
        raise Unread(f"{asked} failed: {type(error).__name__}: {error}") from error
    return answer.page(asked)


class _Answer:
    """Collects one response. Nobody disconnects before it is complete."""

    def __init__(self) -> None:
        self._status: int | None = None
        self._body = bytearray()
        self._is_read = False

    async def receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        disconnect: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await disconnect  # canceled with the request

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if len(self._body) > MOST_BYTES:
                raise Unread(f"a page has more than {MOST_BYTES} bytes")

    def page(self, asked: str) -> Page:
        if self._status is None:
            raise Unread(f"{asked} was not answered")
        if self._status in _UNREACHABLE:
            raise NoAnswer(f"the engine cannot be reached ({asked} answered {self._status})")
        return Page(self._status, self._body.decode("utf-8", "replace"))
