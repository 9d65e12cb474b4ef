"""What is counted of requests that were preempted: each of them once, and what the engine did for nothing."""

import msgspec
import pytest

from sidecar.events import FirstByte, Outcome
from tests.telemetry.measuring import Measuring
from tests.telemetry.span_stories import (
    ARRIVAL_US,
    TWICE_PREEMPTED,
    admitted,
    begin,
    classified,
    in_vain,
    preempted,
    received,
    settled,
)

BATCH = ("default", "batch")


@pytest.fixture
def measuring():
    return Measuring()


def play(listener, *events):
    tell = begin(listener, received(), None)
    for event in events:
        tell(event)
    return tell


def test_preemptions_and_the_engine_time_that_they_cost_are_counted_by_the_victims_tier(measuring):
    listener = measuring.requests(tiers=["high", "batch"])
    assert measuring.values("admission.preemptions") == {("default", "high"): 0, BATCH: 0}
    assert measuring.values("admission.preempted.engine_time") == {("default", "high"): 0, BATCH: 0}

    play(listener, *TWICE_PREEMPTED)
    play(listener, classified(), admitted(), *preempted(500_060, 60))

    assert measuring.values("admission.preemptions") == {("default", "high"): 0, BATCH: 3}
    assert measuring.values("admission.preempted.engine_time") == {("default", "high"): 0, BATCH: 3.0}


def test_a_request_is_counted_once_however_often_it_was_preempted(measuring):
    play(measuring.requests(), *TWICE_PREEMPTED)

    assert measuring.values("admission.admitted") == {BATCH: 1}
    assert measuring.values("admission.settled") == {("completed", *BATCH): 1}
    assert measuring.values("admission.tokens.estimated") == {BATCH: 800}
    assert measuring.values("admission.tenant.admitted") == {("default", "acme"): 1}
    assert measuring.sums("admission.queue_wait") == {("admitted", *BATCH): (1, 5.99995)}
    assert measuring.sums("admission.starvation") == {("admitted", *BATCH): (1, 3.0)}
    assert measuring.sums("admission.time_to_first_token") == {BATCH: (1, 6.2)}


def test_the_wait_of_one_that_may_be_preempted_is_reported_when_it_may_no_longer_be(measuring):
    tell = play(measuring.requests(), classified(preemptible=True), admitted(2_000_000, 1_900_000))
    assert measuring.values("admission.admitted") == {BATCH: 1}
    assert measuring.sums("admission.queue_wait") == {}

    tell(FirstByte(ARRIVAL_US + 2_500_000, 200))
    assert measuring.sums("admission.queue_wait") == {("admitted", *BATCH): (1, 1.9)}
    tell(settled(3_000_000))
    assert measuring.sums("admission.queue_wait") == {("admitted", *BATCH): (1, 1.9)}


def test_an_answer_without_a_byte_tells_of_its_wait_in_the_end(measuring):
    play(measuring.requests(), classified(preemptible=True), admitted(2_000_000, 1_900_000), settled(3_000_000))

    assert measuring.sums("admission.queue_wait") == {("admitted", *BATCH): (1, 1.9)}


def test_a_policy_that_changed_meanwhile_does_not_have_a_wait_counted_twice(measuring):
    not_known = (msgspec.structs.replace(TWICE_PREEMPTED[0], preemptible=False), *TWICE_PREEMPTED[1:])
    play(measuring.requests(), *not_known)

    assert measuring.sums("admission.queue_wait") == {("admitted", *BATCH): (1, 0.99995)}


@pytest.mark.parametrize(
    ("code", "status", "decision"),
    [("queue_timeout", 503, "refused"), ("client_left", None, "client_left"), ("canceled", None, "canceled")],
)
def test_one_that_is_not_admitted_again_is_admitted_and_settled_and_nothing_else(measuring, code, status, decision):
    listener = measuring.requests()
    first = admitted(100, 50, starvation_us=20, served_ahead={"high": 900})
    end = in_vain(9_000_100, code, status)
    play(listener, classified(preemptible=True), first, *preempted(4_000_100, 100), end)

    assert measuring.values("admission.admitted") == {BATCH: 1}
    assert measuring.values("admission.settled") == {(end.outcome.value, *BATCH): 1}
    assert measuring.values("admission.refused") == measuring.values("admission.abandoned") == {}
    assert measuring.values("admission.tenant.refused") == {("default", "acme"): 0}
    assert measuring.values("admission.tokens.used") == {BATCH: 0}
    assert measuring.values("admission.preempted.engine_time") == {BATCH: 4.0}
    assert measuring.sums("admission.queue_wait") == {(decision, *BATCH): (1, 9.00005)}
    assert measuring.sums("admission.starvation") == {(decision, *BATCH): (1, 9.00002)}
    assert listener.held() == {}


def test_one_that_the_server_gave_up_before_it_stood_in_line_again_holds_nothing(measuring):
    listener = measuring.requests()
    given_up, _ = preempted(500, 60)
    play(listener, classified(), admitted(), given_up, in_vain(600, "canceled", None))

    assert listener.held() == {}


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("times", [0, 1, 2])
def test_every_request_is_admitted_refused_or_abandoned_once(measuring, outcome, times):
    lost = TWICE_PREEMPTED[2 : 2 + 3 * times]
    play(measuring.requests(), *TWICE_PREEMPTED[:2], *lost, admitted(6_000_000, 5_999_950), settled(7_000_000, outcome))

    counted = [measuring.values(f"admission.{name}") for name in ("admitted", "refused", "abandoned")]
    assert sum(sum(values.values()) for values in counted) == 1
    assert sum(measuring.values("admission.settled").values()) == 1
