"""Where each API keeps its prompt and its maximum output, and what becomes of bodies that are no requests."""

from __future__ import annotations

import gc
import json
import re
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.errors import InvalidBody
from sidecar.payload import LARGEST_COUNT, MEDIA_TOKENS, Payload, read
from sidecar.policy.policy import Api

CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS = Api
HELLO = [{"role": "user", "content": "Hello"}]
SMALLEST: dict[Api, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hello"},
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": HELLO},
    EMBEDDINGS: {"input": "Hello"},
}
JARGON = re.compile(r"\b(array|Expected|int|str|bool|float|msgspec|codec)\b|[$`]")


def read_from(api: Api, **fields: Any) -> Payload:
    return read(api, json.dumps(fields, ensure_ascii=False).encode())


def complaint(api: Api, body: bytes) -> str:
    with pytest.raises(InvalidBody) as refused:
        read(api, body)
    assert refused.value.status == 400
    assert JARGON.search(refused.value.message) is None
    return refused.value.message


@pytest.mark.parametrize(
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
    assert read_from(api, **SMALLEST[api], **{field: 0}).max_output_tokens == 0
    assert read_from(api, **SMALLEST[api], **{field: None}).max_output_tokens is None
    assert read_from(api, **SMALLEST[api]).max_output_tokens is None


def test_max_completion_tokens_counts_before_max_tokens() -> None:
    assert read_from(CHAT, messages=HELLO, max_tokens=9, max_completion_tokens=3).max_output_tokens == 3


def test_embeddings_have_no_output() -> None:
    assert read_from(EMBEDDINGS, input="Hello", max_tokens=9).max_output_tokens == 0


@pytest.mark.parametrize("api", [COMPLETIONS, EMBEDDINGS])
def test_token_ids_are_counted_exactly(api: Api) -> None:
    field = next(iter(SMALLEST[api]))
    one = read_from(api, **{field: [1, 2, 3]})
    assert (one.prompt_bytes, one.prompt_tokens, one.prompts) == (0, 3, 1)
    several = read_from(api, **{field: [[1, 2, 3], [4], [5, 6]]})
    assert (several.prompt_bytes, several.prompt_tokens, several.prompts) == (0, 6, 3)


def test_the_worth_of_a_token_id_is_the_engines_business() -> None:
    assert read_from(COMPLETIONS, prompt=[-1, 10**12]).prompt_tokens == 2


@pytest.mark.parametrize("api", [COMPLETIONS, EMBEDDINGS])
def test_a_list_of_strings_is_as_many_prompts(api: Api) -> None:
    payload = read_from(api, **{next(iter(SMALLEST[api])): ["ab", "1", "äß"]})
    assert (payload.prompt_bytes, payload.prompt_tokens, payload.prompts) == (2 + 1 + 4, 0, 3)
    assert payload.text() == "ab\n1\näß"


def test_choices_are_n_or_best_of_whichever_is_more() -> None:
    assert read_from(CHAT, messages=HELLO).choices == 1
    assert read_from(CHAT, messages=HELLO, n=4).choices == 4
    assert read_from(COMPLETIONS, prompt="a", n=2, best_of=5).choices == 5
    assert read_from(COMPLETIONS, prompt="a", n=5, best_of=2).choices == 5


@pytest.mark.parametrize(
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
]


@pytest.mark.parametrize(("api", "part"), MEDIA, ids=[part["type"] for _, part in MEDIA])
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


def test_text_beside_a_media_type_is_not_hidden_by_it() -> None:
    said = [{"role": "user", "type": "file", "content": "word " * 1000}]
    assert read_from(CHAT, messages=said).prompt_bytes >= 5000


def test_escapes_count_as_the_text_they_stand_for() -> None:
    plain, escaped = json.dumps("日本" * 100, ensure_ascii=False), json.dumps("日本" * 100)
    for template, api in (('{"messages":[{"content":%s}]}', CHAT), ('{"prompt":%s}', COMPLETIONS)):
        sizes = [read(api, (template % text).encode()).prompt_bytes for text in (plain, escaped)]
        assert min(sizes) >= 600
        assert max(sizes) <= 620


def test_model_stream_and_the_undecoded_priorities_are_kept() -> None:
    payload = read(CHAT, b'{"model":"m","stream":true,"messages":[1],"priority": 1e0 ,"nvext":{ "a":1}}')
    assert (payload.model, payload.stream, payload.priority, payload.nvext) == ("m", True, b"1e0", b'{ "a":1}')
    bare = read(CHAT, b'{"messages":[1]}')
    assert (bare.model, bare.stream, bare.priority, bare.nvext) == (None, False, None, None)


def test_a_null_priority_is_present_because_it_would_overrule_ours() -> None:
    assert read(CHAT, b'{"messages":[1],"priority":null}').priority == b"null"


def test_numbers_elsewhere_may_be_anything() -> None:
    read(CHAT, b'{"x":1e400,"y":%b,"messages":[{"type":"text","v":1e400,"w":"\\u00e9"}]}' % (b"9" * 5000))


SENTENCES = [
    (CHAT, b"", "the body is not valid JSON: it ends too early"),
    (CHAT, b"{", "the body is not valid JSON: it ends too early"),
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
    (CHAT, b'{"messages":[1],"max_tokens":-1}', "max_tokens: -1 is too small; send 0 or more"),
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


@pytest.mark.parametrize(("api", "body", "sentence"), SENTENCES, ids=[sentence for _, _, sentence in SENTENCES])
def test_what_is_wrong_is_said_in_a_sentence(api: Api, body: bytes, sentence: str) -> None:
    assert sentence == complaint(api, body)


@pytest.mark.parametrize(
    "prompt", [b"5", b"true", b"{}", b"[true]", b"[null]", b"[1.5]", b'[["a"]]', b"[[1.0]]", b"[{}]"]
)
def test_a_prompt_of_the_wrong_type_says_what_to_send(prompt: bytes) -> None:
    assert complaint(COMPLETIONS, b'{"prompt":%b}' % prompt).endswith(
        " is not expected here; send a string, a list of strings, or token ids"
    )


def test_the_same_name_at_other_depths_is_no_duplicate() -> None:
    read(CHAT, b'{"messages":[{"priority":1}],"priority":1,"nvext":{"agent_hints":{"priority":2},"priority":3}}')


@pytest.mark.parametrize("api", list(Api))
def test_nesting_too_deep_to_read_is_refused_and_not_a_crash(api: Api) -> None:
    field = next(iter(SMALLEST[api]))
    for depth in (900, 1000, 100_000):
        for text in (b"", b'"\\u00e9",', b'{"type":1},'):
            body = b'{"%b":[%b%b%b],"priority":1,"x":{"priority":1}}' % (
                field.encode(),
                text,
                b"[" * depth,
                b"]" * depth,
            )
            with suppress(InvalidBody):
                read(api, body)


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
        payload = read(api, body)
    except InvalidBody:
        return
    payload.text().encode("utf-8")
    assert payload.prompt_bytes >= 0
    assert payload.prompts >= 1
    assert 1 <= payload.choices <= LARGEST_COUNT


@given(api=st.sampled_from(Api), body=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(api: Api, body: bytes) -> None:
    with suppress(InvalidBody):
        read(api, body)


@given(api=st.sampled_from(Api), noise=st.binary(min_size=1, max_size=3), place=st.integers(0, 60))
@settings(max_examples=200)
def test_a_valid_body_with_a_few_bytes_changed_is_read_or_refused(api: Api, noise: bytes, place: int) -> None:
    body = json.dumps({**SMALLEST[api], "priority": "a", "nvext": {"agent_hints": {"priority": "\u00e9"}}}).encode()
    with suppress(InvalidBody):
        read(api, body[:place] + noise + body[place + len(noise) :])


HOSTILE = {
    "brackets": (b'{"messages":[', b"[],", b'1],"priority":1,"x":{"priority":1}}'),
    "strings": (b'{"messages":["\\u00e9",', b'"",', b"1]}"),
    "duplicates": (b"{", b'"priority":1,', b'"messages":[1]}'),
    "parts": (b'{"messages":[', b'{"type":""},', b"1]}"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_reading_takes_time_in_proportion_to_the_body(kind: str) -> None:
    start, middle, end = HOSTILE[kind]

    def seconds(size: int) -> float:
        body = start + middle * (size // len(middle)) + end
        gc.disable()  # what the collector takes grows with everything that the tests before have left
        began = time.process_time()
        with suppress(InvalidBody):
            read(CHAT, body)
        took = time.process_time() - began
        gc.enable()
        return took

    seconds(10_000)
    small = min(seconds(50_000) for _ in range(3))
    assert seconds(2_000_000) < 300 * small + 0.1  # a quadratic one would take 1,600 times as long
