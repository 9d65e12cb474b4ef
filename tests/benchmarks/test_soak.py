"""What a soak finds when something is off: each of its checks fails for what it is there for, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.soak.clients import ADMITTED, LEFT, LOST, REFUSED, Answer, Ledger
from benchmarks.soak.judging import Verdict, accounting, no_defects, nothing_left, steadiness
from benchmarks.soak.watching import Counted, Sample
from tests.support.each import each

pytestmark = pytest.mark.long

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-admission-tier: low\r\ntransfer-encoding: chunked\r\n\r\n"
)
COMMENT = b"b\r\n: waiting\n\n\r\n"
PAGE = """\
# TYPE admission_admitted_total counter
admission_admitted_total{admission_pool="soak",admission_tier="high"} 7.0
# TYPE admission_refused_total counter
admission_refused_total{admission_pool="soak",admission_reason="queue_full",admission_tier="high"} 2.0
# TYPE admission_abandoned_total counter
admission_abandoned_total{admission_pool="soak",admission_reason="client_left",admission_tier="high"} 1.0
# TYPE admission_settled_total counter
admission_settled_total{admission_outcome="completed",admission_pool="soak",admission_tier="high"} 6.0
admission_settled_total{admission_outcome="failed",admission_pool="soak",admission_tier="high"} 1.0
"""


def books() -> tuple[Ledger, Counted]:
    """Of ten requests: two of three clients that left did not know that they had been admitted."""
    ledger, counted = Ledger(), Counted()
    counted.add(PAGE)
    for ended, number in ((ADMITTED, 5), (REFUSED, 2), (LEFT, 3)):
        for _ in range(number):
            ledger.count("high", ended)
    return ledger, counted


def failed(verdicts: list[Verdict]) -> list[str]:
    return [one.what for one in verdicts if one.is_so is False]


def test_books_that_agree_are_in_order() -> None:
    assert failed(accounting(*books())) == []


def admitted_more(ledger: Ledger, counted: Counted) -> None:
    counted.admitted["high"] += 1
    counted.settled["high"] += 1


def one_never_settled(ledger: Ledger, counted: Counted) -> None:
    counted.settled["high"] -= 1


def one_not_counted(ledger: Ledger, counted: Counted) -> None:
    ledger.count("high", LEFT)


def a_refusal_taken_for_an_admission(ledger: Ledger, counted: Counted) -> None:
    counted.refused["high"] -= 1
    counted.abandoned["high"] += 1


def in_another_tier(ledger: Ledger, counted: Counted) -> None:
    counted.abandoned["high"] -= 1
    counted.abandoned["low"] += 1


def one_without_an_end(ledger: Ledger, counted: Counted) -> None:
    ledger.ended["high", LEFT] -= 1
    ledger.ended["high", LOST] += 1


@each(
    "fault",
    [admitted_more, one_never_settled, one_not_counted, a_refusal_taken_for_an_admission, in_another_tier,
     one_without_an_end],
)  # fmt: skip
def test_books_that_do_not_agree_are_found_out(fault: Callable[[Ledger, Counted], None]) -> None:
    ledger, counted = books()
    fault(ledger, counted)
    assert failed(accounting(ledger, counted))


def test_who_left_before_its_tier_was_known_is_missed_by_no_tier() -> None:
    ledger, counted = books()
    ledger.count("low", LEFT)
    counted.abandoned[""] += 1
    assert failed(accounting(ledger, counted)) == []
    counted.abandoned[""] += 1
    assert failed(accounting(ledger, counted))


def test_what_is_left_and_what_was_logged_count() -> None:
    assert nothing_left([]).is_so
    assert not nothing_left(["replica 0: 1 leases"]).is_so
    assert no_defects({}).is_so
    assert not no_defects({"telemetry failed": 1}).is_so


def samples(
    *, growth_mib: float = 0.0, peak_mib: float = 0.0, handles: int = 20, seconds: float = 1800
) -> list[Sample]:
    found = [Sample(at_s, 70 + growth_mib * at_s / seconds, 20, 7) for at_s in range(0, int(seconds), 5)]
    middle = found[len(found) // 2]
    found[len(found) // 2] = Sample(middle.at_s, middle.rss_mib + peak_mib, 300, 7)
    return [*found, Sample(seconds, 70 + growth_mib, handles, 7)]


def test_memory_and_files_that_stay_are_steady() -> None:
    assert failed(steadiness("replica", samples(growth_mib=1.0, peak_mib=5.0), 1800)) == []


@pytest.mark.parametrize(
    ("off", "what"),
    [({"growth_mib": 10.0}, "memory"), ({"peak_mib": 30.0}, "memory"), ({"handles": 40}, "open files")],
)
def test_memory_and_files_that_grow_are_found_out(off: dict[str, float], what: str) -> None:
    (found,) = failed(steadiness("replica", samples(**off), 1800))  # type: ignore[arg-type]
    assert what in found


def test_a_short_soak_does_not_judge_memory() -> None:
    verdicts = steadiness("replica", samples(growth_mib=30, seconds=120), 120)
    assert [one.is_so for one in verdicts] == [None, True, True]


@each(
    ("received", "is_admitted", "code"),
    [
        (HEAD + COMMENT, False, None),
        (HEAD + COMMENT + b'8f\r\ndata: {"choices":[{"delta":{}}]}\n\n\r\n', True, None),
        (HEAD + COMMENT + b'40\r\ndata: {"error":{"message":"full","code":"queue_timeout"}}\n\n\r\n0\r\n\r\n', False,
         "queue_timeout"),
        (HEAD + COMMENT + b'40\r\ndata: {"error":{"message":"gone","code":"engine_unreachable"}}\n\n\r\n', True,
         "engine_unreachable"),
        (b'HTTP/1.1 200 OK\r\nx-admission-wait-ms: 3\r\n\r\n{"usage":{}}', True, None),
        (b'HTTP/1.1 503 S\r\nretry-after-ms: 1500\r\n\r\n{"error":{"code":"queue_full"}}', False, "queue_full"),
        (b'HTTP/1.1 502 B\r\nx-admission-wait-ms: 3\r\n\r\n{"error":{"code":"engine_unreachable"}}', True,
         "engine_unreachable"),
        (b"", False, None),
    ],
)  # fmt: skip
def test_a_client_can_tell_how_its_request_ended(received: bytes, is_admitted: bool, code: str | None) -> None:
    answer = Answer()
    answer.received += received
    assert answer.is_admitted() == is_admitted
    assert answer.code() == code


def test_a_stream_without_its_last_chunk_was_broken_off() -> None:
    answer = Answer()
    answer.received += HEAD + COMMENT
    assert answer.is_broken_off()
    answer.received += b"0\r\n\r\n"
    assert not answer.is_broken_off()
