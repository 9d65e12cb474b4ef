"""SSE keepalive: a response that begins while its request waits, so that the connection does not look idle.

Load balancers and clients give up on a connection that stays silent for about a minute. A stream of server-sent events
may begin with comments (lines that start with a colon), which every client skips. The status, 200, is sent before the
request's outcome is known. So a response that is no stream of events, above all an error, is sent as one event, in the
form from which the client's library raises its own error.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.types import Message, Send

from sidecar.apis import Api
from sidecar.events import Headers

EVENTS = b"text/event-stream"
LONGEST_ERROR = 64 * 1024
"""Bytes of an error's body that are passed on in an event; real ones have a few hundred."""

_HEADERS: Headers = (
    (b"content-type", EVENTS),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the comments otherwise
)
STREAMING = frozenset((Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES))
"""The APIs whose responses are streams of events where a request says `stream`."""


class SseKeepAlive:
    """An ASGI `send` for the rest of a response that has begun with comments. `headers` are added to its head.

    A response that is sent through it continues the same stream: events unchanged, and any other body as one event,
    an error event where its status says so.
    """

    __slots__ = ("_api", "_body", "_has_begun", "_headers", "_passes", "_send", "_status")

    def __init__(self, send: Send, api: Api, headers: Headers) -> None:
        self._send = send
        self._api = api
        self._headers = headers
        self._has_begun = False
        self._status = 200
        self._passes = False
        self._body = bytearray()

    async def comment(self, text: str) -> None:
        """Sends a line that clients skip; the first one sends the response's head before it."""
        if not self._has_begun:
            self._has_begun = True
            head = [*_HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._send(_body(f": {text}\n\n".encode(), more=True))

    async def __call__(self, message: Message) -> None:
        """See ASGI's `send`."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._passes = self._status < 400 and is_stream(message.get("headers", ()))
        elif message["type"] != "http.response.body" or self._passes:
            await self._send(message)
        else:
            self._body += message.get("body", b"")[: LONGEST_ERROR - len(self._body)]
            if not message.get("more_body", False):
                await self._send(_body(self._event(bytes(self._body)), more=False))

    async def break_off(self) -> None:
        """Reports that the app failed before it answered, and leaves the end of the response to the server."""
        if not self._passes:
            self._status = 500
            await self._send(_body(self._event(b""), more=True))

    def _event(self, body: bytes) -> bytes:
        if self._status < 400:
            return b"".join(b"data: %s\n" % line for line in body.splitlines()) + b"\n"
        event = _error(self._api, _object(body), self._status)
        name = b"" if self._api in (Api.CHAT, Api.COMPLETIONS) else b"event: error\n"
        return b"%sdata: %s\n\n" % (name, msgspec.json.encode(event))


def _error(api: Api, body: dict[str, object], status: int) -> dict[str, object]:
    """An error's body as the event that the API's clients know. Without a body it is made from the status."""
    error = body.get("error")
    if not isinstance(error, dict):
        said = body.get("message") or body.get("detail") or _phrase(status)
        error = {"message": str(said), "type": "server_error", "code": status}
    if api is Api.MESSAGES:
        return {"type": "error", "error": {"type": "api_error", **error}}
    if api is Api.RESPONSES:  # flat in the API's own event; its clients also read `error`, as everywhere else
        flat = {name: error[name] for name in ("code", "message", "param") if name in error}
        return {"type": "error", "sequence_number": 0, "param": None, **flat, "error": error}
    return {"error": error}


def _object(body: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = body.decode("utf-8", "replace").strip()
        return {"message": text} if text else {}


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"status {status}"


def is_stream(headers: Headers) -> bool:
    """Whether a response's headers say that it is a stream of events."""
    return any(name.lower() == b"content-type" and value.lower().startswith(EVENTS) for name, value in headers)


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
