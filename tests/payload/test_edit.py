"""Members are put in and taken out, and every other byte stays; the oracle is the standard library's own parser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.payload.edit import insert, remove
from tests.support.each import each
from tests.support.examples import examples

PATHS = (("priority",), ("nvext", "agent_hints", "priority"), ("a", "a"), ("a", "b"))


class Pairs(list[tuple[str, Any]]):
    """An object's members as they stand, duplicates included; a list, but never equal to an array."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pairs) and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def parsed(body: bytes) -> Any:
    return json.loads(body, object_pairs_hook=Pairs, parse_int=str, parse_float=str)


def without(value: Any, path: tuple[str, ...]) -> Any:
    """What must be left: the oracle."""
    if not isinstance(value, Pairs):
        return value
    if len(path) == 1:
        return Pairs((key, child) for key, child in value if key != path[0])
    return Pairs((key, without(child, path[1:]) if key == path[0] else child) for key, child in value)


SPACE = st.sampled_from(["", "", "", " ", "\n", "\t \r\n"])
NASTY = st.sampled_from(
    ['"', "\\", '\\"', "{", "}", "[", "]", ",", ":", '"priority":1', "a", "é", "😀", "\x00", "\\u0070"]
)
TEXT = st.lists(NASTY, max_size=4).map("".join) | st.text(max_size=4)
KEYS = st.sampled_from(["priority", "nvext", "agent_hints", "a", "b", "prior", "priority_", ""]) | TEXT
NUMBERS = st.sampled_from(["0", "-0", "1e400", "-1.5E-7", "9" * 400, "true", "false", "null"])


@st.composite
def quoted(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    """A string as JSON, each character in any of the spellings that JSON has for it."""
    text = draw(texts)
    if draw(st.booleans()):
        return json.dumps(text, ensure_ascii=draw(st.booleans()))
    return '"' + "".join(rf"\u{unit:04{draw(st.sampled_from('xX'))}}" for unit in utf16(text)) + '"'


def utf16(text: str) -> list[int]:
    raw = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    members = draw(st.lists(st.tuples(quoted(KEYS), values), max_size=5))
    space = lambda: draw(SPACE)  # noqa: E731
    inner = ",".join(f"{space()}{key}{space()}:{space()}{value}{space()}" for key, value in members)
    return "{" + (inner or space()) + "}"


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    return "[" + ",".join(draw(SPACE) + value + draw(SPACE) for value in draw(st.lists(values, max_size=3))) + "]"


VALUES = st.recursive(NUMBERS | quoted(TEXT), lambda inner: objects(inner) | arrays(inner), max_leaves=6)
HINTS = st.builds(
    '{{"nvext":{},"agent_hints":{},"nvext":{{"agent_hints":{}}}}}'.format, VALUES, VALUES, objects(VALUES)
)
BODIES = st.builds(lambda before, body, after: (before + body + after).encode(), SPACE, objects(VALUES) | HINTS, SPACE)


@settings(max_examples=examples(50))
@given(body=BODIES, path=st.sampled_from(PATHS))
@example(body=b'{"priority":1,"priority":2,"priority":3}', path=("priority",))
@example(body=b'{"x":0,"priority":{},"priority":[],"y":"priority","priority":"}"}', path=("priority",))
@example(body=b'{"priority":1,"priority":2,"x":0}', path=("priority",))
@example(body=b'{ "priority":1 ,\n"priority":2 , "x":0,"priority":3}', path=("priority",))
@example(body=b'{"x":"\\\\","priority":1,"y":"\\\\\\"priority\\":[","priority":{"z":"}"}}', path=("priority",))
@example(body=b'{"x":"\\\\","y":"{","priority":1}', path=("priority",))
@example(body=b'{"nvext":{"x":1},"y":{"agent_hints":{"priority":1}}}', path=("nvext", "agent_hints", "priority"))
@example(body=b'{"nvext":{"agent_hints":{}},"y":{"z":{"priority":1}}}', path=("nvext", "agent_hints", "priority"))
@example(body=b'{"nvext":1,"x":{"agent_hints":{"priority":1}}}', path=("nvext", "agent_hints", "priority"))
@example(body=b'{"nvext":[{"agent_hints":{"priority":1}}]}', path=("nvext", "agent_hints", "priority"))
@example(body=b'{"nvext":{"x":{"agent_hints":{"priority":1}}}}', path=("nvext", "agent_hints", "priority"))
@example(body=b'{"a":{"a":{"a":1},"b":2},"b":3}', path=("a", "a"))
def test_removing_a_path_gives_the_same_json_without_it_and_cuts_nothing_else(
    body: bytes, path: tuple[str, ...]
) -> None:
    left, right = remove(body, path), without(parsed(body), path)
    assert parsed(left) == right
    assert (left == body) == (right == parsed(body))
    rest = iter(body)
    assert all(byte in rest for byte in left)  # a subsequence: nothing is added, nothing reordered


@settings(max_examples=examples(50))
@given(body=BODIES, value=VALUES)
def test_insert_puts_a_member_first_and_changes_nothing_else(body: bytes, value: str) -> None:
    spliced = insert(body, "priority", value.encode())
    assert parsed(spliced) == Pairs([("priority", parsed(value.encode())), *parsed(body)])
    opening = body.index(b"{") + 1
    assert spliced.startswith(body[:opening])
    assert spliced.endswith(body[opening:])


@each(
    ("body", "left"),
    [
        (b'{"priority":1}', b"{}"),
        (b'{ "priority" : 1 }', b"{  }"),
        (b'{"priority":1,"a":1e400}', b'{"a":1e400}'),
        (b'{"a":1e400 , "priority":1}', b'{"a":1e400}'),
        (
            b'{"a":1,\n  "priority":"x",\n  "b":123456789012345678901234567890}',
            b'{"a":1,\n  "b":123456789012345678901234567890}',
        ),
        (b'{"pr\\u0069ority":1,"b":2}', b'{"b":2}'),
        (b'{"\\u0070\\u0072\\u0069\\u006F\\u0072\\u0069\\u0074\\u0079":1}', b"{}"),
        (
            b'{"a":"\\"priority\\":1","b":["priority"],"c":"\\\\"}',
            b'{"a":"\\"priority\\":1","b":["priority"],"c":"\\\\"}',
        ),
        (b'{"\\\\u0070riority":1}', b'{"\\\\u0070riority":1}'),
        (b"[1]", b"[1]"),
    ],
)
def test_only_the_member_and_one_comma_go(body: bytes, left: bytes) -> None:
    assert remove(body, ("priority",)) == left


def test_keys_that_could_be_mistaken_for_structure_are_refused() -> None:
    with pytest.raises(ValueError, match="identifiers"):
        remove(b'{"a":1}', (",",))


HINT_PATH = ("nvext", "agent_hints", "priority")
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "brackets before": lambda n: b'{"x":[' + b"[]," * n + b'1],"priority":1}',
    "strings before": lambda n: b'{"x":[' + b'"{",' * n + b'1],"priority":1}',
    "members before": lambda n: b"{" + b'"x":1,' * n + b'"priority":1}',
    "escapes": lambda n: b'{"x":"' + b'\\"' * n + b'","priority":1}',
    "white space": lambda n: b'{"x":1' + b" " * n + b"," + b"\n" * n + b'"priority":1' + b" " * n + b"}",
    "a value of brackets": lambda n: b'{"priority":[' + b"[]," * n + b"1]}",
    "a value of strings": lambda n: b'{"priority":[' + b'"}",' * n + b"1]}",
    "the key elsewhere": lambda n: b'{"x":[' + b'{"priority":1},' * n + b'1],"priority":1}',
    "duplicates": lambda n: b"{" + b'"priority":{},' * n + b'"x":1}',
    "duplicates between others": lambda n: b"{" + b'"x":1,"priority":1,' * n + b'"y":1}',
    "duplicated parents": lambda n: b"{" + b'"nvext":{"agent_hints":{"priority":1}},' * n + b'"y":1}',
    "brackets inside": lambda n: b'{"nvext":{"agent_hints":{"x":[' + b"[]," * n + b'1],"priority":1}}}',
}


@each("kind", HOSTILE)
def test_removing_takes_time_in_proportion_to_the_body(kind: str) -> None:
    path = HINT_PATH if "nvext" in HOSTILE[kind](1).decode() else ("priority",)

    def seconds(n: int) -> float:
        body = HOSTILE[kind](n)
        began = time.process_time()
        left = remove(body, path)
        taken = time.process_time() - began
        assert len(left) < len(body)
        return taken

    small = min(seconds(2_000) for _ in range(3))
    assert seconds(40_000) < 150 * small + 0.05  # a quadratic one would take 400 times as long


def test_eight_megabytes_of_brackets_take_no_time_to_speak_of() -> None:
    body = HOSTILE["brackets before"](2_700_000)
    began = time.process_time()
    assert not re.search(rb"priority", remove(body, ("priority",)))
    assert time.process_time() - began < 5  # about 30 ms; a loop over tokens takes ten seconds
