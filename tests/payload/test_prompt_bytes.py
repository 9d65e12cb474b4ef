"""The bytes of a prompt: what is the same prompt to an engine is the same here, and nothing else is."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sidecar.apis import Api
from sidecar.errors import InvalidBody
from sidecar.payload.decode import MEDIA_TOKENS, decode
from sidecar.payload.prompt_bytes import (
    LONGEST_DECODED,
    LONGEST_NAME,
    LONGEST_READ,
    NO_PROMPT,
    PromptBytes,
    prompt_bytes,
)
from tests.support.each import each


def read(api: Api = Api.CHAT, /, **fields: Any) -> PromptBytes:
    return prompt_bytes(api, json.dumps(fields).encode())


def chat(*turns: tuple[str, Any], **fields: Any) -> PromptBytes:
    return read(messages=[{"role": role, "content": content} for role, content in turns], **fields)


def test_the_next_turn_of_a_conversation_begins_with_the_last_one() -> None:
    first = chat(("system", "be brief"), ("user", "why?"))
    second = chat(("system", "be brief"), ("user", "why?"), ("assistant", "because"), ("user", "and?"))
    assert second.data.startswith(first.data)
    assert second.root == first.root
    assert first.data == b"system\0be brief\0user\0why?"


@each(
    "other",
    [
        [{"role": "user", "content": [{"type": "text", "text": "why?"}]}],
        [{"content": "why?", "role": "user"}],
        [{"role": "user", "content": [{"type": "text", "text": "why?", "cache_control": {"type": "ephemeral"}}]}],
        [{"role": "user", "content": "why?", "cache_control": {"type": "ephemeral"}}],
    ],
)
def test_one_text_is_the_same_in_every_shape(other: list[Any]) -> None:
    assert read(messages=other).data == chat(("user", "why?")).data


def test_escapes_and_spaces_of_the_json_change_nothing() -> None:
    messages = [{"role": "user", "content": "größe\n"}]
    bodies = [
        json.dumps({"messages": messages}, ensure_ascii=is_ascii, indent=indent).encode()
        for is_ascii in (True, False)
        for indent in (None, 2)
    ]
    assert len({prompt_bytes(Api.CHAT, body).data for body in bodies}) == 1


@each(
    "other",
    [
        chat(("assistant", "why?")),
        chat(("user", "why!")),
        chat(("user", "why?"), tools=[{"type": "function"}]),
        read(messages=[{"role": "user", "content": "why?", "name": "ann"}]),
        read(messages=[{"role": "user", "content": "why?", "tool_calls": [{"id": "1"}]}]),
    ],
)
def test_another_role_text_tool_or_name_is_another_prompt(other: PromptBytes) -> None:
    assert other.data != chat(("user", "why?")).data


def test_tools_and_the_system_come_first() -> None:
    message = [{"role": "user", "content": "hi"}]
    found = read(Api.MESSAGES, messages=message, system=[{"type": "text", "text": "sys"}], tools=[{"name": "t"}])
    assert found.data == b'[{"name": "t"}]\0sys\0user\0hi'
    found = read(Api.RESPONSES, input="hi", instructions="sys")
    assert found.data == b"sys\0hi"
    assert read(Api.RESPONSES, input=[{"type": "message", "role": "user", "content": "hi"}]).data == b"user\0hi"


def test_model_salt_and_kind_of_api_separate_prompts() -> None:
    roots = {
        chat(("user", "x"), **fields).root
        for fields in ({}, {"model": "m"}, {"model": "lora"}, {"model": "m", "cache_salt": "a"}, {"extra_key": "a"})
    }
    assert len(roots) == 5
    assert read(Api.COMPLETIONS, prompt="x").root != chat(("user", "x")).root


def test_a_medium_has_the_size_that_its_tokens_would_have_as_text() -> None:
    def image(data: str) -> bytes:
        parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": data}}]
        return chat(("user", parts)).data

    small, large = image("data:image/png;base64,AAAA"), image("data:image/png;base64," + "B" * 100_000)
    assert len(small) == len(large) == len(b"user\0see\0") + MEDIA_TOKENS * 4
    assert small != large
    assert small == image("data:image/png;base64,AAAA")


def test_completions_are_their_text_or_their_list_as_it_was_sent() -> None:
    assert read(Api.COMPLETIONS, prompt="a\nb").data == b"a\nb"
    ids = read(Api.COMPLETIONS, prompt=[1, 2, 3])
    assert ids.data == b"[1, 2, 3]"
    assert ids.is_single
    for several in (["a", "b"], [[1], [2]]):
        assert not read(Api.COMPLETIONS, prompt=several).is_single


def test_pooling_requests_have_no_prefix() -> None:
    assert read(Api.EMBEDDINGS, input="x" * 1_000) is NO_PROMPT


@each("value", [None, 7, True, [], ["x"], {"a": 1}, "", "k" * (LONGEST_NAME + 1), "k" * 10**5])
def test_a_cache_key_that_is_no_short_string_is_none(value: Any) -> None:
    found = chat(("user", "x"), prompt_cache_key=value, cache_salt=value)
    assert found.cache_key is None
    assert found.data == b"user\0x"
    hash(found.root)


def test_a_cache_key_is_read() -> None:
    assert chat(("user", "x"), prompt_cache_key="ann").cache_key == "ann"


@each("size", [LONGEST_DECODED, LONGEST_READ, 8 * LONGEST_READ])
def test_a_long_body_is_taken_as_it_was_sent_and_only_its_beginning(size: int) -> None:
    found = chat(("user", "x" * size), model="m")
    assert len(found.data) == min(LONGEST_READ, found.size)
    assert found.size >= size
    assert found.data.startswith(b'"messages": [{"role": "user"')
    longer = chat(("user", "x" * size), ("assistant", "y"), model="m")
    assert longer.root == found.root
    assert longer.data[:size] == found.data[:size]


@each("size", [10, LONGEST_DECODED])
@each("name", ["cache_salt", "extra_key", "model"])
def test_prompts_of_other_salts_share_nothing_however_long_they_are(name: str, size: int) -> None:
    text = [{"role": "user", "content": "x" * size}]
    salts = ("one", "other", "x" * 300 + "one", "x" * 300 + "other")
    first = [read(**{name: salt, "messages": text}).root for salt in salts]
    last = [read(**{"messages": text, name: salt}).root for salt in salts]
    assert first == last
    assert len({*first, read(messages=text).root}) == 5


def test_a_long_body_whose_prompt_is_nowhere_near_its_beginning_has_none() -> None:
    body = json.dumps({"metadata": {"x": "y" * LONGEST_DECODED}, "messages": [{"role": "user", "content": "x"}]})
    assert prompt_bytes(Api.CHAT, body.encode()) is NO_PROMPT


def test_the_name_of_the_prompts_field_inside_a_text_is_not_taken_for_it() -> None:
    quoted = 'say "messages" now'
    found = read(metadata={"q": quoted}, messages=[{"role": "user", "content": "x" * LONGEST_DECODED}])
    assert found.data.startswith(b'"messages": [')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "cache_control", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["messages", "input", "prompt", "system", "instructions", "tools", "model", "cache_salt", "prompt_cache_key"]
    ),
    JSON,
    max_size=6,
)


@given(st.sampled_from(list(Api)), FIELDS)
def test_no_body_breaks_it(api: Api, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    with suppress(InvalidBody):  # such a body never comes here, and must do no harm all the same
        decode(api, body)
    found = prompt_bytes(api, body)
    hash(found.root)
    assert len(found.data) <= found.size


@each(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":[1e999,' + b"9" * 400 + b',"\\ud800",null,true,{"role":null,"content":5}]}',
        b'{"messages":["\xff"]}',
        b'{"prompt":"\\ud800"}',
        b'{"messages":[{"type":{},"content":{"type":[]}}]}',
        b'{"messages":[{"role":"user","type":["image"]}]}',
    ],
)
def test_what_cannot_be_read_has_no_bytes_and_raises_nothing(body: bytes) -> None:
    for api in Api:
        assert isinstance(prompt_bytes(api, body), PromptBytes)
