"""What a client reads from an answer's bytes, however the network cuts them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tools.loadgen.connection import MOST_BYTES, ClientAnswer, read_problem

STREAM = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
DONE = b"data: [DONE]\n\n"


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    return event(id="chatcmpl-7", choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


ROLE = delta(role="assistant", content="")
USAGE = event(id="chatcmpl-7", choices=[], usage={"prompt_tokens": 9, "completion_tokens": 31})
CHAT = [ROLE, delta(content="Hel"), delta(content="lo"), delta("length", content="!"), DONE]


def read(
    pieces: Sequence[bytes], status: int = 200, headers: dict[str, str] = STREAM, *, in_order: bool = True
) -> ClientAnswer:
    """Feeds the pieces at 0, 1, 2, … seconds."""
    answer = ClientAnswer(status, headers)
    for moment, piece in enumerate(pieces):
        answer.feed(piece, float(moment))
    answer.end(in_order=in_order)
    return answer


def test_the_first_token_is_the_first_event_with_text_not_the_one_with_the_role() -> None:
    answer = read(CHAT)
    assert (answer.first_token_s, answer.error) == (1.0, None)
    assert (answer.output_tokens, answer.request_id, answer.text) == (3, "chatcmpl-7", "Hello!")


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_thinking_is_text_too(field: str) -> None:
    assert read([ROLE, delta(**{field: "hm"}), delta(content="x"), DONE]).first_token_s == 1.0


def test_a_token_that_is_half_a_character_counts_though_its_text_is_empty() -> None:
    answer = read([ROLE, delta(content=""), delta(content="é"), delta("length"), DONE])
    assert (answer.first_token_s, answer.output_tokens) == (1.0, 2)


def test_a_role_in_every_chunk_hides_no_text() -> None:
    answer = read([ROLE, ROLE, delta(role="assistant", content="a"), delta("stop", role="assistant"), DONE])
    assert (answer.first_token_s, answer.output_tokens) == (2.0, 1)


def test_an_answer_that_ended_with_its_first_token_has_had_one() -> None:
    answer = read([ROLE, delta("stop"), DONE])
    assert (answer.error, answer.first_token_s) == (None, 0.0)


def test_text_completions_have_their_text_elsewhere() -> None:
    chunks = [event(choices=[{"index": 0, "text": text, "finish_reason": None}]) for text in (" a", " b")]
    answer = read([*chunks, DONE])
    assert (answer.first_token_s, answer.output_tokens, answer.text) == (0.0, 2, " a b")


def test_usage_counts_better_than_events() -> None:
    answer = read([*CHAT[:-1], USAGE, DONE])
    assert (answer.output_tokens, answer.prompt_tokens) == (31, 9)


@given(st.lists(st.integers(0, 2000), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int], newline: bytes) -> None:
    whole = b"".join([b": a comment\n\n", b"event: x\nid: 3\n", *CHAT[:-1], USAGE, DONE]).replace(b"\n", newline)
    places = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
    answer = read([whole[start:end] for start, end in pairwise(places)])
    assert (answer.error, answer.text, answer.output_tokens, answer.prompt_tokens) == (None, "Hello!", 31, 9)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"error": {"object": "error", "message": "The request queue is full.", "code": 503}},
            "503: The request queue",
        ),
        ({"object": "error", "message": "The request queue is full.", "code": 503}, "503: The request queue is full."),
        ({"error": "no such\nmodel"}, "no such model"),
        ({"error": {"message": "queue full", "code": "queue_full"}}, "queue_full: queue full"),
        ({"detail": [{"loc": ["body"], "msg": "Field required"}]}, '[{"loc":["body"],"msg":"Field required"}]'),
    ],
)
def test_an_error_is_an_error_in_a_stream_under_200_and_with_a_status(body: dict[str, Any], said: str) -> None:
    assert (read([event(**body), DONE]).error or "").startswith(said)
    assert (read([ROLE, delta(content="a"), event(**body), DONE]).error or "").startswith(said)
    whole = read([json.dumps(body).encode()], 503, JSON)
    assert (whole.error or "").startswith(f"HTTP 503: {said.removeprefix('503: ')}")


def test_a_stream_that_ends_before_its_answer_did_is_a_failure() -> None:
    assert read(CHAT[:2]).error == "the stream ended before the answer was complete"
    assert read(CHAT[:-1]).error is None  # the finish reason came: some proxies eat the last line
    assert read([]).error is not None


def test_a_connection_that_broke_is_a_failure() -> None:
    assert read(CHAT[:3], in_order=False).error == "the connection was closed in the middle of the answer"


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: nonsense\n\n", b"data: " + b"[" * 100_000 + b"\n\n"])
def test_an_event_that_is_no_json_is_a_failure_and_shown(data: bytes) -> None:
    error = read([data, DONE]).error or ""
    assert error.startswith("an event of the answer cannot be read: ")
    assert len(error) < 400


def test_an_event_without_an_end_is_not_collected_forever() -> None:
    answer = ClientAnswer(200, STREAM)
    for _ in range(5):
        answer.feed(b"x" * (MOST_BYTES // 4), 0.0)
    assert "longer than" in (answer.error or "")


def test_an_answer_in_one_piece_has_no_first_token_but_usage_and_an_id() -> None:
    body = {
        "id": "chatcmpl-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    answer = read([json.dumps(body).encode()], 200, JSON)
    assert (answer.error, answer.first_token_s, answer.output_tokens, answer.prompt_tokens) == (None, None, 1, 3)
    assert (answer.request_id, answer.text) == ("chatcmpl-1", "Hi")


@pytest.mark.parametrize("body", [b"", b"<html>502 Bad Gateway</html>", b"[1]", b'"text"', b"\xff\xfe"])
def test_a_success_that_is_no_json_object_is_a_failure(body: bytes) -> None:
    assert "no JSON object" in (read([body], 200, JSON).error or "")


@pytest.mark.parametrize("body", [b"", b"<html>busy</html>", b"[1]", b"\xff" * 2000])
def test_an_error_status_needs_no_json(body: bytes) -> None:
    error = read([body], 502, {"content-type": "text/html"}).error or ""
    assert error.startswith("HTTP 502")
    assert len(error) < 400


@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_it_raise(data: bytes) -> None:
    for headers in (STREAM, JSON):
        read([data], 200, headers)
        read([b"data: " + data + b"\n\n"], 200, headers)
    read_problem(data)
