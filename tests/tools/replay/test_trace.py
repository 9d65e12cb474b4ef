"""Traces as people have them: real ones, ready-made ones, and files that are none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.tools.replay.trace import HEAD, MOST_PROBLEMS, BadTrace, Trace, TraceRow, read_trace

REAL = Path(__file__).parent / "traces"


def written(folder: Path, *lines: str | bytes | dict[str, Any], newline: bytes = b"\n", name: str = "trace") -> str:
    path = folder / name
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(newline.join(text.encode() if isinstance(text, str) else text for text in texts))
    return str(path)


def rows(folder: Path, *lines: str | bytes | dict[str, Any]) -> list[TraceRow]:
    return list(read_trace(written(folder, *lines)).rows)


def problem(folder: Path, *lines: str | bytes | dict[str, Any]) -> str:
    """What is said about the file, without its name."""
    name = written(folder, *lines)
    with pytest.raises(BadTrace) as caught:
        read_trace(name)
    text = str(caught.value)
    assert text.startswith(name)
    return text.replace(name, "")


def test_a_mooncake_trace_is_known_from_its_content() -> None:
    trace = read_trace(str(REAL / "mooncake.jsonl"))
    assert (trace.format, len(trace.rows)) == ("mooncake_trace", 60)
    first = trace.rows[0]
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 6758, 500)
    assert first.hash_ids == tuple(range(14))
    assert trace.rows[-1].at_s == pytest.approx(
        json.loads((REAL / "mooncake.jsonl").read_text().splitlines()[-1])["timestamp"] / 1000
    )


def test_an_azure_trace_is_known_from_its_content_and_counts_from_its_first_request() -> None:
    trace = read_trace(str(REAL / "azure.csv"))
    assert (trace.format, len(trace.rows)) == ("Azure CSV", 60)
    assert (trace.rows[0].at_s, trace.rows[0].input_tokens, trace.rows[0].output_tokens) == (0.0, 4808, 10)
    assert trace.rows[1].at_s == pytest.approx(0.052)


def test_azure_times_of_2024_have_a_zone(tmp_path: Path) -> None:
    found = rows(tmp_path, HEAD, "2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 02:00:01.009930+02:00,10,6")
    assert [row.at_s for row in found] == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_byte_order_marks_line_ends_and_empty_lines_are_let_by(tmp_path: Path, newline: bytes, start: bytes) -> None:
    jsonl = written(tmp_path, start + b'{"input_length": 3, "timestamp": 4}', b"", b"  ", newline=newline)
    csv = written(tmp_path, start + HEAD.encode(), b"2023-11-16 18:17:03,4,5", b"", newline=newline, name="csv")
    assert [row.input_tokens for name in (jsonl, csv) for row in read_trace(name).rows] == [3, 4]


def test_all_that_aiperf_reads_in_a_row(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hi"}
    found = rows(
        tmp_path,
        {"timestamp": 1000, "input_length": 600, "hash_ids": [4, 5], "type": "mooncake_trace", "note": [1]},
        {"timestamp": 1500.5, "text_input": "Hello", "output_length": 4, "session_id": "a"},
        {"session_id": "a", "input_length": 2, "delay": 250},
        {"timestamp": 3000, "messages": [message], "tools": [{"type": "function"}], "extra": {"top_k": 1}},
        {"timestamp": 3000, "messages": [message], "message_mode": "delta", "session_id": 7},
        {"timestamp": 4000, "payload": {"prompt": "x", "max_tokens": 3}},
    )
    assert [row.at_s for row in found] == [0.0, 0.5005, None, 2.0, 2.0, 3.0]
    assert (found[0].hash_ids, found[0].session) == ((4, 5), None)
    assert (found[1].text, found[1].output_tokens, found[1].session) == ("Hello", 4, "a")
    assert (found[2].delay_s, found[2].is_delta) == (0.25, True)
    assert (found[3].messages, found[3].extra, found[3].is_delta) == ([message], {"top_k": 1}, False)
    assert (found[4].is_delta, found[4].session) == (True, "7")
    assert (found[5].payload, found[5].is_delta) == ({"prompt": "x", "max_tokens": 3}, False)


def test_a_tier_may_stand_in_the_row_or_in_its_extra_and_does_not_go_into_the_body(tmp_path: Path) -> None:
    found = rows(
        tmp_path,
        {"input_length": 1, "priority": "high"},
        {"input_length": 1, "tier": "batch", "priority": None},
        {"input_length": 1, "extra": {"priority": 0.5, "top_k": 3}},
        {"input_length": 1, "extra": {"tier": "low"}},
        {"input_length": 1},
    )
    assert [row.priority for row in found] == ["high", "batch", 0.5, "low", None]
    assert [row.extra for row in found] == [{}, {}, {"top_k": 3}, {}, {}]


def test_without_any_time_everything_is_sent_at_once(tmp_path: Path) -> None:
    assert [row.at_s for row in rows(tmp_path, {"input_length": 1}, {"input_length": 2})] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0, "input_len', ":2: no JSON object of the right form: Input data was truncated"),
        ('{"timestamp": NaN, "input_length": 3}', ":2: no JSON object of the right form: JSON is malformed"),
        ('{"timestamp": 0, "input_length": 1e999}', ":2: "),
        ('{"timestamp": -1, "input_length": 3}', ":2: timestamp: expected `float` >= 0.0"),
        ('{"timestamp": 1e300, "input_length": 3}', ":2: timestamp: expected `float` <= 1"),
        ('{"timestamp": 0, "input_length": 0}', ":2: input_length: expected `int` >= 1"),
        ('{"timestamp": 0, "input_length": 99999999999999999999}', ":2: input_length: "),
        ('{"timestamp": 0, "input_length": 2.5}', ":2: input_length: expected `int | null`, got `float`"),
        ('{"timestamp": 0, "input_length": 3, "output_length": "4"}', ":2: output_length: expected `int"),
        ('{"timestamp": 0}', ":2: it has no prompt; a row has one of input_length, text_input, messages, payload"),
        ('{"timestamp": 0, "input_length": 3, "text_input": "x"}', ":2: it has input_length and text_input; a row"),
        ('{"timestamp": 0, "input_length": 513, "hash_ids": [1]}', ":2: hash_ids: 1 of them, but an input_length"),
        ('{"timestamp": 0, "text_input": "x", "hash_ids": [1]}', ":2: hash_ids: only rows with input_length have them"),
        ('{"timestamp": 0, "messages": []}', ":2: messages: write at least one, each with a role"),
        ('{"timestamp": 0, "messages": [{"content": "x"}]}', ":2: messages: write at least one, each with a role"),
        ('{"timestamp": 0, "input_length": 1, "tools": [1]}', ":2: tools: only rows with messages have them"),
        ('{"timestamp": 0, "payload": {}}', ":2: payload: is empty"),
        ('{"timestamp": 0, "input_length": 1, "message_mode": "delta"}', ':2: message_mode: "delta" is for'),
        ('{"timestamp": 0, "input_length": 1, "priority": true}', ":2: priority: true is no tier"),
        ('{"timestamp": 0, "input_length": 1, "priority": ["high"]}', ':2: priority: ["high"] is no tier'),
        ('{"timestamp": 0, "input_length": 1, "tier": "a", "priority": "b"}', ':2: priority: ["a","b"] is no tier'),
        ('{"input_length": 3}', ":2: timestamp: is missing"),
        ("[1, 2]", ":2: no JSON object of the right form: Expected `object`, got `array`"),
        ("[" * 100_000, ":2: "),
        (b'{"timestamp": 0, "text_input": "\xff"}', ":2: byte 33 is no UTF-8"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_row_is_said_with_its_number(tmp_path: Path, line: str | bytes, said: str) -> None:
    text = problem(tmp_path, '{"timestamp": 0, "input_length": 1}', line)
    assert text.startswith(said)
    assert "\n" not in text
    assert len(text) < 300


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2023-11-16 18:17:03.97,4808", ":2: 2 fields; each line has three: TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("yesterday,4808,10", ":2: TIMESTAMP: 'yesterday' is no time like 2023-11-16 18:17:03.9799600"),
        ("2023-13-16 18:17:03.97,4808,10", ":2: TIMESTAMP: "),
        ("2023-11-16 18:17:03.97,-1,10", ":2: ContextTokens: '-1' is no number of tokens"),
        ("2023-11-16 18:17:03.97,1,nan", ":2: GeneratedTokens: 'nan' is no number of tokens"),
        ("2023-11-16 18:17:03.97,1," + "9" * 5000, ":2: GeneratedTokens: "),
        ("2023-11-16 18:17:03.97,1,0", ":2: GeneratedTokens: '0' is no number of tokens, from 1"),
        (b"2023-11-16 18:17:03.97,1,\xff", ":2: byte 26 is no UTF-8"),
    ],
)
def test_a_line_of_azure_that_is_none_is_said_with_its_number(tmp_path: Path, line: str | bytes, said: str) -> None:
    text = problem(tmp_path, HEAD, line)
    assert text.startswith(said)
    assert "\n" not in text


@pytest.mark.parametrize("content", ["", "\n \n", HEAD, "\ufeff"])
def test_a_file_without_a_request_is_said_so(tmp_path: Path, content: str) -> None:
    assert ": no request in it; write mooncake_trace JSONL, or Azure's CSV" in problem(tmp_path, content)


@pytest.mark.parametrize("content", [b"PK\x03\x04\x00rest", b"hello", b"time,tokens\n1,2", b"[]"])
def test_a_file_that_is_no_trace_is_said_so(tmp_path: Path, content: bytes) -> None:
    assert problem(tmp_path, content).startswith(":1: this is the first line of no trace that is known")


def test_every_mistake_is_reported_at_once_but_not_a_thousand_times(tmp_path: Path) -> None:
    good = {"timestamp": 0, "input_length": 1}
    assert problem(tmp_path, good, "{", good, "}").count("\n") == 1
    text = problem(tmp_path, good, *["{"] * 1000)
    assert text.count("\n") == MOST_PROBLEMS
    assert text.endswith(f": and {1000 - MOST_PROBLEMS} more")


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    name = written(tmp_path, *[{"timestamp": n, "input_length": 1} for n in range(5)], "{")
    assert len(read_trace(name, 5).rows) == 5
    with pytest.raises(BadTrace, match=":6: "):
        read_trace(name, 6)


def test_a_trace_of_years_is_refused(tmp_path: Path) -> None:
    text = problem(tmp_path, *[{"timestamp": at, "input_length": 1} for at in (0, 1e14)])
    assert text.endswith(": it lasts more than a week; timestamps are milliseconds")


def test_a_path_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadTrace, match="cannot be read"):
            read_trace(str(path))


def burst(name: str, limit: int | None = None) -> Trace:
    return read_trace(name, limit)


def test_the_burst_is_built_in() -> None:
    assert {row.at_s for row in burst("burst").rows} == {0.0}
    assert len(burst("burst").rows) == 120
    assert len(burst("burst:7").rows) == 7
    assert len(burst("burst:7", 3).rows) == 3
    assert {(row.input_tokens, row.output_tokens) for row in burst("burst:7:300:9").rows} == {(300, 9)}


@pytest.mark.parametrize("name", ["burst:0", "burst:999999999", "burst:5:0:1"])
def test_a_burst_that_is_none_is_said_so(name: str) -> None:
    with pytest.raises(BadTrace, match="write burst:REQUESTS"):
        burst(name)


@pytest.mark.parametrize("name", ["burst:", "burst:x", "burst:1:2", "burst:" + "9" * 5000])
def test_what_is_no_burst_is_a_file_that_is_not_there(name: str) -> None:
    with pytest.raises(BadTrace, match=r"cannot be read.*write burst:REQUESTS"):
        burst(name)


@settings(max_examples=300)
@given(st.binary(max_size=120) | st.binary(max_size=60).map(lambda data: b'{"input_length": 3, ' + data))
def test_no_file_at_all_makes_it_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    with contextlib.suppress(BadTrace):
        assert read_trace(str(path)).rows
