"""The engine's own pages (`/metrics`, `/v1/models`, ...), asked of the app that the middleware is mounted in.

In-process engines are queried over ASGI, without a socket. A reverse proxy's engine is asked through the proxy.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote, urlsplit

from starlette.types import ASGIApp, Message, Scope

from sidecar.admission.handover import INTERNAL_REQUEST
from sidecar.engines.pages import NoAnswer, NotConnected, Page, TooSlow, Unread
from sidecar.errors import AdmissionError, EngineUnreachable

ANSWER_WITHIN_S = 2.0
"""Timeout of a page. A page takes milliseconds, even while the engine is busy."""
MOST_BYTES = 8 * 2**20
_UNREACHABLE = frozenset((502, 504))


class EnginePages:
    """Fetches pages from an app. See `reading.Pages`.

    `key` is sent as the API key. `host` is the server's application object (`scope["app"]`): see `follow`.
    """

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        self._app = app
        self._key = key
        self.host: object | None = None

    def follow(self, scope: Scope) -> None:
        """Notes the `host` that the process's first scope names. Later ones name no other."""
        self.host = scope.get("app")

    async def get(self, path: str, *, within_s: float = ANSWER_WITHIN_S) -> Page:
        """See `Pages.get`."""
        return await fetch_page(self._app, self._scope(path), within_s)

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
            "extensions": {INTERNAL_REQUEST: {}},
        }
        if self.host is not None:
            scope["app"] = self.host
        return scope


async def fetch_page(app: ASGIApp, scope: Scope, within_s: float = ANSWER_WITHIN_S) -> Page:
    """The app's response to a request without a body. Raises Unread, or TooSlow where it takes too long.

    A reverse proxy raises EngineUnreachable for these requests: its words say what is wrong with the connection.
    """
    response, asked = _Response(), f"{scope['method']} {scope['path']}"
    try:
        await asyncio.wait_for(app(scope, response.receive, response.send), within_s)
    except asyncio.TimeoutError:  # in Python 3.10 not yet the builtin TimeoutError
        raise TooSlow(f"{asked} was not answered within {within_s:g} s") from None
    except Unread:
        raise
    except EngineUnreachable as error:
        raise (NoAnswer if error.is_connected else NotConnected)(error.trouble) from None
    except AdmissionError as error:
        raise NoAnswer(f"{asked} failed: {error}") from None
    except Exception as error:
        raise Unread(f"{asked} failed: {type(error).__name__}: {error}") from error
    return response.page(asked)


class _Response:
    """Collects one response, as a client that does not disconnect."""

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
            raise NoAnswer(f"{asked} answered {self._status}: from a router before the engine")
        return Page(self._status, self._body.decode("utf-8", "replace"))
