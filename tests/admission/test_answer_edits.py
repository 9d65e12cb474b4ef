"""Edits of an answer's members on the way to the client: exact, wherever the answer is cut, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.admission import answer_edits
from sidecar.admission.answer_edits import LARGEST_EDITED, AnswerEditor, Edit, edited
from tests.support.each import each

JSON = (b"content-type", b"application/json; charset=utf-8")
STREAM = (b"content-type", b"text/event-stream")
TIER = Edit(("service_tier",), b'"flex"', "choices")
MODEL = Edit(("model",), b'"alias"')
NESTED = Edit(("response", "usage", "service_tier"), b'"flex"', "output_tokens")
EDITS = (TIER, MODEL, NESTED)


class Client:
    """What a client sees of an answer in pieces: all of them sent, or those that can be written at once."""

    def __init__(
        self,
        pieces: Iterable[Any],
        head: Any = (STREAM,),
        *,
        status: int = 200,
        edits: Any = EDITS,
        writes: bool = False,
    ) -> None:
        self.head: Any = None
        self.bodies: list[bytes] = []
        editor = AnswerEditor(self.send, edits)
        editor.send({"type": "http.response.start", "status": status, "headers": [*head]})
        for piece in pieces:
            if not (writes and piece and editor.write(self.write, piece)):
                editor.send({"type": "http.response.body", "body": piece, "more_body": True})
        editor.send({"type": "http.response.body", "more_body": False})
        self.body = b"".join(self.bodies)

    def send(self, message: Any) -> Any:
        if message["type"] == "http.response.start":
            self.head = message["headers"]
        else:
            self.bodies.append(message.get("body", b""))

    def write(self, body: bytes) -> bool:
        self.bodies.append(body)
        return True


def expected(value: Any) -> Any:
    """The literal meaning of EDITS."""
    if not isinstance(value, dict):
        return value
    value = {**value}
    if "service_tier" in value or "choices" in value:
        value["service_tier"] = "flex"
    if "model" in value:
        value["model"] = "alias"
    response = value.get("response")
    if isinstance(response, dict) and isinstance(response.get("usage"), dict):
        usage = response["usage"]
        if "service_tier" in usage or "output_tokens" in usage:
            value["response"] = {**response, "usage": {**usage, "service_tier": "flex"}}
    return value


@each(
    ("before", "after"),
    [
        ("The model `llama-3` does not exist.", "The model `gpt` does not exist."),
        ("llama-3 is full. Ask llama-3.", "gpt is full. Ask gpt."),
        ("llama-3.1, my-llama-3, llama-3-8b, llama-30, /llama-3, llama-3:x, Llama-3", None),
    ],
)
def test_an_error_names_the_clients_model(before: str, after: str | None) -> None:
    error = json.dumps({"error": {"message": before, "model": "x"}}).encode()
    shown = json.dumps({"error": {"message": after or before, "model": "x"}}).encode()
    renaming = Edit(("model",), b'"gpt"', instead_of="llama-3")
    for pieces in ([error], [error[:31], error[31:]]):
        assert Client(pieces, [JSON], status=404, edits=[renaming]).body == shown
    assert Client([error], [JSON], status=404, edits=[MODEL]).body == error


NAMES = st.sampled_from(["service_tier", "choices", "model", "response", "usage", "output_tokens", "é\n", "data: {}"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just('data: {"model":1}\n\n'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
CUTS = st.lists(st.integers(0, 2000), max_size=8)


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(body)) for place in cuts), len(body)]
    return [body[start:end] for start, end in zip(places, places[1:], strict=False)]  # noqa: RUF007


@given(st.dictionaries(NAMES, VALUES, max_size=6) | VALUES, CUTS, st.booleans())
def test_a_whole_answer_is_edited_wherever_it_is_cut(value: Any, cuts: list[int], is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii, indent=1).encode()
    shown = Client(cut(body, cuts), (JSON, (b"Content-Length", b"9")))
    assert json.loads(shown.body) == expected(value)
    assert shown.head == [JSON]
    if expected(value) == value and "model" not in str(value) and "tier" not in str(value):
        assert shown.body == body


@given(
    st.lists(st.dictionaries(NAMES, VALUES, max_size=6), max_size=4),
    CUTS,
    st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"]),
    st.sampled_from(["data: ", "data:", "data: \t ", "event: x\ndata: ", "event: x\rdata: "]),
    st.booleans(),
)
def test_each_event_is_edited_wherever_a_stream_is_cut(
    values: list[Any], cuts: list[int], end: str, begin: str, writes: bool
) -> None:
    others = [": a comment", "data: [DONE]", "data: no object {", "data: {broken", 'id: {"model": 1}', "data: {}x}"]
    lines = [begin + json.dumps(value) for value in values]
    body = end.join([*lines, *others, *lines]).encode()
    shown = Client(cut(body, cuts), writes=writes).body.decode().split(end)
    own = len(lines)
    assert shown[own : own + len(others)] == others
    found = [json.loads(event[len(begin) :]) for event in (*shown[:own], *shown[own + len(others) :])]
    assert found == [expected(value) for value in (*values, *values)]


def test_every_other_byte_of_a_value_stays() -> None:
    body = b'{"id": "\\u00e9\\/", "n": 1.50e+3, "model" : "x", "choices":[ {"model": "x"} , 1e400]}'
    assert edited(body, [MODEL]) == (
        b'{"id":"\\u00e9\\/","n":1.50e+3,"model":"alias","choices":[ {"model": "x"} , 1e400]}'
    )


@each(
    "body",
    [b"", b"[1]", b'"a"', b"{", b'{"model":', b'{"model":1}x', b'{"model": NaN}', b"\xff", b'{"a' * 5, b"[" * 99_999],
)
def test_what_is_no_object_stays(body: bytes) -> None:
    assert edited(body, EDITS) == body
    assert Client([body], (JSON,)).body == body
    assert Client([b"data: " + body + b"\n\n"]).body == b"data: " + body + b"\n\n"


def test_an_answer_of_another_kind_passes_with_its_length_as_it_comes() -> None:
    body, length = b'{"model":"x"}', (b"content-length", b"13")
    for head, status in (
        ([(b"content-type", b"text/plain"), length], 200),
        ([JSON, length, (b"content-encoding", b"gzip")], 200),
        ([STREAM, (b"Content-Encoding", b"gzip")], 200),
        ([JSON, length], 400),
        ([JSON, length], 503),
        ([length], 200),
        ([(b"content-type", b"application/json-seq"), length], 200),
        ([(b"content-type", b"application/jsonl; charset=utf-8")], 200),
    ):
        shown = Client([body[:5], body[5:]], head, status=status)
        assert (shown.head, shown.bodies[:2]) == (head, [body[:5], body[5:]])


def test_what_is_too_large_passes_as_it_is_and_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_edits, "LARGEST_EDITED", 100)
    pieces = [b'{"model":"' + b"x" * 60, b"y" * 60, b"z", b'"}']
    shown = Client(pieces, (JSON,))
    assert shown.bodies[:4] == [b"", pieces[0] + pieces[1], b"z", b'"}']
    line = b"data: " + b"".join(pieces)
    shown = Client([line[:80], line[80:140], line[140:], b'\ndata: {"model":"x"}', b"\n\n"], writes=True)
    assert shown.bodies[:2] == [b"", line[:140]]
    assert shown.body == line + b'\ndata: {"model":"alias"}\n\n'
    shown = Client([line[:140], line[140:], b'"', b"}\n"])  # the rest of a line does not wait
    assert shown.bodies == [line[:140], line[140:], b'"', b"}\n", b""]
    # The rest of a line is no line, whatever it looks like.
    shown = Client([line[:140], b'data: {"model":"x"}\ndata: {"model":"x"}\n\n'], writes=True)
    assert shown.body == line[:140] + b'data: {"model":"x"}\ndata: {"model":"alias"}\n\n'
    assert LARGEST_EDITED > 1e6


@each("end", [b"\n", b"\r", b"\r\n"])
@each("before", [b"data:", b"data: ", b"data:  \t"])
def test_a_line_of_any_spelling_is_edited_and_passes_when_its_end_has_come(before: bytes, end: bytes) -> None:
    line, shown = before + b'{"model":"x"}', before + b'{"model":"alias"}'
    for after in (b"", b" \t"):
        pieces = [b"id: 1" + end + line + after + end, end + b'xdata: {"model":"x"}' + end + line[:9], line[9:] + end]
        for writes in (False, True):
            client = Client(pieces, writes=writes)
            assert client.bodies[0] == b"id: 1" + end + shown + after + end
            assert client.bodies[:-1] == [client.bodies[0], end + b'xdata: {"model":"x"}' + end, shown + end]


def test_whole_lines_are_written_at_once_and_a_refused_write_changes_nothing() -> None:
    sent: list[Any] = []
    editor = AnswerEditor(sent.append, [MODEL])  # type: ignore[arg-type]
    editor.send({"type": "http.response.start", "status": 200, "headers": [STREAM]})
    line, shown = b'data: {"model":"x"}\n\n', b'data: {"model":"alias"}\n\n'
    written: list[bytes] = []
    assert not editor.write(lambda _: False, line)
    assert not editor.write(partial(_keep, written), line[:-3])
    editor.send({"type": "http.response.body", "body": memoryview(line), "more_body": True})
    assert editor.write(partial(_keep, written), line)
    editor.send({"type": "http.response.body", "body": b"", "more_body": True})
    assert (written, [message.get("body") for message in sent]) == ([shown], [None, shown, b""])


def _keep(written: list[bytes], body: bytes) -> bool:
    written.append(body)
    return True
