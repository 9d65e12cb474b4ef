"""Error responses in the shape that the client's library expects: OpenAI's, or Anthropic's."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import msgspec
from starlette.types import Message, Receive, Send

from sidecar.admission.response_headers import ANTHROPIC_ID, REQUEST_ID
from sidecar.errors import AdmissionError
from sidecar.events import Headers

# Anthropic's own names, by status; every other status is `api_error`.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# The client's mistakes: the same request gets the same response again.
_NEVER_HELPED = {400, 401, 404, 413, 415, 426}


async def send_error(
    send: Send,
    error: AdmissionError,
    *,
    anthropic: bool = False,
    request_id: str | None = None,
    headers: Headers = (),
) -> None:
    """Answers a request with `error`. Nothing may have been sent for it before.

    `anthropic` selects the body's shape (see `speaks_anthropic`). `request_id` is sent as `x-request-id`, and to
    Anthropic's clients as `request-id` too. `headers` are added unchanged: lower-case names, and none that is written
    here.
    """
    body = msgspec.json.encode(_anthropic_body(error, request_id)) if anthropic else error_body(error)
    start_headers = [*error_headers(error, len(body), request_id), *headers]
    if anthropic and request_id is not None:
        start_headers.append((ANTHROPIC_ID, request_id.encode("latin-1")))
    await send({"type": "http.response.start", "status": error.status, "headers": start_headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(
    send: Send,
    error: AdmissionError,
    receive: Receive,
    most_s: float,
    *,
    is_body_left: bool,
    anthropic: bool,
    request_id: str,
    headers: Headers,
) -> None:
    """Answers a request, and reads the rest of a body that is left, for at most `most_s`: see `discard_body`."""
    if not is_body_left:
        await send_error(send, error, anthropic=anthropic, request_id=request_id, headers=headers)
        return

    async def send_and_go_on(message: Message) -> None:
        # At the end of a response the server closes the connection, and a client that still sends loses the response.
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await send_error(send_and_go_on, error, anthropic=anthropic, request_id=request_id, headers=headers)
    await discard_body(receive, most_s)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def discard_body(receive: Receive, most_s: float) -> None:
    """Reads and drops the body for at most `most_s`: most clients read no response before they have sent everything."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_read_to_end(receive), most_s)


async def _read_to_end(receive: Receive) -> None:
    message = await receive()
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()


def speaks_anthropic(path: str) -> bool:
    """Whether the clients of `path` expect errors in Anthropic's shape."""
    return path.endswith("/v1/messages") or "/v1/messages/" in path


def error_body(error: AdmissionError) -> bytes:
    """The body in OpenAI's shape."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
    )


def _anthropic_body(error: AdmissionError, request_id: str | None) -> dict[str, object]:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    body: dict[str, object] = {
        "type": "error",
        "error": {"type": kind, "message": error.message, "code": error.code},
    }
    return body if request_id is None else {**body, "request_id": request_id}


def error_headers(error: AdmissionError, length: int, request_id: str | None) -> list[tuple[bytes, bytes]]:
    """The headers of a response with `length` bytes of body."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    headers += _retry_headers(error)
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif error.status == 426:  # RFC 9110, sections 15.5.22 and 7.8
        headers += [(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")]
    if request_id is not None:
        headers.append((REQUEST_ID, request_id.encode("latin-1")))
    return headers


def _retry_headers(error: AdmissionError) -> list[tuple[bytes, bytes]]:
    """When the client should try again, or that it should not. Without these, its library decides by the status.

    OpenAI's and Anthropic's clients read `retry-after-ms` before `retry-after`. They retry a 408, a 429 and every 5xx
    by themselves, so those need no `x-should-retry: true`.
    """
    if error.never_fits or error.status in _NEVER_HELPED:
        return [(b"x-should-retry", b"false")]
    if error.retry_after_s is None:
        return []
    # Rounded up, and never 0: clients take 0 as "at once" and come back in a tight loop.
    seconds, milliseconds = math.ceil(error.retry_after_s), math.ceil(error.retry_after_s * 1000)
    return [(b"retry-after", b"%d" % max(1, seconds)), (b"retry-after-ms", b"%d" % max(1, milliseconds))]
