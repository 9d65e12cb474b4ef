"""Where each API keeps its prompt and its maximum output, and what becomes of bodies that are no requests."""

from __future__ import annotations

import base64
import gc
import json
import re
import time
from array import array
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.apis import Api
from sidecar.errors import InvalidBody
from sidecar.lengths.token_estimates import Estimator
from sidecar.payload.decode import LARGEST_COUNT, MEDIA_TOKENS, Payload, decode
from tests.support.each import each

CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, GENERIC = Api
HELLO = [{"role": "user", "content": "Hello"}]
SMALLEST: dict[Api, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hello"},
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": HELLO},
    EMBEDDINGS: {"input": "Hello"},
    GENERIC: {},
}
IDS = list(range(3000))
LISTED = ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input"))
JARGON = re.compile(r"\b(array|Expected|int|str|bool|float|msgspec|codec)\b|[$`]")


def read_from(api: Api, **fields: Any) -> Payload:
    return decode(api, json.dumps(fields, ensure_ascii=False).encode())


def complaint(api: Api, body: bytes) -> str:
    with pytest.raises(InvalidBody) as refused:
        decode(api, body)
    assert refused.value.status == 400
    assert JARGON.search(refused.value.message) is None
    return refused.value.message


@each(
    ("api", "field"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ],
)
def test_the_maximum_output_is_where_the_api_keeps_it(api: Api, field: str) -> None:
    assert read_from(api, **SMALLEST[api], **{field: 7}).max_output_tokens == 7
    assert read_from(api, **SMALLEST[api], **{field: 7.0}).max_output_tokens == 7
    none = 0 if api is COMPLETIONS else None  # where there is a chat template, engines take 0 for none
    assert read_from(api, **SMALLEST[api], **{field: 0}).max_output_tokens == none
    assert read_from(api, **SMALLEST[api], **{field: None}).max_output_tokens is None
    assert read_from(api, **SMALLEST[api]).max_output_tokens is None


READ: list[tuple[Api, dict[str, Any], dict[str, Any]]] = [
    # Of two maxima the larger: engines go by either of them, and by the other one where that is 0.
    *((CHAT, {"max_tokens": older, "max_completion_tokens": newer}, {"max_output_tokens": counts})
      for newer, older, counts in ((3, 9, 9), (9, 3, 9), (0, 9, 9), (9, 0, 9), (0, 0, None))),
    (EMBEDDINGS, {"max_tokens": 9}, {"max_output_tokens": 0}),
    # Choices are `n` or `best_of`, whichever is more.
    (CHAT, {}, {"choices": 1}),
    (CHAT, {"n": 4}, {"choices": 4}),
    (CHAT, {"best_of": 8}, {"choices": 8}),
    (CHAT, {"best_of": 2, "n": 3}, {"choices": 3}),
    (COMPLETIONS, {"n": 2, "best_of": 5}, {"choices": 5}),
    (COMPLETIONS, {"n": 5, "best_of": 2}, {"choices": 5}),
    # Token ids are counted exactly, whatever they are, and lists are as many prompts.
    *((api, {field: [1, 2, 3]}, {"prompt_bytes": 0, "prompt_tokens": 3, "prompts": 1}) for api, field in LISTED),
    *((api, {field: [[1, 2, 3], [4], [5, 6]]}, {"prompt_bytes": 0, "prompt_tokens": 6, "prompts": 3})
      for api, field in LISTED),
    (COMPLETIONS, {"prompt": [-1, 10**12]}, {"prompt_tokens": 2}),
    *((api, {field: ["ab", "1", "äß"]}, {"prompt_bytes": 7, "prompt_tokens": 0, "prompts": 3})
      for api, field in LISTED),
    *((CHAT, {field: IDS}, {"prompt_tokens": 3000, "prompts": 1}) for field in ("input_ids", "prompt_token_ids")),
    (CHAT, {"input_embeds": [[0.25, 1e-3]] * 3000}, {"prompt_tokens": 3000}),
    (COMPLETIONS, {"input_ids": [[1, 2], [3], [4, 5]]}, {"prompts": 3}),
    (COMPLETIONS, {"input_embeds": [[[0.5]], [[0.5], [1]]]}, {"prompts": 2}),
    # The prompt may be missing where another field carries it.
    (COMPLETIONS, {"prompt": None, "prompt_embeds": "UEsDBAAA"}, {"unsized": "prompt_embeds"}),
    (COMPLETIONS, {"prompt": None, "prompt_token_ids": [1, 2]}, {"prompt_tokens": 2}),
    (RESPONSES, {"input": None, "prompt": {"id": "pmpt_1"}}, {"unsized": "prompt"}),
]  # fmt: skip


@each(("api", "fields", "read"), READ)
def test_a_field_counts_as_the_engines_take_it(api: Api, fields: dict[str, Any], read: dict[str, Any]) -> None:
    given = {name: value for name, value in {**SMALLEST[api], **fields}.items() if value is not None}
    payload = read_from(api, **given)
    assert {name: getattr(payload, name) for name in read} == read


def test_of_a_list_of_strings_each_is_a_line() -> None:
    assert read_from(COMPLETIONS, prompt=["ab", "1", "äß"]).text() == "ab\n1\näß"


@each(
    ("api", "extra"),
    [
        (CHAT, {"tools": [{"name": "x" * 100}]}),
        (RESPONSES, {"instructions": "x" * 100}),
        (RESPONSES, {"tools": [{"name": "x" * 100}]}),
        (MESSAGES, {"system": "x" * 100}),
        (MESSAGES, {"tools": [{"name": "x" * 100}]}),
    ],
)
def test_tools_and_instructions_are_part_of_the_prompt(api: Api, extra: dict[str, Any]) -> None:
    without, with_it = read_from(api, **SMALLEST[api]), read_from(api, **SMALLEST[api], **extra)
    assert 100 <= with_it.prompt_bytes - without.prompt_bytes <= 120
    assert "x" * 100 in with_it.text()


def test_what_is_not_part_of_the_prompt_does_not_count() -> None:
    assert (
        read_from(CHAT, messages=HELLO).prompt_bytes
        == read_from(CHAT, messages=HELLO, metadata={"a": "x" * 1000}).prompt_bytes
    )


def tokens(api: Api, **fields: Any) -> int:
    """What a prompt is taken for."""
    return Estimator().prompt_tokens(read_from(api, **{**SMALLEST[api], **fields}), "acme")


CARRIERS: list[tuple[Api, dict[str, Any]]] = [
    (CHAT, {"input_ids": IDS}),
    (CHAT, {"input_ids": [0] * 3000}),
    (COMPLETIONS, {"input_ids": [IDS[:1000], IDS[1000:]]}),
    (CHAT, {"prompt_token_ids": IDS}),
    (CHAT, {"prompt_token_ids_b64": base64.b64encode(array("i", IDS).tobytes()).decode()}),
    (CHAT, {"kv_transfer_params": {"do_remote_prefill": True, "prompt_token_ids": IDS}}),
    (COMPLETIONS, {"kv_transfer_params": {"prompt_token_ids": [7] * 3000}}),
    (CHAT, {"nvext": {"token_data": IDS, "backend_instance_id": 1}}),
    (CHAT, {"input_embeds": [[0.25, 1e-3]] * 3000}),
    (COMPLETIONS, {"input_embeds": [[[0.25, 1]] * 1000, [[1, 2]] * 2000]}),
    (CHAT, {"documents": [{"title": "a", "text": "word" * 3000}]}),
    (CHAT, {"chat_template_kwargs": {"context": "word" * 3000}}),
    (CHAT, {"chat_template_kwargs": {"word" * 3000: 1}}),
    (RESPONSES, {"previous_input_messages": [{"role": "user", "content": "word" * 3000}]}),
    (RESPONSES, {"previous_response": {"output": [{"encrypted_content": "word" * 3000}]}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"word" * 3000: 1}}}}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"word" * 3000: 1}}}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"word" * 3000: {}}}}]}),
    (COMPLETIONS, {"suffix": "word" * 3000}),
    (CHAT, {"the_next_one": "word" * 3000}),
    (CHAT, {"the_next_one": [0] * 3000}),
    (CHAT, {"the_next_one": {"ids": IDS}}),
    (CHAT, {"the_next_one": array("i", IDS).tobytes().hex()}),
    (CHAT, {"word" * 3000: True}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "ids", "ids": [0] * 3000}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "word" * 3000: 1}]}]}),
]


@each(("api", "fields"), CARRIERS, ids=[f"{api.value} {next(iter(f))[:20]}" for api, f in CARRIERS])
def test_a_prompt_of_3000_tokens_counts_wherever_it_travels(api: Api, fields: dict[str, Any]) -> None:
    assert 3000 <= tokens(api, **fields) <= 8000


def test_an_escaped_name_hides_no_prompt() -> None:
    body = b'{"messages":[{"role":"user","content":"Hello"}],"input\\u005fids":[%b]}' % b",".join([b"1"] * 3000)
    assert decode(CHAT, body).prompt_tokens == 3000


FILE = {"type": "file", "file": {"file_id": "file-1"}}
UNSIZED: list[tuple[Api, dict[str, Any], str]] = [
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (CHAT, {"chat_template": "{% for i in range(99999) %}x{% endfor %}"}, "chat_template"),
    (CHAT, {"session_params": {"id": "s"}}, "session_params"),
    (COMPLETIONS, {"prompt_embeds": "UEsDBAAA"}, "prompt_embeds"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    (CHAT, {"messages": [{"role": "user", "content": [FILE]}]}, "file.file_id"),
    (RESPONSES, {"input": [{"content": [{"type": "input_file", "file_url": "https://x"}]}]}, "input_file.file_url"),
    (
        MESSAGES,
        {"messages": [{"content": [{"type": "document", "source": {"type": "url", "url": "https://x"}}]}]},
        "document.source",
    ),
    (CHAT, {"messages": [{"content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}]}, "image_embeds"),
    (CHAT, {"messages": [{"content": [{"audio_embeds": "AAAA"}]}]}, "audio_embeds"),
    (CHAT, {"messages": [{"content": [{"type": "text", "video_embeds": None, "uuid": "1"}]}]}, "video_embeds"),
]


def test_a_reference_to_a_tool_holds_the_largest_definition_each_time() -> None:
    small, large = {"name": "s", "input_schema": {}}, {"name": "t", "description": "x" * 4000, "input_schema": {}}
    told = [{"type": "tool_reference", "tool_name": "t"}]
    messages = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": told * times}]}
                for times in (1, 2)]  # fmt: skip
    for api in (MESSAGES, CHAT):
        once, thrice = [
            read_from(api, messages=messages[:count], max_tokens=1, tools=[small, large]).prompt_tokens
            for count in (1, 2)
        ]
        assert 1000 < once < 1030
        assert thrice == 3 * once
    alone = read_from(MESSAGES, messages=messages, max_tokens=1)
    assert (alone.unsized, alone.prompt_tokens, alone.is_understood) == (None, 3, False)


@each(("api", "fields", "name"), UNSIZED, ids=[name for *_, name in UNSIZED])
def test_what_the_body_cannot_size_is_named(api: Api, fields: dict[str, Any], name: str) -> None:
    payload = read_from(api, **{**SMALLEST[api], **fields})
    assert payload.unsized == name
    assert not payload.is_understood


@each("name", [name for _, fields, _ in UNSIZED for name in fields if name not in ("input", "messages")])
def test_a_null_names_nothing_elsewhere(name: str) -> None:
    for api in (CHAT, RESPONSES):
        if name not in SMALLEST[api]:
            assert read_from(api, **SMALLEST[api], **{name: None}) is not None
            assert read_from(api, **SMALLEST[api], **{name: None}).unsized is None


ORDINARY: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 1, "stop": ["x" * 100], "user": "u" * 100,
    "metadata": {"trace": "x" * 1000}, "logit_bias": {str(number): -100 for number in range(300)}, "logprobs": True,
    "top_logprobs": 5, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "store": False,
    "stream_options": {"include_usage": True}, "tool_choice": "auto", "parallel_tool_calls": False, "min_tokens": 3,
    "reasoning_effort": "low", "service_tier": "auto", "prompt_cache_key": "k" * 100, "cache_salt": "s" * 43,
    "stop_token_ids": list(range(50)), "bad_words": ["x"] * 50, "ignore_eos": False, "skip_special_tokens": True,
    "structured_outputs": {"json": {"x" * 1000: 1}}, "regex": "[a-z]" * 100, "lora_path": "adapter",
    "kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": list(range(500)), "remote_host": "h"},
}  # fmt: skip


@each("api", [api for api in Api if api is not GENERIC])
def test_ordinary_parameters_change_neither_the_estimate_nor_what_it_learns(api: Api) -> None:
    bare, dressed = read_from(api, **SMALLEST[api]), read_from(api, **SMALLEST[api], **ORDINARY)
    assert (dressed.prompt_bytes, dressed.prompt_tokens) == (bare.prompt_bytes, bare.prompt_tokens)
    assert (dressed.unread_bytes, dressed.unsized, dressed.is_understood) == (0, None, True)
    assert dressed.text() == bare.text()


@each("api", list(Api))
def test_a_field_that_is_not_known_changes_nothing_else_of_what_is_read(api: Api) -> None:
    fields = {**SMALLEST[api], "model": "m", "stream": True, "priority": 1, "max_tokens": 9, "n": 2, "best_of": 3}
    known, strange = read_from(api, **fields), read_from(api, **fields, next_release=1)
    for name in ("model", "stream", "prompt_bytes", "prompt_tokens", "prompts", "choices", "max_output_tokens"):
        assert getattr(known, name) == getattr(strange, name)
    assert (known.priority, known.text()) == (strange.priority, strange.text())


@each(("api", "body", "sentence"), [
    (CHAT, b'{"next":1,"messages":[1],"n":0}', "n: 0 is too small; send 1 or more"),
    (CHAT, b'{"next":1,"messages":[1],"n":"x"}', "n: expected a whole number, got a string"),
    (CHAT, b'{"next":1,"messages":"hi"}', "messages: expected a list, got a string"),
    (CHAT, b'{"next":1,"messages":[1]', "the body is not valid JSON: it ends too early"),
    (CHAT, b'{"next":1,"messages":[1],"best_of":"8"}', "best_of: expected a whole number, got a string"),
])  # fmt: skip
def test_a_field_that_is_not_known_hides_no_mistake(api: Api, body: bytes, sentence: str) -> None:
    assert sentence == complaint(api, body)


BASE64 = "A" * 100_000
MEDIA = [
    (CHAT, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}", "detail": "high"}}),
    (CHAT, {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}),
    (CHAT, {"type": "file", "file": {"filename": "a.pdf", "file_data": BASE64}}),
    (CHAT, {"type": "video_url", "video_url": {"url": BASE64}}),
    (RESPONSES, {"type": "input_image", "image_url": f"data:image/png;base64,{BASE64}"}),
    (RESPONSES, {"type": "input_file", "file_data": BASE64, "filename": "a.pdf"}),
    (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}),
    (MESSAGES, {"type": "document", "source": {"type": "url", "url": BASE64}}),
    # vLLM goes by a part's members where it has no type, or the `uuid` of a medium.
    (CHAT, {"image_url": f"data:image/png;base64,{BASE64}"}),
    (CHAT, {"image_url": {"url": BASE64}, "uuid": "1"}),
    (CHAT, {"image_url": None, "uuid": "1"}),
    (CHAT, {"type": None, "audio_url": {"url": BASE64}}),
    (CHAT, {"type": "new", "video_url": {"url": BASE64}}),
    (CHAT, {"input_audio": {"data": BASE64, "format": "wav"}}),
    (CHAT, {"image_pil": BASE64}),
    (CHAT, {"image": {"url": f"data:image/png;base64,{BASE64}"}}),
    (RESPONSES, {"type": "input_image", "input_image": BASE64}),
    (RESPONSES, {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": BASE64}}),
    (RESPONSES, {"type": "image_generation_call", "result": BASE64, "status": "completed"}),
]


@each(("api", "part"), MEDIA, ids=[",".join(part) for _, part in MEDIA])
def test_a_media_part_counts_a_fixed_figure_and_not_its_base64(api: Api, part: dict[str, Any]) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    payload = read_from(api, **{next(iter(SMALLEST[api])): said})
    assert payload.prompt_tokens == MEDIA_TOKENS
    assert 13 <= payload.prompt_bytes < 100
    assert "What is this?" in payload.text()
    assert "AAAA" not in payload.text()


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "word " * 1000},
        {"type": "content", "content": [{"type": "text", "text": "word " * 1000}]},
    ],
)
def test_a_document_that_is_text_counts_as_text(source: dict[str, Any]) -> None:
    said = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    assert read_from(MESSAGES, messages=said).prompt_bytes >= 5000


TEXT = "data:text/plain," + "word " * 1000


@each("said", [
    {"role": "user", "type": "file", "content": TEXT},
    {"role": "user", "content": TEXT},
    {"role": "user", "content": [{"image_url": None, "type": "text", "text": TEXT}]},
    {"role": "user", "content": [{"image_url": {"url": ""}, "text": TEXT}]},
    {"role": "assistant", "content": [{"type": "tool_use", "input": {"type": "image", "image_url": TEXT}}]},
    {"role": "assistant", "tool_calls": [{"function": {"arguments": {"type": "file", "signature": [TEXT]}}}]},
    {"role": "tool", "content": [{"type": "tool_result", "content": [{"text": TEXT, "signature": "s"}]}]},
])  # fmt: skip
def test_text_beside_a_medium_or_like_one_is_not_hidden_by_it(said: dict[str, Any]) -> None:
    payload = read_from(CHAT, messages=[said])
    assert payload.prompt_bytes >= 5000
    assert TEXT in payload.text()
    assert payload.prompt_tokens <= MEDIA_TOKENS


@each(("api", "item"), [
    (MESSAGES, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": BASE64}]}),
    (MESSAGES, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": BASE64}]}),
    (RESPONSES, {"type": "reasoning", "summary": [], "encrypted_content": BASE64}),
    (MESSAGES, {"role": "assistant", "content": [{"thinking": "Hm", "signature": BASE64}]}),
])  # fmt: skip
def test_what_only_its_writer_can_read_counts_nothing(api: Api, item: dict[str, Any]) -> None:
    payload = read_from(api, **{next(iter(SMALLEST[api])): [item]})
    assert payload.prompt_bytes < 100
    assert (payload.prompt_tokens, payload.is_understood) == (0, True)


def test_escapes_count_as_the_text_they_stand_for() -> None:
    plain, escaped = json.dumps("日本" * 100, ensure_ascii=False), json.dumps("日本" * 100)
    for template, api in (('{"messages":[{"content":%s}]}', CHAT), ('{"prompt":%s}', COMPLETIONS)):
        sizes = [decode(api, (template % text).encode()).prompt_bytes for text in (plain, escaped)]
        assert min(sizes) >= 600
        assert max(sizes) <= 620


def test_model_stream_and_the_undecoded_priorities_are_kept() -> None:
    payload = decode(CHAT, b'{"model":"m","stream":true,"messages":[1],"priority": 1e0 ,"nvext":{ "a":1}}')
    assert (payload.model, payload.stream, payload.priority, payload.nvext) == ("m", True, b"1e0", b'{ "a":1}')
    bare = decode(CHAT, b'{"messages":[1]}')
    assert (bare.model, bare.stream, bare.priority, bare.nvext) == (None, False, None, None)


def test_a_null_priority_is_present_because_it_would_overrule_ours() -> None:
    assert decode(CHAT, b'{"messages":[1],"priority":null}').priority == b"null"


def test_numbers_elsewhere_may_be_anything() -> None:
    decode(CHAT, b'{"x":1e400,"y":%b,"messages":[{"type":"text","v":1e400,"w":"\\u00e9"}]}' % (b"9" * 5000))


SENTENCES = [
    (CHAT, b"", "the body is not valid JSON: it ends too early"),
    (CHAT, b"{", "the body is not valid JSON: it ends too early"),
    (CHAT, b'{"model":"\\ud800"}', "the body is not valid JSON: its last string has half of a surrogate pair"),
    (
        CHAT,
        b'{"model":"\\ud800", "n":1, "stream":true}',
        "the body is not valid JSON: unexpected end of escaped utf-16 surrogate pair (byte 16)",
    ),
    (CHAT, b"nope", "the body is not valid JSON: invalid character (byte 4)"),
    (CHAT, b'{"a":1}x', "the body is not valid JSON: trailing characters (byte 8)"),
    (CHAT, b'{"messages":[NaN]}', "the body is not valid JSON: invalid character (byte 13)"),
    (CHAT, b"[]", "the body must be a JSON object, not a list"),
    (CHAT, b"true", "the body must be a JSON object, not a boolean"),
    (COMPLETIONS, b'{"prompt":"\xff"}', "the body is not valid JSON: it has text that is not UTF-8"),
    (CHAT, b'{"messages":["\xff\\u00e9"]}', "the body is not valid JSON: it has text that is not UTF-8"),
    (CHAT, b"{}", "messages: missing; send a list"),
    (CHAT, b'{"messages":null}', "messages: missing; send a list"),
    (CHAT, b'{"messages":"hi"}', "messages: expected a list, got a string"),
    (CHAT, b'{"messages":{"a":1}}', "messages: expected a list, got an object"),
    (CHAT, b'{"messages":[ ]}', "messages: an empty list; send at least one"),
    (MESSAGES, b"{}", "messages: missing; send a list"),
    (CHAT, b'{"messages":[1],"max_tokens":"5"}', "max_tokens: expected a whole number, got a string"),
    (CHAT, b'{"messages":[1],"max_tokens":[5]}', "max_tokens: expected a whole number, got a list"),
    (CHAT, b'{"messages":[1],"max_tokens":5.5}', "max_tokens: expected a whole number, got 5.5"),
    (CHAT, b'{"messages":[1],"max_tokens":true}', "max_tokens: expected a whole number, got a boolean"),
    (CHAT, b'{"messages":[1],"max_tokens":-1}', "max_tokens: -1 is too small; send 1 or more"),
    (CHAT, b'{"messages":[1],"max_tokens":1e400}', "max_tokens: a number out of range"),
    (CHAT, b'{"messages":[1],"n":0}', "n: 0 is too small; send 1 or more"),
    (CHAT, b'{"messages":[1],"n":4294967296}', "n: 4294967296 is too large; send 2147483647 or less"),
    (CHAT, b'{"messages":[1],"n":%b}' % (b"9" * 99), f"n: {'9' * 20}… is too large; send 2147483647 or less"),
    (CHAT, b'{"messages":[1],"n":%b}' % (b"9" * 5000), "n: a number out of range"),
    (CHAT, b'{"messages":[1],"stream":"yes"}', "stream: expected true or false, got a string"),
    (CHAT, b'{"messages":[1],"model":5}', "model: expected a string, got a whole number"),
    (COMPLETIONS, b"{}", "prompt: missing; send a string, a list of strings, or token ids"),
    (COMPLETIONS, b'{"prompt":[]}', "prompt: an empty list; send at least one prompt"),
    (COMPLETIONS, b'{"prompt":[[1],[]]}', "prompt: a prompt without token ids; send at least one for each"),
    (COMPLETIONS, b'{"prompt":[1,"a"]}', "prompt: a list that mixes strings and token ids; send one kind"),
    (RESPONSES, b"{}", "input: missing; send a string or a list"),
    (RESPONSES, b'{"input":5}', "input: of the wrong type; send a string or a list"),
    (RESPONSES, b'{"input":[]}', "input: an empty list; send at least one"),
    (EMBEDDINGS, b"{}", "input: missing; send a string, a list of strings, or token ids"),
    (CHAT, b'{"messages":[1],"priority":1,"priority":0}', "priority: given twice; send it once"),
    (CHAT, b'{"messages":[1],"priority":1,"pr\\u0069ority":0}', "priority: given twice; send it once"),
    (CHAT, b'{"messages":[1],"nvext":{},"nvext":{}}', "nvext: given twice; send it once"),
    (
        CHAT,
        b'{"messages":[1],"nvext":{"agent_hints":{"priority":1,"priority":2}}}',
        "priority: given twice; send it once",
    ),
]


@each(("api", "body", "sentence"), SENTENCES, ids=[sentence for _, _, sentence in SENTENCES])
def test_what_is_wrong_is_said_in_a_sentence(api: Api, body: bytes, sentence: str) -> None:
    assert sentence == complaint(api, body)


@each("prompt", [b"5", b"true", b"{}", b"[true]", b"[null]", b"[1.5]", b'[["a"]]', b"[[1.0]]", b"[{}]"])
def test_a_prompt_of_the_wrong_type_says_what_to_send(prompt: bytes) -> None:
    assert complaint(COMPLETIONS, b'{"prompt":%b}' % prompt).endswith(
        " is not expected here; send a string, a list of strings, or token ids"
    )


def test_the_same_name_at_other_depths_is_no_duplicate() -> None:
    decode(CHAT, b'{"messages":[{"priority":1}],"priority":1,"nvext":{"agent_hints":{"priority":2},"priority":3}}')


@each("api", list(Api))
def test_nesting_too_deep_to_read_is_refused_and_not_a_crash(api: Api) -> None:
    field = next(iter(SMALLEST[api]), "input")
    for depth in (900, 1000, 100_000):
        for text in (b"", b'"\\u00e9",', b'{"type":1},'):
            body = b'{"%b":[%b%b%b],"priority":1,"x":{"priority":1}}' % (
                field.encode(),
                text,
                b"[" * depth,
                b"]" * depth,
            )
            with suppress(InvalidBody):
                decode(api, body)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["image_url", "text", "a"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "data", "x", "priority", "agent_hints"]), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        *("model", "stream", "messages", "prompt", "input", "tools", "system", "instructions", "priority", "nvext"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"),
    ]
)


@given(api=st.sampled_from(Api), fields=st.dictionaries(FIELDS, JSON), escape=st.booleans())
def test_any_json_object_is_read_or_refused(api: Api, fields: dict[str, Any], escape: bool) -> None:
    body = json.dumps({**SMALLEST[api], **fields}, ensure_ascii=escape).encode("utf-8", "surrogatepass")
    try:
        payload = decode(api, body)
    except InvalidBody:
        return
    payload.text().encode("utf-8")
    assert payload.prompt_bytes >= 0
    assert payload.prompts >= 1
    assert 1 <= payload.choices <= LARGEST_COUNT


@given(api=st.sampled_from(Api), body=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(api: Api, body: bytes) -> None:
    with suppress(InvalidBody):
        decode(api, body)


@given(api=st.sampled_from(Api), noise=st.binary(min_size=1, max_size=3), place=st.integers(0, 60))
def test_a_valid_body_with_a_few_bytes_changed_is_read_or_refused(api: Api, noise: bytes, place: int) -> None:
    body = json.dumps({**SMALLEST[api], "priority": "a", "nvext": {"agent_hints": {"priority": "\u00e9"}}}).encode()
    with suppress(InvalidBody):
        decode(api, body[:place] + noise + body[place + len(noise) :])


HOSTILE = {
    "brackets": (b'{"messages":[', b"[],", b'1],"priority":1,"x":{"priority":1}}'),
    "strings": (b'{"messages":["\\u00e9",', b'"",', b"1]}"),
    "duplicates": (b"{", b'"priority":1,', b'"messages":[1]}'),
    "parts": (b'{"messages":[', b'{"type":""},', b"1]}"),
}


@each("kind", HOSTILE)
def test_reading_takes_time_in_proportion_to_the_body(kind: str) -> None:
    start, middle, end = HOSTILE[kind]

    def seconds(size: int) -> float:
        body = start + middle * (size // len(middle)) + end
        gc.disable()  # what the collector takes grows with everything that the tests before have left
        began = time.process_time()
        with suppress(InvalidBody):
            decode(CHAT, body)
        took = time.process_time() - began
        gc.enable()
        return took

    seconds(10_000)
    small = min(seconds(50_000) for _ in range(3))
    assert seconds(2_000_000) < 300 * small + 0.1  # a quadratic one would take 1,600 times as long
