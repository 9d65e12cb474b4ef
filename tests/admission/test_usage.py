"""What a response cost is read as it passes, however it is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.admission.usage import LONGEST, READ_BYTES, UsageReader
from sidecar.events import Settled
from tests.support.each import each
from tests.support.middleware import SMALL, App, Caller, Guarded, policy

Reader = TypeVar("Reader", bound=UsageReader)

OPENAI = {
    "prompt_tokens": 12,
    "completion_tokens": 34,
    "total_tokens": 46,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
NAMED = {"input_tokens": 12, "output_tokens": 34}


def fed(reader: Reader, pieces: Iterable[bytes]) -> Reader:
    for piece in pieces:
        reader.feed(piece)
    reader.read()
    return reader


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


RESPONSES = {
    "one JSON": json.dumps({"choices": [{"message": {"content": "x" * 500}}], "usage": OPENAI}).encode(),
    "spaced": json.dumps({"usage": OPENAI, "id": "1"}, indent=4).encode(),
    "stream": b"".join([event({"usage": None, "choices": [1]})] * 5 + [event({"choices": [], "usage": OPENAI})]),
    "continuous": b"".join(event({"usage": {**OPENAI, "completion_tokens": count}}) for count in range(1, 35)),
    "responses": event({"type": "response.completed", "response": {"usage": NAMED}}),
    "messages": event({"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 1}}})
    + event({"type": "content_block_delta", "delta": {"text": "hi"}})
    + event({"type": "message_delta", "usage": {"output_tokens": 34}}),
    "in a text": event({"choices": [{"delta": {"content": '"usage": {"prompt_tokens": 9}'}}]})
    + event({"usage": OPENAI}),
    "a member of that name that is none": event({"usage": "much"}) + event({"usage": OPENAI}),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_usage_is_found_wherever_an_engine_puts_it_and_the_response_is_cut(name: str) -> None:
    body = RESPONSES[name]
    for cut in range(len(body)):
        reader = fed(UsageReader(), (body[:cut], body[cut:]))
        assert (reader.input_tokens, reader.output_tokens) == (12, 34), cut


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"choices":[]}',
        b'{"usage":null}',
        b'{"usage":{"prompt_tokens":"many","completion_tokens":[]}}',
        b'{"usage":{"prompt_tokens":12,"completion_tokens":',
        b'{"content":"\\"usage\\": {\\"prompt_tokens\\": 9}"}',
        b'{"usage":{{{{{',
        b"\x00\xff" * 100,
    ],
)
def test_where_there_is_none_nothing_is_made_up(body: bytes) -> None:
    reader = fed(UsageReader(), [body])
    assert (reader.input_tokens, reader.output_tokens) == (None, None)


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b'"usage"', b":", b"{", b"}", b'{"a":', b" "]), max_size=30))
def test_no_response_breaks_it_and_little_is_kept(pieces: list[bytes]) -> None:
    reader = UsageReader()
    for piece in pieces:
        reader.feed(piece)
        assert len(reader._carried) <= LONGEST + 40
        assert len(reader._unread) < READ_BYTES


def test_the_usage_of_a_whole_answer_is_its_own_and_not_one_that_a_part_of_it_repeats() -> None:
    """A tool's arguments that are an object may have any member."""
    repeated = {"usage": {"prompt_tokens": 999, "completion_tokens": 999}}
    body = json.dumps({"choices": [{"message": {"tool": repeated}}], "usage": OPENAI}).encode()
    reader = fed(UsageReader(), [body])
    assert (reader.input_tokens, reader.output_tokens) == (12, 34)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\xff", "usage": {"prompt_tokens": 12, "completion_tokens": 34}}',
        b'{"usage": {"prompt_tokens": 12, "completion_tokens": 34}} and more',
        b'{"a": [1, 2, "usage": {"prompt_tokens": 12, "completion_tokens": 34}',
        b"{" * 5000 + b'"usage": {"prompt_tokens": 12, "completion_tokens": 34}',
    ],
)
def test_the_usage_of_an_answer_that_is_no_json_is_found_all_the_same(body: bytes) -> None:
    reader = fed(UsageReader(), [body])
    assert (reader.input_tokens, reader.output_tokens) == (12, 34)


def test_a_usage_without_end_is_given_up() -> None:
    reader = UsageReader()
    reader.feed(b'{"usage":{"x":"')
    for _ in range(1000):
        reader.feed(b"y" * 1000)
    assert len(reader._carried) <= LONGEST


WRITTEN = {
    "whole numbers": (OPENAI, (12, 34)),
    "floats": ({"prompt_tokens": 12.0, "completion_tokens": 34.0}, (12, 34)),
    "strings": ({"input_tokens": "12", "output_tokens": "34"}, (12, 34)),
    "a string beside one that is none": ({"input_tokens": "12", "output_tokens": "many"}, (12, None)),
    "the total alone": ({"total_tokens": 12}, (12, None)),
    "one that is none beside one that is": ({"prompt_tokens": "many", "completion_tokens": 34}, (None, 34)),
    **{
        repr(garbage): (dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), garbage), (None, None))
        for garbage in (-12, 10.5, 1e300, 10**40, 2**41, True, "-1", "", "9" * 99, "\u0663", [12], {"a": 1})
    },
}


@each("name", WRITTEN)
def test_a_count_is_read_however_it_is_written_and_garbage_is_not(name: str) -> None:
    usage, expected = WRITTEN[name]
    for body in (json.dumps({"usage": usage}).encode(), event({"response": {"usage": usage}})):
        reader = fed(UsageReader(), [body])
        assert (reader.input_tokens, reader.output_tokens) == expected


ANTHROPIC = {"input_tokens": 4, "output_tokens": 34, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 2}
CACHED = {
    "chat": ({"usage": OPENAI}, 12, 8),
    "responses": ({"usage": {**NAMED, "input_tokens_details": {"cached_tokens": 5}}}, 12, 5),
    "messages": ({"usage": ANTHROPIC}, 12, 6),
    "without details": ({"usage": NAMED}, 12, None),
    "null details": ({"usage": {**NAMED, "prompt_tokens_details": None}}, 12, None),
    "null in details": ({"usage": {**NAMED, "prompt_tokens_details": {"cached_tokens": None, "x": [1]}}}, 12, None),
    "details of another kind": ({"usage": {**NAMED, "prompt_tokens_details": "many"}}, 12, None),
    "a count of another kind": ({"usage": {**NAMED, "prompt_tokens_details": {"cached_tokens": [8]}}}, 12, None),
    "below zero": ({"usage": {**OPENAI, "prompt_tokens_details": {"cached_tokens": -3}}}, 12, None),
    "a gateway's of both kinds": ({"usage": {**OPENAI, "cache_read_input_tokens": 8}}, 12, 8),
    "nested details": ({"usage": {**NAMED, "input_tokens_details": {"cached_tokens": 5, "by": {"host": 1}}}}, 12, 5),
    "null parts": ({"usage": {**NAMED, "cache_read_input_tokens": None, "cache_creation_input_tokens": 0}}, 12, None),
    "no usage": ({}, None, None),
}


@pytest.mark.parametrize("name", CACHED)
def test_cached_tokens_are_read_from_every_apis_own_field(name: str) -> None:
    body, prompt_tokens, cached_tokens = CACHED[name]
    for data in (json.dumps(body).encode(), event({"usage": None}) + event(body)):
        for pieces in ([data], [bytes([byte]) for byte in data]):
            reader = fed(UsageReader(), pieces)
            assert (reader.input_tokens, reader.cached_tokens) == (prompt_tokens, cached_tokens)


def test_a_messages_stream_says_it_first_and_its_end_does_not_take_it_back() -> None:
    first = event({"type": "message_start", "message": {"usage": {**ANTHROPIC, "output_tokens": 1}}})
    last = event({"type": "message_delta", "usage": {"output_tokens": 34}})
    reader = fed(UsageReader(), (first, last))
    assert (reader.input_tokens, reader.cached_tokens, reader.output_tokens) == (12, 6, 34)


@pytest.mark.anyio
@each(
    "usage",
    [
        {"prompt_tokens": 30, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 28}},
        {"input_tokens": 2, "output_tokens": 5, "cache_read_input_tokens": 28, "cache_creation_input_tokens": 0},
    ],
)
async def test_an_engines_own_count_of_the_whole_prompt_teaches_the_estimator(usage: Any) -> None:
    guarded = Guarded(App(answer=json.dumps({"usage": usage}).encode()), policy())
    for _ in range(3):
        await Caller(guarded.sidecar, SMALL).run()
    first, _, last = (story.events[0].tokens for story in guarded.recorder.stories)  # type: ignore[union-attr]
    assert last > first  # the engine counts more than a token per four bytes
    settled = guarded.recorder.stories[0].one(Settled)
    assert (settled.tokens_used, settled.input_tokens, settled.output_tokens) == (35, 30, 5)
    assert settled.cached_tokens == 28
