"""The journal: who was admitted while a request waited, exactly; and what it keeps, and for how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanContext

from sidecar.events import (
    Admitted,
    Classified,
    Event,
    Grant,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools import Ask, Pool
from sidecar.pools.base import Lease
from sidecar.telemetry import journal as journals
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.request_record import RequestRecord
from tests.pools.harness import policy_of
from tests.telemetry.span_stories import begin

TIERS = ("high", "normal", "batch")
SHARES = (
    Shares("high", reserve=Fraction(3, 10), lend=Fraction(1, 2), preempt_after_us=1),
    Shares("normal", reserve=Fraction(1, 5), preempt_after_us=3),
    Shares("batch", limit=Fraction(4, 5), preemptible=True),
)
SECRET = "sk-very-secret"


def received(request_id: str, at_us: int = 0) -> Received:
    headers = [(b"authorization", b"Bearer " + SECRET.encode())]
    return Received(at_us, 10**18 + at_us * 1000, "POST", "/v1/completions", headers, request_id)


def classified(at_us: int, tier: str = "batch", tokens: int = 10, tenant: str = "a") -> Classified:
    return Classified(at_us, tier, tenant, "key", None, "chat", "m", 5, False, tokens, 1)


def admitted(at_us: int, wait_us: int = 0, starvation_us: int = 0) -> Admitted:
    return Admitted(at_us, wait_us, starvation_us, at_us - starvation_us if starvation_us else None, {}, 2)


def settled(at_us: int, outcome: Outcome = Outcome.COMPLETED) -> Settled:
    return Settled(at_us, outcome, 200, 10, None, None, None)


class Clock:
    now_us = 0

    def __call__(self) -> int:
        return self.now_us


class Sidecar:
    """What the sidecar does without a network: enters the pool, and tells the journal, on a clock of its own."""

    def __init__(self) -> None:
        rules = pool_rules(tokens=40, requests=4, tiers=SHARES, promote_after_us=3_000, ceiling=0, max_preemptions=2)
        self.clock = Clock()
        policy = policy_of(rules)
        self.pool = Pool(policy, self.clock)
        self.journal = Journal(now_us=self.clock)
        self.tells: dict[str, Callable[[Event], None]] = {}
        self.leases: dict[str, Lease] = {}
        self.told: dict[str, Grant] = {}
        self.chosen: list[str] = []
        self.preempted: list[str] = []
        self.reported: list[tuple[str, Admitted]] = []

    def step(self) -> int:
        """The time of the next thing that happens: no two take the same microsecond."""
        self.clock.now_us += 1
        return self.clock.now_us

    @property
    def woken(self) -> list[str]:
        """Those that were admitted and not reported yet, in the order of their admission."""
        admitted = [(each.grant, name) for name, each in self.leases.items() if each.grant and name not in self.told]
        return [name for _, name in sorted(admitted, key=lambda one: (one[0].at_us, self.entered.index(one[1])))]

    @property
    def entered(self) -> list[str]:
        """Those that are held, in the order of their admission."""
        held = sorted(self.pool._member.leases.values(), key=lambda lease: lease.entered)
        by_ticket = {lease.ticket.id: name for name, lease in self.leases.items()}
        return [by_ticket[lease.ticket.id] for lease in held]

    async def arrive(self, tier: int, tokens: int, tenant: str) -> None:
        request_id = str(len(self.tells))
        self.tells[request_id] = tell = begin(self.journal, received(request_id, self.step()), None)
        tell(classified(self.step(), TIERS[tier], tokens, tenant))
        self.step()
        lease = self.leases[request_id] = await self.pool.enter(Ask(tier, tenant, 1, tokens, 1, 0))
        lease.on_preempt = lambda: self.chosen.append(request_id)
        if lease.grant is not None:  # at once: it is reported before any that was woken
            self.tell(request_id)
        else:
            tell(Queued(self.clock.now_us, Obstacle.NO_ROOM, "no room"))
        await self.give_back()

    async def settle(self, place: int) -> None:
        if entered := self.entered:
            request_id = entered[place % len(entered)]
            self.report_up_to(request_id)
            self.step()
            self.leases.pop(request_id).settle(0)
            await self.give_back()

    async def wait(self, steps: int) -> None:
        """Time passes: some have waited long enough to take room back."""
        self.clock.now_us += steps
        self.pool._run()
        await self.give_back()

    async def give_back(self) -> None:
        """Victims release their room at once, and wait again."""
        await asyncio.sleep(0)
        while self.chosen:
            request_id = self.chosen.pop(0)
            if request_id not in self.leases:
                continue  # it has ended
            self.report_up_to(request_id)
            now_us, admitted_us = self.step(), self.told.pop(request_id).at_us
            self.preempted.append(request_id)
            self.tells[request_id](Preempted(now_us, admitted_us, self.preempted.count(request_id)))
            self.tells[request_id](Queued(now_us, Obstacle.PREEMPTED, "its room went"))
            self.leases[request_id].requeue()
            await asyncio.sleep(0)

    def report_up_to(self, request_id: str) -> None:
        """One that ends or goes was reported before, after all that were admitted before it."""
        while request_id in (woken := self.woken):
            self.tell(woken[0])

    async def wake(self) -> None:
        """The waiters' tasks get their turn."""
        for request_id in self.woken:
            self.tell(request_id)

    def tell(self, request_id: str) -> None:
        grant = self.leases[request_id].grant
        assert grant is not None
        self.told[request_id] = grant
        event = Admitted(
            grant.at_us,
            grant.queue_wait_us,
            grant.starvation_us,
            grant.overtaken_at_us,
            grant.served_ahead,
            grant.level,
            grant.passed,
        )
        self.tells[request_id](event)
        self.reported.append((request_id, event))


async def played(operations: Iterable[tuple[object, ...]]) -> Sidecar:
    """A sidecar after these operations, and everything reported."""
    sidecar = Sidecar()
    for name, *arguments in operations:
        await getattr(sidecar, str(name))(*arguments)
    await sidecar.wake()
    return sidecar


def tokens(records: Iterable[RequestRecord]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for known in (record.classified for record in records):
        assert known is not None
        counts[known.tier] += known.tokens
    return counts


def first(records: Iterable[RequestRecord]) -> int | None:
    return next((record.admitted.at_us for record in records if record.admitted is not None), None)


def came_as_it_was_admitted(other: RequestRecord, event: Admitted) -> bool:
    """Whether one decision admitted both, and the other one as it came: it is told first, wherever it was in it."""
    return other.admitted is not None and other.admitted.at_us == event.at_us and not other.admitted.queue_wait_us


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 2), st.integers(1, 25), st.sampled_from("abc")),
        st.tuples(st.just("settle"), st.integers(0, 9)),
        st.tuples(st.just("wake")),
        st.tuples(st.just("wait"), st.sampled_from([1, 20, 2_000])),
    ),
    min_size=10,
    max_size=80,
)


@given(OPERATIONS)
def test_who_was_ahead_adds_up_to_what_the_pool_counted(operations: list[tuple[object, ...]]) -> None:
    sidecar = asyncio.run(played(operations))
    for request_id, event in dict(sidecar.reported).items():  # the last of one that was admitted more than once
        record = sidecar.journal.find(request_id)
        assert record is not None
        if record.admitted is not event:
            assert record.lost  # and waits again
            continue
        if not event.queue_wait_us:
            assert not sidecar.journal.find_ahead(record)
            continue
        ahead = sidecar.journal.find_ahead(record)
        surely = tokens(other for other in ahead if not came_as_it_was_admitted(other, event))
        assert surely <= Counter(event.served_ahead) <= tokens(ahead)
        if not record.lost:  # else it counts as overtaken from its preemption on
            assert first(sidecar.journal.overtook(record)) == event.overtaken_at_us


def test_the_property_above_sees_waits_and_overtaking() -> None:
    """A control: the same sidecar, on operations that are known to make both."""
    arrivals = [("arrive", tier, 8, "a") for tier in (2, 2, 2, 2, 1, 2, 1)]
    sidecar = asyncio.run(played([*arrivals, *[("settle", 0), ("wake",)] * 7]))
    overtaken = [event for _, event in sidecar.reported if event.overtaken_at_us is not None]
    assert overtaken
    assert sum(event.queue_wait_us > 0 for _, event in sidecar.reported) >= 3


def test_the_property_above_sees_preemptions() -> None:
    """A control, as the one above."""
    arrivals = [
        ("arrive", tier, 8, tenant) for tier, tenant in ((2, "a"), (2, "a"), (2, "a"), (2, "a"), (0, "b"), (0, "b"))
    ]
    sidecar = asyncio.run(played([*arrivals, ("wait", 2_000), *[("settle", 0), ("wake",)] * 5]))
    (victim,) = sidecar.preempted
    assert [request_id for request_id, _ in sidecar.reported].count(victim) == 2


def test_one_that_waits_knows_who_went_ahead_so_far() -> None:
    arrivals = [*[("arrive", 1, 8, "a")] * 4, ("arrive", 2, 8, "waiter"), ("arrive", 0, 5, "b")]
    sidecar = asyncio.run(played(arrivals))
    waiter = sidecar.journal.find("4")
    assert waiter is not None
    assert not sidecar.journal.find_ahead(waiter)
    assert not sidecar.journal.overtook(waiter)

    sidecar = asyncio.run(played([*arrivals, ("settle", 0)]))
    waiter = sidecar.journal.find("4")
    assert waiter is not None
    assert [record.request_id for record in sidecar.journal.find_ahead(waiter)] == ["5"]
    assert [record.request_id for record in sidecar.journal.overtook(waiter)] == ["5"]


# -- what is kept


def healthy(journal: Journal, request_id: str, at_us: int) -> None:
    """One that goes straight through."""
    tell = begin(journal, received(request_id, at_us), None)
    for event in (classified(at_us), admitted(at_us), settled(at_us + 1)):
        tell(event)


def test_a_request_is_found_by_its_id_and_by_its_trace() -> None:
    journal = Journal(now_us=Clock())
    begin(journal, received("mine"), SpanContext(0xABC, 0xDEF, is_remote=False))
    begin(journal, received("other"), SpanContext(0xABD, 0xDEF, is_remote=False))
    found = journal.find("mine")
    assert found is not None
    assert (found.request_id, found.path, found.wall_s(1_500_000)) == ("mine", "/v1/completions", 1e9 + 1.5)
    assert journal.find(f"{0xABC:032x}") is found
    assert journal.find("abc") is None
    assert journal.find("") is None


def test_of_several_with_one_id_the_newest_is_found() -> None:
    journal = Journal(now_us=Clock())
    for at_us in (10, 30, 20):
        healthy(journal, "retried", at_us)
    assert [record.at_us for record in journal.all_for("retried")] == [30, 20, 10]
    newest = journal.find("retried")
    assert newest is not None
    assert newest.at_us == 30


def test_one_that_waits_stays_while_others_come_and_go() -> None:
    clock = Clock()
    journal = Journal(most_admissions=8, most_ended=8, now_us=clock)
    for name, events in (("waits", 2), ("runs", 3)):
        tell = begin(journal, received(name), None)
        for event in (classified(1), Queued(2, Obstacle.NO_ROOM, "no room"), admitted(3, 2))[:events]:
            tell(event)
    for number in range(100):
        healthy(journal, f"healthy {number}", 10 + number)
    clock.now_us = 3600 * 10**6
    assert [journal.find(name) is not None for name in ("waits", "runs", "healthy 99")] == [True, True, False]


def test_what_goes_well_does_not_push_out_what_waited_nor_do_refusals() -> None:
    journal = Journal(most_admissions=8, most_ended=8, now_us=Clock())
    tell = begin(journal, received("waited"), None)
    for event in (classified(1), Queued(2, Obstacle.NO_ROOM, "no room"), admitted(3, 2), settled(4)):
        tell(event)
    tell = begin(journal, received("failed"), None)
    for event in (classified(1), admitted(1), settled(4, Outcome.FAILED)):
        tell(event)
    for number in range(3000):
        healthy(journal, f"healthy {number}", 10 + number)
        begin(journal, received("stranger"), None)(Refused(10 + number, "invalid_api_key", "unknown", 401))
    assert journal.find("waited") is not None
    assert journal.find("failed") is not None
    assert journal.find("healthy 2000") is None
    assert journal.find("healthy 2999") is not None


def test_everything_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MOST_OPEN", 100)
    journal = Journal(most_admissions=40, most_ended=8, now_us=Clock())
    for number in range(2 * journals.MOST_REFUSED + 500):
        tell = begin(journal, received(f"open {number}", number), None)
        if number % 2:
            tell(Refused(number, "queue_full", "full", 503))
    for number in range(1000):
        tell = begin(journal, received(f"waited {number}", number), None)
        for event in (classified(number), Queued(number, Obstacle.NO_ROOM, "no"), admitted(number, 1), settled(number)):
            tell(event)
    kept = [number for number in range(1000) if journal.find(f"waited {number}")]
    assert 40 <= len(kept) <= 40 + 40 // 8
    assert kept[-1] == 999
    assert journal.knows_since_us == kept[0]
    assert len(journal.refusals(10**6)) == journals.MOST_REFUSED


def test_open_requests_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MOST_OPEN", 10)
    journal = Journal(now_us=Clock())
    for number in range(25):
        begin(journal, received(str(number), number), None)
    assert [number for number in range(25) if journal.find(str(number))] == [*range(15, 25)]


def test_what_ended_is_forgotten_after_its_time() -> None:
    clock = Clock()
    journal = Journal(retention_s=10, now_us=clock)
    healthy(journal, "healthy", 1_000_000)
    begin(journal, received("refused"), None)(Refused(2_000_000, "queue_full", "full", 503))
    clock.now_us = 10_500_000
    assert [record.request_id for record in journal.refusals(5)] == ["refused"]
    assert journal.find("healthy") is not None
    clock.now_us = 11_500_000
    assert journal.find("healthy") is None
    assert journal.find("refused") is not None
    clock.now_us = 12_500_000
    assert journal.find("refused") is None
    assert journal.refusals(5) == []


def test_the_last_refusals_come_first_and_departures_are_none() -> None:
    journal = Journal(now_us=Clock())
    for number, (code, status) in enumerate([("queue_full", 503), ("client_left", None), ("invalid_api_key", 401)]):
        begin(journal, received(str(number), number), None)(Refused(number, code, "so it is", status))
    assert [record.request_id for record in journal.refusals(5)] == ["2", "0"]
    assert [record.request_id for record in journal.refusals(1)] == ["2"]
    assert journal.find("1") is not None


def test_no_key_is_kept() -> None:
    journal = Journal(now_us=Clock())
    begin(journal, received("mine"), None)(classified(1))
    record = journal.find("mine")
    assert record is not None
    assert SECRET not in repr(record)
