"""Error responses as a client's library reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.admission.responses import send_error, speaks_anthropic
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


async def test_an_anthropic_client_gets_its_own_error_object_with_our_code() -> None:
    _, _, body = await sent(QueueFull("full"), anthropic=True)
    assert body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "full", "code": "queue_full"},
    }


async def test_an_anthropic_error_names_the_request() -> None:
    _, headers, body = await sent(BodyTooLarge("too large"), anthropic=True, request_id="r1")
    assert body["request_id"] == "r1"
    assert body["error"]["type"] == "request_too_large"
    assert headers[b"x-request-id"] == b"r1"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (90, b"90")])
async def test_retry_after_is_whole_seconds_rounded_up_and_never_zero(seconds: float, header: bytes) -> None:
    _, headers, _ = await sent(QueueFull("full", retry_after_s=seconds))
    assert headers[b"retry-after"] == header


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, b"1"), (0.2, b"200"), (1.0, b"1000"), (1.00001, b"1001"), (59.9, b"59900")]
)
async def test_retry_after_ms_is_exact_rounded_up_and_never_zero(seconds: float, header: bytes) -> None:
    _, headers, _ = await sent(QueueFull("full", retry_after_s=seconds))
    assert headers[b"retry-after-ms"] == header
    assert b"x-should-retry" not in headers  # clients try a 503 again by themselves


@pytest.mark.parametrize("error", [RequestTooLarge, InvalidBody, InvalidApiKey, BodyTooLarge])
async def test_what_no_retry_helps_says_so(error: type[AdmissionError]) -> None:
    _, headers, _ = await sent(error("no"))
    assert headers[b"x-should-retry"] == b"false"
    assert b"retry-after" not in headers


async def test_what_can_never_fit_says_so_whatever_its_status() -> None:
    error = QueueFull("full", retry_after_s=1)
    error.never_fits = True
    _, headers, _ = await sent(error)
    assert headers[b"x-should-retry"] == b"false"
    assert b"retry-after" not in headers


@pytest.mark.parametrize("error", [BodyTimeout("slow"), EngineUnreachable("gone")])
async def test_what_a_retry_may_help_is_left_to_the_client(error: AdmissionError) -> None:
    _, headers, _ = await sent(error)
    assert b"x-should-retry" not in headers


async def test_retry_after_is_left_out_where_a_retry_cannot_help() -> None:
    _, headers, _ = await sent(BodyTooLarge("too large"))
    assert b"retry-after" not in headers


async def test_a_401_says_how_to_authenticate() -> None:
    _, headers, body = await sent(InvalidApiKey("no such key"))
    assert headers[b"www-authenticate"] == b"Bearer"
    assert body["error"]["type"] == "authentication_error"


async def test_other_headers_are_added() -> None:
    _, headers, _ = await sent(QueueFull("full"), headers=[(b"x-admission-tier", b"batch")])
    assert headers[b"x-admission-tier"] == b"batch"


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/chat/completions", False), ("/", False)],
)
def test_anthropic_paths_are_known(path: str, expected: bool) -> None:
    assert speaks_anthropic(path) is expected
