"""What is kept of requests that were preempted: found once, and never in their own way."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.events import Admitted, Classified, Event, Obstacle, Outcome, Preempted, Queued, Received, Settled
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.request_record import RequestRecord
from tests.telemetry.span_stories import begin


def arrives(journal: Journal, request_id: str, at_us: int, tier: str = "batch") -> Callable[[Event], None]:
    """One that holds 5 tokens and stands in line."""
    tell = begin(journal, Received(at_us, 10**18, "POST", "/", [], request_id), None)
    tell(Classified(at_us, tier, "acme", "key", None, "chat", "m", 5, False, 5, 1))
    tell(Queued(at_us, Obstacle.NO_ROOM, "no room"))
    return tell


def admitted(at_us: int, since_us: int, overtaken_at_us: int | None = None) -> Admitted:
    starvation_us = 0 if overtaken_at_us is None else at_us - overtaken_at_us
    return Admitted(at_us, at_us - since_us, starvation_us, overtaken_at_us, {}, 2)


def preempt(tell: Callable[[Event], None], at_us: int, admitted_us: int) -> None:
    tell(Preempted(at_us, admitted_us, 1))
    tell(Queued(at_us, Obstacle.PREEMPTED, "its room went"))


def settled(at_us: int, outcome: Outcome, status: int | None, error: str | None) -> Settled:
    return Settled(at_us, outcome, status, 0, None, None, error)


def found(journal: Journal, request_id: str) -> RequestRecord:
    (record,) = journal.all_for(request_id)
    return record


def ids(records: object) -> list[str]:
    assert isinstance(records, list)
    return [record.request_id for record in records]


def story() -> tuple[Journal, dict[str, Callable[[Event], None]]]:
    """A victim, one that waits from before until long after, and the important one that took the room."""
    journal = Journal(now_us=lambda: 100)
    tells = {"victim": arrives(journal, "victim", 1), "waiter": arrives(journal, "waiter", 2)}
    tells["victim"](admitted(10, 1))
    tells["important"] = arrives(journal, "important", 20, "high")
    preempt(tells["victim"], 30, 10)
    tells["important"](admitted(31, 20))
    return journal, tells


def test_while_it_waits_again_it_is_found_once_and_knows_who_went_ahead() -> None:
    journal, _ = story()
    victim = found(journal, "victim")
    assert (victim.admitted, victim.waited, victim.ended_us) == (None, None, None)
    assert victim.queued is not None
    assert victim.queued.obstacle is Obstacle.PREEMPTED
    (lost,) = victim.lost
    assert (lost.admitted.at_us, lost.preempted.at_us) == (10, 30)
    assert lost.queued is not None
    assert lost.queued.obstacle is Obstacle.NO_ROOM
    assert ids(journal.find_ahead(victim)) == ids(journal.overtook(victim)) == ["important"]


def test_for_the_others_it_went_ahead_as_often_as_it_was_admitted() -> None:
    journal, tells = story()
    waiter = found(journal, "waiter")
    assert ids(journal.find_ahead(waiter)) == ["victim", "important"]
    tells["victim"](admitted(40, 1, 31))
    tells["victim"](settled(50, Outcome.COMPLETED, 200, None))
    assert ids(journal.find_ahead(waiter)) == ["victim", "important", "victim"]
    assert [record.admitted.at_us for record in journal.find_ahead(waiter) if record.admitted] == [10, 31, 40]
    victim = found(journal, "victim")
    assert ids(journal.find_ahead(victim)) == ["important"]
    assert victim.settled is not None


def test_those_of_one_moment_are_distinguished() -> None:
    journal = Journal(now_us=lambda: 100)
    tells = [arrives(journal, str(number), number) for number in range(3)]
    for number, tell in enumerate(tells):
        tell(admitted(10, number))
    preempt(tells[1], 30, 10)
    waiter = arrives(journal, "waiter", 5)
    tells[1](admitted(40, 1))
    waiter(admitted(50, 5))
    assert ids(journal.find_ahead(found(journal, "waiter"))) == ["0", "1", "2", "1"]
    assert [found(journal, str(number)).admitted for number in (0, 2)] == [admitted(10, 0), admitted(10, 2)]


def test_one_that_is_not_admitted_again_is_among_the_refused_or_has_left() -> None:
    journal, tells = story()
    tells["victim"](settled(60, Outcome.FAILED, 503, "queue_timeout"))
    victim = found(journal, "victim")
    assert journal.refusals(5) == [victim]
    assert victim.refused is not None
    assert (victim.refused.code, victim.refused.status, victim.refused.queue_wait_us) == ("queue_timeout", 503, 59)
    assert ids(journal.find_ahead(victim)) == ["important"]

    journal, tells = story()
    tells["victim"](settled(60, Outcome.CLIENT_LEFT, None, "client_left"))
    assert journal.refusals(5) == []
    assert found(journal, "victim").refused is not None


def test_one_that_was_admitted_at_once_and_preempted_is_kept_as_one_that_waited() -> None:
    journal = Journal(most_admissions=8, most_ended=8, now_us=lambda: 100)
    tell = begin(journal, Received(1, 10**18, "POST", "/", [], "victim"), None)
    tell(Classified(1, "batch", "acme", "key", None, "chat", "m", 5, False, 5, 1))
    tell(admitted(2, 2))
    preempt(tell, 30, 2)
    tell(admitted(40, 2))
    tell(settled(50, Outcome.COMPLETED, 200, None))
    for number in range(100):
        arrives(journal, str(number), 60)(admitted(61, 60))
    assert found(journal, "victim").admitted == admitted(40, 2)
