"""Headers that the middleware adds to responses, and errors in the shape that the client's library expects.

The headers are the request's id, how it was admitted, and what its tenant has left. The `x-ratelimit-*` headers are
OpenAI's: the limit per minute, how much may come at once now, and the time until the whole limit may come at once
again. Durations are written as Go writes them (`6m0s`, `1.5s`, `100ms`), because OpenAI's clients parse that form.
Errors have OpenAI's shape, or Anthropic's.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from starlette.types import Message, Receive, Scope, Send

from sidecar.admission.intake import SizedRequest
from sidecar.apis import Api
from sidecar.errors import (
    AdmissionError,
    BodyTimeout,
    BodyTooLarge,
    InvalidHeader,
    RemainingLimits,
    TenantLimit,
    UnknownCoding,
)
from sidecar.events import Headers
from sidecar.pools import Grant, Lease

REQUEST_ID = b"x-request-id"
ADMISSION_ID = b"x-admission-id"
"""Holds the request's id where the app's response has an `x-request-id` of its own."""
ANTHROPIC_ID = b"request-id"
"""Header that Anthropic's clients read the request's id from."""

_MESSAGES = Api.MESSAGES  # looked up once: an enumeration's attribute costs as much as a call
_RANDOM_BITS = 0xFFFFFFFF_FFFF_0FFF_3FFF_FFFFFFFFFFFF
_VERSION_4 = 0x00000000_0000_4000_8000_000000000000
"""The bits of a UUID of version 4 (RFC 9562) that are random, and those that say so."""
_is_valid_id = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch
_NO_WAIT = ((b"x-admission-wait-ms", b"0"), (b"server-timing", b"admission;dur=0.0"))


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own id of the request, up to 128 visible ASCII characters; else a random one.

    That is a UUID of version 4: apps check ids that they are given.
    """
    own = headers.get(REQUEST_ID)
    if own is not None and _is_valid_id(own):
        return own.decode("ascii")
    return (random.getrandbits(128) & _RANDOM_BITS | _VERSION_4).to_bytes(16, "big").hex()


def id_headers(request_id: str, headers: Headers, api: Api) -> list[tuple[bytes, bytes]]:
    """The headers with the request's id, for a response of `api` that has `headers` already."""
    own, id_name = request_id.encode(), REQUEST_ID
    for name, _ in headers:  # costs half as much as a dictionary
        if name == REQUEST_ID:
            id_name = ADMISSION_ID
    named = [(id_name, own)]
    if api is _MESSAGES and ANTHROPIC_ID not in dict(headers):
        named.append((ANTHROPIC_ID, own))
    return named


def early_headers(
    request: SizedRequest, lease: Lease, tier_names: Sequence[bytes], request_id: str
) -> list[tuple[bytes, bytes]]:
    """The headers that are known while the request still waits."""
    named = id_headers(request_id, (), request.api)
    tier = (b"x-admission-tier", tier_names[request.classification.level])
    return [*named, tier, *differences(request, tier_names), *_limit_headers(request, lease, tier_names)]


def answer_headers(  # noqa: PLR0917  # names at the call would cost as much as the rest
    request: SizedRequest,
    lease: Lease,
    tier_names: Sequence[bytes],
    preemptions: int,
    request_id: str,
    headers: Headers,
) -> list[tuple[bytes, bytes]]:
    """How a request was admitted, what differs from what its client asked for, and its id. The app wrote `headers`."""
    grant, classification = lease.grant, request.classification
    assert grant is not None
    added = [(b"x-admission-tier", tier_names[classification.level])]
    if classification.clamped_from is not None or classification.ignored:
        added += differences(request, tier_names)
    if classification.risen_from is not None:
        added.append((b"x-admission-risen-from", tier_names[classification.risen_from]))
    added += wait_headers(grant)
    if preemptions:
        added.append((b"x-admission-preempted", b"%d" % preemptions))
    if grant.engine is not None:
        added.append((b"x-admission-engine", grant.engine.rpartition("#")[0].encode("latin-1", "replace")))
    if classification.downgraded_from is not None or request.output_cap is not None or lease.allowance is not None:
        added += _limit_headers(request, lease, tier_names)
    added += id_headers(request_id, headers, request.api)
    return added


def wait_headers(wait: Grant) -> Iterable[tuple[bytes, bytes]]:
    """How long the request waited, in milliseconds, and for how much of that it starved."""
    if not wait.queue_wait_us:
        return _NO_WAIT
    wait_ms, starved_ms = wait.queue_wait_us / 1000, wait.starvation_us / 1000
    timing = (
        b"admission;dur=%.3f, starved;dur=%.3f" % (wait_ms, starved_ms)
        if starved_ms
        else b"admission;dur=%.3f" % wait_ms
    )
    return (b"x-admission-wait-ms", b"%d" % wait_ms), (b"server-timing", timing)


def differences(request: SizedRequest, tier_names: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Headers for the parts of the client's own priority that did not count."""
    classification = request.classification
    headers = []
    if classification.clamped_from is not None:
        headers.append((b"x-admission-clamped-from", tier_names[classification.clamped_from]))
    if classification.ignored:
        headers.append((b"x-admission-ignored", ", ".join(classification.ignored).encode("latin-1", "replace")))
    return headers


def _limit_headers(request: SizedRequest, lease: Lease, tier_names: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    headers = []
    downgraded_from = request.classification.downgraded_from
    if downgraded_from is not None:
        headers.append((b"x-admission-downgraded-from", tier_names[downgraded_from]))
    if request.output_cap is not None:
        headers.append((b"x-admission-max-output-tokens", b"%d" % request.output_cap))
    if lease.allowance is not None:
        headers += allowance_headers(lease.allowance)
    return headers


def allowance_headers(allowance: RemainingLimits) -> Iterator[tuple[bytes, bytes]]:
    """Headers for what is left of a tenant's limits."""
    for name, remaining in ((b"requests", allowance.requests), (b"tokens", allowance.tokens)):
        if remaining is not None:
            yield b"x-ratelimit-limit-" + name, b"%d" % remaining.per_minute
            yield b"x-ratelimit-remaining-" + name, b"%d" % remaining.left
            yield b"x-ratelimit-reset-" + name, duration(remaining.reset_us)


def duration(us: int) -> bytes:
    """A duration as Go writes it, in milliseconds, rounded up: a client that waits for so long is never too early."""
    ms = -(-us // 1000)
    if 0 < ms < 1000:
        return b"%dms" % ms
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = (b"%g" % (ms / 1000)) + b"s"
    if hours:
        return b"%dh%dm" % (hours, minutes) + seconds
    return b"%dm" % minutes + seconds if minutes else seconds


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


async def send_json(scope: Scope, send: Send, body: bytes, request_id: str, *headers: tuple[bytes, bytes]) -> None:
    """Answers with JSON of our own, and a HEAD with its head alone."""
    own = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
    start_headers = [*own, *headers, (REQUEST_ID, request_id.encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": start_headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


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
    """True if the clients of `path` expect errors in Anthropic's shape."""
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


def refusal_headers(error: AdmissionError, waited: Grant | None, *, is_cut: bool) -> list[tuple[bytes, bytes]]:
    """Headers of a refusal, perhaps after a wait. `is_cut`: the server stops, and the request gets no other answer."""
    # The rest of an unread body is not read: the connection ends with the response.
    closes = is_cut or isinstance(error, BodyTimeout | BodyTooLarge | InvalidHeader)
    headers = [(b"connection", b"close")] if closes else []
    if isinstance(error, TenantLimit):
        headers += allowance_headers(error.allowance)
    if isinstance(error, UnknownCoding):
        headers.append((b"accept-encoding", error.known.encode("ascii")))
    if waited is not None:
        headers += wait_headers(waited)
    return headers
