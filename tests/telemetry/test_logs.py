"""The log: a line for what went wrong, none for what went well, never more than a loop can bear, always one line."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanContext

from sidecar import AdmissionMiddleware
from sidecar.events import (
    Admitted,
    Classified,
    Event,
    FirstByte,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.logs.formats import JsonFormatter, TextFormatter
from sidecar.telemetry.logs.request_log import AccessLog, FloodGuard, RequestLog, access_log
from sidecar.telemetry.logs.setup import LineWriter, LogSettings, log_settings, mounted_logging, own_logging
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.support.middleware import CHAT, KEYS, App, Guarded, chat, key, monitor, policy, write_policy
from tests.support.serving import serving
from tests.support.wire import exchange, post
from tests.telemetry.span_stories import begin

TRACE = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_remote=False)
CLASSIFIED = Classified(1, "batch", "acme", "key", None, "chat", "m", 5, False, 10, 1)
ADMITTED = Admitted(3_000_000, 2_000_000, 500_000, 2_500_000, {"high": 5}, 2)
FULL = Refused(5_000_000, "queue_timeout", "no room", 503, 4_000_000, 1_500_000, 3_500_000, {"high": 5})


@contextmanager
def lines(level: str = "info", format: str = "json") -> Iterator[list[str]]:
    """What the process writes while the block runs; the list is filled when it ends."""
    written: list[str] = []
    stream = io.StringIO()
    with own_logging(LogSettings(level, format), stream):
        yield written
    written += stream.getvalue().splitlines()


def tell(log: RequestLog, *events: Event, request_id: str = "mine", trace: SpanContext | None = TRACE) -> None:
    reported = begin(log, Received(0, 10**18, "POST", "/v1/completions", [], request_id), trace)
    for event in events:
        reported(event)


def settled(outcome: Outcome, status: int | None = 200, error: str | None = None) -> Settled:
    return Settled(6_000_000, outcome, status, 25, None, None, error)


def test_a_refusal_is_one_line_with_everything_that_is_known() -> None:
    with lines() as written:
        tell(RequestLog(), CLASSIFIED, FULL)
    (line,) = map(json.loads, written)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "event": "refused",
        "logger": "sidecar.requests",
        "message": "request mine refused with 503 queue_timeout: no room",
        "request_id": "mine",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
        "tier": "batch",
        "tenant": "acme",
        "model": "m",
        "code": "queue_timeout",
        "status": 503,
        "queue_wait_s": 4.0,
        "starvation_s": 1.5,
        "duration_s": 5.0,
        "tokens_asked": 10,
    }


def test_the_access_log_has_every_request_once_at_level_info_and_leaves_none_out() -> None:
    ends: list[tuple[Event, ...]] = [
        (CLASSIFIED, ADMITTED, FirstByte(4_000_000, 200), settled(Outcome.COMPLETED)),
        (CLASSIFIED, ADMITTED, settled(Outcome.CLIENT_LEFT)),
        (CLASSIFIED, ADMITTED, settled(Outcome.FAILED, None, "CancelledError")),
        (Refused(1, "draining", "stopping", 503),),
        *[(CLASSIFIED, FULL)] * 50,
    ]
    with lines() as written:
        log = RequestLog(access=AccessLog.ALL)
        for number, events in enumerate(ends):
            tell(log, *events, request_id=str(number))
        log.flush()
    found = [json.loads(line) for line in written]
    assert [line["request_id"] for line in found] == [str(number) for number in range(len(ends))]
    assert [line["code"] for line in found[:4]] == ["completed", "client_left", "server_stopped", "draining"]
    assert {line["level"] for line in found[:4]} == {"info"}
    first = found[0]
    assert (first["event"], first["status"], first["tier"], first["tenant"]) == ("settled", 200, "batch", "acme")
    assert (first["queue_wait_s"], first["starvation_s"], first["first_byte_s"]) == (2.0, 0.5, 4.0)
    assert (first["duration_s"], first["tokens_asked"], first["tokens_held"], first["tokens_used"]) == (6.0, 10, 10, 25)


@pytest.mark.parametrize("events", [(CLASSIFIED, FULL), (CLASSIFIED, ADMITTED, settled(Outcome.FAILED))])
def test_switched_off_it_has_no_request(events: tuple[Event, ...]) -> None:
    with lines("debug") as written:
        log = RequestLog(access=AccessLog.OFF)
        tell(log, *events)
        log.flush()
    assert written == []


@pytest.mark.anyio
@pytest.mark.parametrize("is_shown", [True, False], ids=["with pages", "without"])
async def test_a_mounted_middleware_has_an_access_log_by_the_environment(tmp_path: Path, is_shown: bool) -> None:
    environment = {"SIDECAR_ACCESS_LOG": "All"}
    with lines() as written:
        sidecar = AdmissionMiddleware(
            App(), write_policy(tmp_path), is_shown=is_shown, environment={**os.environ, **environment}
        )
        async with serving(sidecar) as served:
            for body in (b'{"model":"m","messages":["a"]}', b"["):
                await asyncio.wait_for(exchange(served.port, post(CHAT, body, key("acme"))), 60)
    ended = [found for found in map(json.loads, written) if found["logger"] == "sidecar.requests"]
    assert [(line["event"], line["tier"], line["tenant"]) for line in ended] == [
        ("settled", "normal", "acme"),
        ("refused", "normal", "acme"),
    ]
    assert ended[0].keys() >= {"request_id", "model", "status", "first_byte_s", "duration_s", "tokens_held"}


@pytest.mark.parametrize(
    ("events", "level", "event", "code"),
    [
        ([Refused(1, "invalid_api_key", "unknown", 401)], "info", "refused", "invalid_api_key"),
        ([CLASSIFIED, Refused(9, "client_left", "hung up", None)], "info", "abandoned", "client_left"),
        ([CLASSIFIED, ADMITTED, settled(Outcome.FAILED, 200, "ClientError")], "warning", "failed", "ClientError"),
        ([CLASSIFIED, ADMITTED, settled(Outcome.FAILED, None)], "warning", "failed", "failed"),
        ([CLASSIFIED, ADMITTED, settled(Outcome.COMPLETED, 502)], "warning", "failed", "502"),
    ],
)
def test_what_goes_wrong_is_a_line(events: list[Event], level: str, event: str, code: str) -> None:
    with lines() as written:
        tell(RequestLog(), *events)
    (line,) = map(json.loads, written)
    assert (line["level"], line["event"], line["code"]) == (level, event, code)


def test_a_failure_names_the_engine_of_several_that_failed() -> None:
    with lines() as written:
        tell(RequestLog(), CLASSIFIED, msgspec.structs.replace(ADMITTED, engine="b#2"), settled(Outcome.FAILED))
    (line,) = map(json.loads, written)
    assert line["engine"] == "b#2"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([CLASSIFIED, Refused(1, "draining", "stopping", 503)], "refused with 503 draining: stopping"),
        ([CLASSIFIED, ADMITTED, settled(Outcome.FAILED, 503, "CancelledError")], "failed: the server stopped before"),
    ],
)
def test_requests_of_a_server_that_stops_have_a_line_at_debug_alone(events: list[Any], said: str) -> None:
    """The server says in one line how many they are."""
    with lines("info") as written:
        tell(RequestLog(), *events)
    assert written == []
    with lines("debug") as written:
        tell(RequestLog(), *events)
    assert said in json.loads(written[0])["message"]


@pytest.mark.parametrize(("level", "expected"), [("info", 0), ("debug", 2)])
def test_what_goes_well_is_a_line_for_who_asks_for_it(level: str, expected: int) -> None:
    with lines(level) as written:
        tell(RequestLog(), CLASSIFIED, ADMITTED, FirstByte(4_000_000, 200), settled(Outcome.COMPLETED))
        tell(RequestLog(), CLASSIFIED, ADMITTED, settled(Outcome.CLIENT_LEFT, None))
    found = [json.loads(line) for line in written]
    assert [(line["event"], line["code"]) for line in found] == [
        ("settled", "completed"),
        ("settled", "client_left"),
    ][:expected]
    assert all((line["queue_wait_s"], line["duration_s"], line["tokens_used"]) == (2.0, 6.0, 25) for line in found)


PREEMPTED = (Preempted(4_500_000, 3_000_000, 1), Queued(4_500_000, Obstacle.PREEMPTED, "its room went"))


def test_a_line_tells_how_often_its_request_was_preempted_and_what_that_cost() -> None:
    again = Admitted(5_500_000, 4_500_000, 3_000_000, 2_500_000, {"high": 5}, 2)
    with lines("debug") as written:
        tell(RequestLog(), CLASSIFIED, ADMITTED, *PREEMPTED, again, settled(Outcome.COMPLETED))
    (line,) = map(json.loads, written)
    assert (line["event"], line["preemptions"], line["engine_lost_s"]) == ("settled", 1, 1.5)
    assert (line["queue_wait_s"], line["starvation_s"]) == (4.5, 3.0)


@pytest.mark.parametrize(
    ("end", "event", "message"),
    [
        (
            settled(Outcome.FAILED, 503, "queue_timeout"),
            "refused",
            "request mine refused with 503 queue_timeout: it waited again: its room had gone to another "
            "request, or the engine could not be reached",
        ),
        (
            settled(Outcome.CLIENT_LEFT, None, "client_left"),
            "abandoned",
            "request mine: the client disconnected while the request waited again, preempted",
        ),
        (
            settled(Outcome.FAILED, None, "canceled"),
            "abandoned",
            "request mine: the server gave the request up while it waited again, preempted",
        ),
    ],
)
def test_one_that_is_not_admitted_again_is_a_line_as_of_a_wait_in_vain(end: Settled, event: str, message: str) -> None:
    with lines() as written:
        tell(RequestLog(), CLASSIFIED, ADMITTED, *PREEMPTED, end)
    (line,) = map(json.loads, written)
    assert (line["event"], line["code"], line["message"]) == (event, end.error, message)
    assert (line["preemptions"], line["engine_lost_s"]) == (1, 1.5)
    assert (line["queue_wait_s"], line["starvation_s"]) == (5.0, 3.5)


# -- odd text

ODD = st.text(st.characters() | st.sampled_from('\n\r\x1b\x00\u2028\x85\u202e"\\{}%'), max_size=60)


@given(request_id=ODD, message=ODD, tenant=ODD, code=ODD)
def test_a_line_stays_one_line_and_readable_whatever_is_in_it(
    request_id: str, message: str, tenant: str, code: str
) -> None:
    events = (
        Classified(1, "batch", tenant, "key", None, "chat", "m", 5, False, 10, 1),
        Refused(2, code, message, 503),
    )
    for formatter, stream in ((JsonFormatter(), io.StringIO()), (TextFormatter(), io.StringIO())):
        handler, logger = logging.StreamHandler(stream), logging.Logger("sidecar.odd")
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        tell(RequestLog(logger), *events, request_id=request_id)
        written = stream.getvalue()
        assert written.endswith("\n")
        line = written[:-1]
        assert len(line.splitlines()) == 1
        assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in line)
        line.encode()  # half of a surrogate pair could not be
        if isinstance(formatter, JsonFormatter):
            assert json.loads(line)["event"] == "refused"


def test_a_forged_line_inside_an_exception_does_not_look_like_one() -> None:
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.Logger("sidecar.forged")
    handler.setFormatter(TextFormatter())
    logger.addHandler(handler)
    try:
        raise ValueError("x\n2026-01-01T00:00:00.000Z INFO    started: all is well\x1b[2J")
    except ValueError:
        logger.exception("it broke")
    first, *others = stream.getvalue().splitlines()
    assert re.match(r"\S+ ERROR   defect: it broke$", first)
    assert all(other.startswith("  ") for other in others)
    assert "\x1b" not in stream.getvalue()


def test_a_message_of_a_megabyte_is_cut() -> None:
    with lines() as written:
        tell(RequestLog(), Refused(1, "invalid_body", "x" * 2**20, 400))
    assert len(written[0]) < 1000


def test_other_peoples_fields_are_not_written_and_their_loggers_speak_up_at_warnings() -> None:
    with lines() as written:
        logging.getLogger("somebody").warning("hello %s", "there", extra={"authorization": "sk-secret"})
        logging.getLogger("somebody").info("not this")
    (line,) = map(json.loads, written)
    assert (line["message"], line["event"], line["logger"]) == ("hello there", None, "somebody")
    assert "sk-secret" not in written[0]


# -- floods


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 0.7)), max_size=200), st.integers(1, 4))
def test_everything_is_either_said_or_counted(said: list[tuple[str, float]], lines_per_s: int) -> None:
    clock = Clock()
    flood: FloodGuard[str] = FloodGuard(lines_per_s, clock)
    allowed, counted = 0, 0
    for kind, pause_s in said:
        clock.now_s += pause_s
        allowed += flood.allows(kind)
        if pause_s > 0.6:
            counted += sum(count for _, count in flood.left_out())
    counted += sum(count for _, count in flood.left_out())
    assert allowed + counted == len(said)
    assert flood.left_out() == []


def test_kinds_without_number_do_not_grow_it_without_bound() -> None:
    flood: FloodGuard[str] = FloodGuard(1)
    for number in range(10_000):
        assert flood.allows(str(number))
    assert len(flood._windows) <= 1000


@pytest.mark.anyio
async def test_a_flood_of_refusals_is_a_few_lines_and_a_count_a_second_later() -> None:
    with lines() as written:
        log = RequestLog()
        for _ in range(500):
            tell(log, CLASSIFIED, FULL)
        tell(log, CLASSIFIED, Refused(5, "queue_full", "full", 503))
        await asyncio.sleep(1.2)
    *found, last = map(json.loads, written)
    assert len(found) == 20 + 1
    assert (last["event"], last["left_out"], last["tier"], last["code"]) == ("left_out", 480, "batch", "queue_timeout")


def test_what_is_left_out_at_the_end_is_reported_by_flush() -> None:
    with lines() as written:
        log = RequestLog()
        for _ in range(30):
            tell(log, CLASSIFIED, FULL)
        log.flush()
        log.flush()
    assert [json.loads(line).get("left_out") for line in written][-2:] == [None, 10]


def test_a_flush_after_the_end_waits_for_no_one() -> None:
    writer = LineWriter(io.StringIO())
    writer.end()
    began_s = time.perf_counter()
    writer.flush()
    assert time.perf_counter() - began_s < 0.5


def test_a_message_of_anybody_that_is_said_too_often_is_counted_too() -> None:
    with lines() as written:
        for number in range(1000):
            logging.getLogger("sidecar.proxy.proxy").warning("engine %s", number, extra={"event": "engine_unreachable"})
        logging.getLogger("sidecar.store").warning("store lost", extra={"event": "store_divided"})
    found = [json.loads(line) for line in written]
    assert [line["event"] for line in found] == ["engine_unreachable"] * 20 + ["store_divided", "left_out"]
    assert (found[-1]["left_out"], found[-1]["logger"]) == (980, "sidecar.proxy.proxy")


STALLED = """
import logging, sys, threading, time
from sidecar.telemetry.logs.setup import LogSettings, own_logging
from sidecar.telemetry.logs.setup import LineWriter

if {blocks}:
    LineWriter.emit = logging.StreamHandler.emit
    LineWriter.stream, LineWriter.terminator = sys.stderr, "\\n"
threading.Thread(target=lambda: (time.sleep(10), __import__("os")._exit(3)), daemon=True).start()
with own_logging(LogSettings("debug", "json")):
    for number in range(20_000):
        logging.getLogger("sidecar.requests").warning("request %d refused, and no one reads it", number)
    print("done", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(("blocks", "said"), [(False, b"done\n"), (True, b"")], ids=["ours", "control"])
def test_a_log_that_is_not_read_stops_no_request(blocks: bool, said: bytes) -> None:
    read, write = os.pipe()
    code = STALLED.format(blocks=blocks).replace("sleep(10)", "sleep(3)") if blocks else STALLED.format(blocks=blocks)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write, timeout=20, check=False
        )
    finally:
        os.close(read)
        os.close(write)
    assert ended.stdout == said
    assert ended.returncode == (3 if blocks else 0)


# -- where it goes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_gets_text_and_a_container_json_unless_somebody_says_otherwise() -> None:
    container = io.StringIO()
    assert log_settings({}, stream=Terminal()) == ("info", "text")
    assert log_settings({}, stream=container) == ("info", "json")
    asked = {"SIDECAR_LOG_LEVEL": "Debug ", "SIDECAR_LOG_FORMAT": "text"}
    assert log_settings(asked, stream=container) == ("debug", "text")
    assert log_settings(asked, "error", "json", stream=container) == ("error", "json")


@pytest.mark.parametrize(
    ("variable", "value", "right"),
    [
        ("SIDECAR_LOG_LEVEL", "loud", "debug, info, warning, error"),
        ("SIDECAR_LOG_FORMAT", "xml", "json, text"),
        ("SIDECAR_ACCESS_LOG", "on", "off, failures, all"),
    ],
)
def test_a_wrong_variable_is_said(variable: str, value: str, right: str) -> None:
    read: Any = access_log if variable == "SIDECAR_ACCESS_LOG" else log_settings
    with pytest.raises(ValueError, match=f"{variable}: '{value}' is not one of {right}"):
        read({variable: value})


def test_afterwards_the_process_logs_as_before() -> None:
    root, ours = logging.getLogger(), logging.getLogger("sidecar")
    before = (root.handlers[:], root.level, ours.handlers[:], ours.level, ours.propagate)
    with lines("debug"):
        assert isinstance(root.handlers[0], LineWriter)
    with mounted_logging({"SIDECAR_LOG_LEVEL": "debug"}, io.StringIO()):
        assert isinstance(ours.handlers[0], LineWriter)
    assert (root.handlers[:], root.level, ours.handlers[:], ours.level, ours.propagate) == before


def test_a_warning_of_pythons_is_a_line_of_the_log_and_no_text_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning
    with lines() as written, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old and slow", DeprecationWarning, stacklevel=1)
    (line,) = map(json.loads, written)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "DeprecationWarning: old and slow" in line["message"]
    assert (capsys.readouterr().err, warnings.showwarning) == ("", before)


def test_mounted_the_host_decides_and_gets_every_field(caplog: pytest.LogCaptureFixture) -> None:
    with mounted_logging({}), caplog.at_level(logging.INFO):
        tell(RequestLog(), CLASSIFIED, FULL)
    (record,) = caplog.records
    assert record.getMessage() == "request mine refused with 503 queue_timeout: no room"
    fields: Any = record
    assert (fields.event, fields.tier, fields.trace_id[:4], fields.starvation_s) == ("refused", "batch", "0af7", 1.5)


def test_mounted_and_asked_by_a_variable_ours_go_to_standard_error(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with mounted_logging({"SIDECAR_LOG_FORMAT": "text"}, stream):
        tell(RequestLog(), CLASSIFIED, FULL)
        logging.getLogger("somebody").error("not ours")
    (line,) = stream.getvalue().splitlines()
    assert re.match(r"\S+ WARNING refused: request mine refused with 503 queue_timeout: no room  trace_id=0af7", line)
    assert "tier=batch" in line
    assert "status=503" not in line  # the message says it
    assert [record.name for record in caplog.records] == ["somebody"]


# -- at the sidecar


@pytest.mark.anyio
async def test_a_sidecar_logs_refusals_and_departures_and_neither_keys_nor_prompts() -> None:
    prompt = "the secret prompt " * 10
    app = App(is_held=True)
    with lines() as written:
        guarded = Guarded(app, policy(requests="1", max_requests="0"))
        guarded_log = RequestLog()
        monitor(guarded.sidecar, EventDispatcher(RequestTracer(), [guarded_log]))
        async with serving(guarded.sidecar) as guarded.served:
            holding = asyncio.create_task(guarded.ask(chat(), key("acme")))
            await guarded.until(leases=1)
            for body, headers in (
                (chat(messages=prompt), [key("acme")]),
                (chat(messages=[{"role": "user", "content": prompt}]), [key("nightly"), "x-request-id: i-was-refused"]),
                (chat(messages=[{"role": "user", "content": prompt}]), ["authorization: Bearer sk-wrong-key"]),
                (prompt.encode(), [key("acme")]),
                (chat(messages=[], max_tokens=prompt), [key("acme")]),
            ):
                assert (await guarded.ask(body, *headers)).status >= 400
            app.release()
            assert (await holding).status == 200
        guarded_log.flush()
    found = [json.loads(line) for line in written]
    assert [(line["code"], line["status"]) for line in found] == [
        ("invalid_body", 400),
        ("queue_full", 503),
        ("invalid_api_key", 401),
        ("invalid_body", 400),
        ("invalid_body", 400),
    ]
    assert (found[1]["request_id"], found[1]["tier"], found[1]["tenant"]) == ("i-was-refused", "batch", "nightly")
    assert [line.get("tenant") for line in found] == ["acme", "nightly", None, "acme", "acme"]
    everything = "\n".join(written)
    assert not any(secret in everything for secret in ("secret prompt", "sk-wrong-key", *KEYS.values()))
