"""A wait that lasts is reported in its trace before it ends, by one timer for all, a few at a time."""

import asyncio
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from sidecar.events import Admitted, Classified, Obstacle, Outcome, Preempted, Queued, Received, Refused, Settled
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.spans.links import MOST_AT_ONCE, PAUSE_S, LongWaits, WaitFinder
from tests.support.virtual_time import run_virtually, virtual_now_us
from tests.telemetry.span_stories import ARRIVAL_NS, Tracing, interval, parent_id, span_id

TIERS = ("high", "batch")
NO_ROOM = "the pool has no room"


class Sidecar:
    """A journal and spans, in the time of a virtual loop."""

    def __init__(self, every_s=30.0, **tracing):
        journal = Journal(now_us=virtual_now_us)
        finder = WaitFinder(journal, TIERS, place=lambda record: record.queued.mark and sum(record.queued.mark))
        self.long_waits = LongWaits(every_s, finder.so_far)
        self.tracing = Tracing(**tracing, find_links=finder.ended, long_waits=self.long_waits)
        self.telemetry = EventDispatcher(self.tracing.tracer, [journal])

    def arrives(self, name, tier="batch", tenant="acme", *, waits=True):
        now_us = virtual_now_us()
        observation = self.telemetry.received(Received(now_us, ARRIVAL_NS + now_us * 1000, "POST", "/v1", (), name))
        observation.on_event(Classified(now_us, tier, tenant, "key", None, "chat", "m", 10, False, 100, 1))
        if waits:
            observation.on_event(Queued(now_us, Obstacle.NO_ROOM, NO_ROOM, (4, 3)))
        return Request(observation, now_us)

    def reported(self):
        return [span for span in self.tracing.exporter.get_finished_spans() if span.name == "admission.waiting"]


class Request:
    def __init__(self, observation, since_us):
        self.observation, self.since_us = observation, since_us

    def is_admitted(self, passed=None, overtaken_us=None):
        now_us = virtual_now_us()
        starved_us = 0 if overtaken_us is None else now_us - overtaken_us
        waited = (now_us - self.since_us, starved_us, overtaken_us)
        self.observation.on_event(Admitted(now_us, *waited, {}, 0, passed or {}))

    def is_refused(self):
        now_us = virtual_now_us()
        self.observation.on_event(Refused(now_us, "queue_timeout", "too long", 503, now_us - self.since_us))

    def is_preempted(self):
        now_us = virtual_now_us()
        self.observation.on_event(Preempted(now_us, now_us, 1))
        self.observation.on_event(Queued(now_us, Obstacle.PREEMPTED, "its room went"))

    def ends(self):
        self.observation.on_event(Settled(virtual_now_us(), Outcome.COMPLETED, 200, 100, None, None, None))


def test_a_wait_says_every_30_seconds_what_it_waits_for_and_who_went_ahead():
    async def waits():
        sidecar = Sidecar()
        waiter = sidecar.arrives("waiter")
        await asyncio.sleep(40)
        at_us = virtual_now_us()
        sidecar.arrives("urgent", "high", "lab", waits=False).is_admitted({"batch": "reserve"})
        await asyncio.sleep(25)
        before = sidecar.reported()  # and should the process be killed now, this is what there is
        waiter.is_admitted(overtaken_us=at_us)
        waiter.ends()
        await asyncio.sleep(100)
        return before, sidecar.reported(), sidecar.tracing.exporter.get_finished_spans()

    before, after, spans = run_virtually(waits())
    assert before == after
    first, second = before
    mine = {"admission.is_waiting": True, "admission.request_id": "waiter", "admission.tenant": "acme"}
    always = {**mine, "admission.tier": "batch", "admission.obstacle": "no_room", "admission.requests_before": 7}
    assert dict(first.attributes) == {
        **always,
        "admission.queue_wait_s": 30.0,
        "admission.starvation_s": 0.0,
        "admission.explanation": "the pool has no room; no request went ahead of it",
    }
    assert dict(second.attributes) == {
        **always,
        "admission.queue_wait_s": 60.0,
        "admission.starvation_s": 20.0,
        "admission.explanation": "1 request of tier high went ahead because high held less than its reserve",
        "admission.overtaken_by.high": 100,
        "admission.ahead.tokens.high": 100,
        "admission.ahead.requests.high": 1,
        "admission.ahead.tenants.high": 1,
        "admission.ahead.because.high": "high held less than its reserve",
        "admission.ahead.rules.high": "reserve",
    }
    (queued,) = (span for span in spans if span.name == "admission.queued")
    (starved,) = (span for span in spans if span.name == "admission.starved")
    assert {parent_id(span) for span in (*before, starved)} == {span_id(queued)}
    assert queued.context.trace_id == first.context.trace_id
    assert [queued.end_time - queued.start_time, starved.end_time - starved.start_time] == [65e9, 25e9]
    assert [interval(span) for span in before] == [(queued.start_time + at,) * 2 for at in (30 * 10**9, 60 * 10**9)]


def test_a_wait_that_has_ended_or_began_anew_says_nothing_of_the_one_before():
    async def waits():
        sidecar = Sidecar()
        admitted, refused, again, short = (sidecar.arrives(name) for name in ("admitted", "refused", "again", "short"))
        await asyncio.sleep(20)
        short.is_admitted()
        await asyncio.sleep(9)
        admitted.is_admitted()
        refused.is_refused()
        again.is_admitted()
        await asyncio.sleep(1)
        again.is_preempted()
        await asyncio.sleep(45)
        again.is_admitted()
        for request in (admitted, again, short):
            request.ends()
        await asyncio.sleep(100)
        return sidecar.reported()

    (report,) = run_virtually(waits())
    assert report.attributes["admission.request_id"] == "again"
    assert report.attributes["admission.obstacle"] == "preempted"
    assert report.attributes["admission.queue_wait_s"] == 60.0
    assert "admission.requests_before" not in report.attributes


@pytest.mark.parametrize(("every_s", "tracing"), [(0.0, {}), (30.0, {"sampler": ALWAYS_OFF})], ids=["off", "unsampled"])
def test_nothing_is_reported_where_it_is_off_or_not_sampled(every_s, tracing):
    async def waits():
        sidecar = Sidecar(every_s, **tracing)
        sidecar.arrives("waiter")
        timers = len(asyncio.get_running_loop()._scheduled)
        await asyncio.sleep(200)
        return sidecar.reported(), timers

    assert run_virtually(waits()) == ([], 0)


def test_of_thousands_a_few_are_reported_at_a_time_and_none_twice_before_all():
    count = 3000

    async def waits():
        sidecar = Sidecar()
        loop = asyncio.get_running_loop()
        for number in range(count):
            sidecar.arrives(f"{number}")
        assert sum(not timer.cancelled() for timer in loop._scheduled) <= 2  # the other is the dispatcher's
        await asyncio.sleep(30)
        seen = [len(sidecar.reported())]
        for _ in range(4):
            await asyncio.sleep(PAUSE_S)
            seen.append(len(sidecar.reported()))
        await asyncio.sleep(count / MOST_AT_ONCE * PAUSE_S + 1)
        return seen, [span.attributes["admission.request_id"] for span in sidecar.reported()]

    seen, names = run_virtually(waits())
    assert max(seen) <= 5 * MOST_AT_ONCE
    assert all(0 <= after - before <= MOST_AT_ONCE for before, after in pairwise(seen))
    assert names[:count] == [f"{number}" for number in range(count)]


def test_another_interval_is_for_those_that_wait_too():
    async def waits():
        sidecar = Sidecar(300.0)
        sidecar.arrives("waiter")
        await asyncio.sleep(1)
        sidecar.long_waits.change_interval(10.0)
        await asyncio.sleep(25)
        reported = len(sidecar.reported())
        sidecar.long_waits.change_interval(0.0)
        await asyncio.sleep(500)
        while_off = len(sidecar.reported())
        sidecar.long_waits.change_interval(10.0)
        await asyncio.sleep(15)
        return reported, while_off, len(sidecar.reported())

    assert run_virtually(waits()) == (2, 2, 3)


def test_switched_on_it_reports_those_that_have_waited_before():
    async def waits():
        sidecar = Sidecar(0.0)
        waiter, gone = sidecar.arrives("waiter"), sidecar.arrives("gone")
        await asyncio.sleep(100)
        gone.is_admitted()
        sidecar.long_waits.change_interval(1.0)
        await asyncio.sleep(1.5)
        waiter.is_admitted()
        await asyncio.sleep(100)
        return [span.attributes["admission.queue_wait_s"] for span in sidecar.reported()]

    assert run_virtually(waits()) == [101.0]


def test_in_a_second_event_loop_those_of_the_first_are_forgotten():
    made = []

    async def first():
        made.append(Sidecar())
        made[0].arrives("of a loop that ended")

    async def second():
        made[0].arrives("waiter")
        await asyncio.sleep(70)
        return [span.attributes["admission.request_id"] for span in made[0].reported()]

    run_virtually(first())
    assert run_virtually(second()) == ["waiter", "waiter"]
