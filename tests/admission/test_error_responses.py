"""Error responses as a client's library reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.admission.responses import send_error
from sidecar.errors import (
    AdmissionError,
    BodyTimeout,
    BodyTooLarge,
    EngineUnreachable,
    InvalidApiKey,
    InvalidBody,
    QueueFull,
    RequestTooLarge,
    UnknownTier,
)
from tests.support.each import each

pytestmark = pytest.mark.anyio


async def sent(error: AdmissionError, **how: Any) -> tuple[int, dict[bytes, bytes], Any]:
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await send_error(send, error, **how)
    start, body = messages
    assert body == {"type": "http.response.body", "body": body["body"], "more_body": False}
    headers = dict(start["headers"])
    assert len(headers) == len(start["headers"])
    assert headers[b"content-length"] == b"%d" % len(body["body"])
    return start["status"], headers, json.loads(body["body"])


async def test_an_openai_client_gets_its_error_object() -> None:
    status, headers, body = await sent(UnknownTier('"gold" is no tier'))
    assert status == 400
    assert headers[b"content-type"] == b"application/json"
    assert body == {
        "error": {
            "message": '"gold" is no tier',
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_tier",
        }
    }


def of(error: AdmissionError, *, never_fits: bool = False) -> AdmissionError:
    error.never_fits = never_fits
    return error


@each(
    ("error", "seconds", "milliseconds", "should_retry"),
    [
        # Whole seconds are rounded up, and never zero. A 503 is tried again anyway.
        (QueueFull("full", retry_after_s=0.0), b"1", b"1", None),
        (QueueFull("full", retry_after_s=0.2), b"1", b"200", None),
        (QueueFull("full", retry_after_s=1.0), b"1", b"1000", None),
        (QueueFull("full", retry_after_s=1.00001), b"2", b"1001", None),
        (QueueFull("full", retry_after_s=59.9), b"60", b"59900", None),
        *((error("no"), None, None, b"false") for error in (RequestTooLarge, InvalidBody, InvalidApiKey, BodyTooLarge)),
        (of(QueueFull("full", retry_after_s=1), never_fits=True), None, None, b"false"),
        (BodyTimeout("slow"), None, None, None),
        (EngineUnreachable("gone"), None, None, None),
    ],
)
async def test_a_client_is_told_when_to_try_again_and_when_never(
    error: AdmissionError, seconds: bytes | None, milliseconds: bytes | None, should_retry: bytes | None
) -> None:
    _, headers, _ = await sent(error)
    assert headers.get(b"retry-after") == seconds
    assert headers.get(b"retry-after-ms") == milliseconds
    assert headers.get(b"x-should-retry") == should_retry


async def test_a_401_says_how_to_authenticate() -> None:
    _, headers, body = await sent(InvalidApiKey("no such key"))
    assert headers[b"www-authenticate"] == b"Bearer"
    assert body["error"]["type"] == "authentication_error"
