"""Links from the spans of a request that waited to the `admission` spans of those that went ahead of it."""

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from sidecar.events import Admitted, Classified, Obstacle, Outcome, Preempted, Queued, Received, Refused, Settled
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.spans.links import MOST_LINKS, WaitFinder
from tests.telemetry.span_stories import ARRIVAL_NS, Tracing, admitted, classified, queued, settled, span_id

MS = 1000


class Sidecar:
    """Tells a journal and the spans what happens, in the order in which it does."""

    def __init__(self, *, is_shared=False, **tracing):
        self.now_us = 0
        self.asked = 0
        journal = Journal(now_us=lambda: self.now_us)
        find_links = WaitFinder(journal, is_shared=is_shared).ended

        def counted(*arguments):
            self.asked += 1
            return find_links(*arguments)

        self.tracing = Tracing(**tracing, find_links=counted)
        self.telemetry = EventDispatcher(self.tracing.tracer, [journal])

    def arrives(self, name, tier, waits=True):
        self.now_us += MS
        observation = self.telemetry.received(
            Received(self.now_us, ARRIVAL_NS + self.now_us * 1000, "POST", "/v1/completions", (), name)
        )
        observation.on_event(Classified(self.now_us, tier, "acme", "key", None, "completions", "m", 10, False, 100, 1))
        if waits:
            observation.on_event(Queued(self.now_us, Obstacle.NO_ROOM, "no room"))
        return Waiting(self, observation, self.now_us)

    def spans(self, request, name):
        """The spans of this name in the request's trace."""
        finished = self.tracing.exporter.get_finished_spans()
        (trace_id,) = {
            span.context.trace_id for span in finished if span.attributes.get("admission.request_id") == request
        }
        return [span for span in finished if span.name == name and span.context.trace_id == trace_id]


class Waiting:
    def __init__(self, sidecar, observation, since_us):
        self.sidecar, self.observation, self.since_us = sidecar, observation, since_us

    def is_admitted(self, overtaken_at_us=None, passed=None, served_ahead=None):
        self.sidecar.now_us += MS
        now_us = self.sidecar.now_us
        starvation_us = 0 if overtaken_at_us is None else now_us - overtaken_at_us
        wait_us = now_us - self.since_us
        waited = wait_us, starvation_us, overtaken_at_us, served_ahead or {}
        self.observation.on_event(Admitted(now_us, *waited, 0, passed or {}))
        return now_us

    def goes_straight_in(self, passed=None):
        now_us = self.sidecar.now_us
        self.observation.on_event(Admitted(now_us, 0, 0, None, {}, 0, passed or {}))
        return now_us

    def is_preempted(self, admitted_us):
        self.sidecar.now_us += MS
        self.observation.on_event(Preempted(self.sidecar.now_us, admitted_us, 1))
        self.observation.on_event(Queued(self.sidecar.now_us, Obstacle.PREEMPTED, "its room went"))

    def is_refused(self, overtaken_at_us=None):
        self.sidecar.now_us += MS
        now_us = self.sidecar.now_us
        starvation_us = 0 if overtaken_at_us is None else now_us - overtaken_at_us
        waited = (now_us - self.since_us, starvation_us, overtaken_at_us, {})
        self.observation.on_event(Refused(now_us, "queue_timeout", "too long", 503, *waited))

    def ends(self):
        self.sidecar.now_us += MS
        self.observation.on_event(Settled(self.sidecar.now_us, Outcome.COMPLETED, 200, 100, None, None, None))


def linked(span):
    return [dict(link.attributes) for link in span.links]


def test_starving_links_to_who_overtook_and_waiting_to_who_went_in_turn():
    sidecar = Sidecar()
    first = sidecar.arrives("first", "batch")
    starved = sidecar.arrives("starved", "batch")
    urgent = sidecar.arrives("urgent", "high")
    overtaken_us = urgent.is_admitted(passed={"batch": "level"})
    first.is_admitted(overtaken_us)
    starved.is_admitted(overtaken_us)
    for request in (urgent, first, starved):
        request.ends()

    (queued,) = sidecar.spans("starved", "admission.queued")
    (bar,) = sidecar.spans("starved", "admission.starved")
    assert linked(queued) == [{"admission.tier": "batch", "admission.request_id": "first"}]
    assert linked(bar) == [{"admission.tier": "high", "admission.request_id": "urgent", "admission.rule": "level"}]
    assert dict(bar.attributes) == {
        "admission.tier": "batch",
        "admission.explanation": "1 request of tier high went ahead because high is more important",
        "admission.overtaken_by.high": 100,
        "admission.ahead.tokens.high": 100,
        "admission.ahead.requests.high": 1,
        "admission.ahead.tenants.high": 1,
        "admission.ahead.because.high": "high is more important",
        "admission.ahead.rules.high": "level",
    }
    (admission,) = sidecar.spans("starved", "admission")
    assert admission.attributes["admission.explanation"] == bar.attributes["admission.explanation"]
    (admission,) = sidecar.spans("urgent", "admission")
    assert "admission.explanation" not in admission.attributes
    for link, other in ((queued.links[0], "first"), (bar.links[0], "urgent")):
        (admission,) = sidecar.spans(other, "admission")
        assert link.context.trace_id == admission.context.trace_id
        assert link.context.span_id == span_id(admission)
        assert link.context.trace_flags.sampled
    (queued,) = sidecar.spans("first", "admission.queued")
    assert linked(queued) == []


def test_all_that_overtook_are_counted_by_tier_and_rule_however_many_have_links():
    sidecar = Sidecar()
    starved = sidecar.arrives("starved", "batch")
    moments = [
        sidecar.arrives(f"r{n}", "high" if n % 2 else "normal").is_admitted(passed={"batch": rule})
        for n, rule in enumerate(("level", "reserve", "level", "level") * MOST_LINKS)
    ]
    sidecar.arrives("twin", "batch").is_admitted()
    starved.is_admitted(moments[0])
    starved.ends()
    (bar,) = sidecar.spans("starved", "admission.starved")
    tokens, requests = 200 * MOST_LINKS, 2 * MOST_LINKS
    because = {
        "normal": "normal is more important",
        "high": "16 because high held less than its reserve, 16 because high is more important",
        "batch": "the tenants of batch take turns by their share",
    }
    said = {
        "overtaken_by": {"normal": tokens, "high": tokens, "batch": 100},
        "ahead.tokens": {"normal": tokens, "high": tokens, "batch": 100},
        "ahead.requests": {"normal": requests, "high": requests, "batch": 1},
        "ahead.tenants": {"normal": 1, "high": 1, "batch": 1},
        "ahead.because": because,
        "ahead.rules": {"normal": "level", "high": "reserve, level"},
    }
    assert dict(bar.attributes) == {
        "admission.tier": "batch",
        "admission.explanation": "32 requests of tier normal went ahead because normal is more important; "
        "so did 33 requests of other tiers",
        **{f"admission.{what}.{tier}": value for what, by_tier in said.items() for tier, value in by_tier.items()},
    }


@pytest.mark.parametrize(
    ("is_shared", "where"),
    [(True, "admitted by other replicas of the pool"), (False, "admitted, and gone before they ran")],
)
def test_who_is_not_known_here_is_in_the_sentence_by_tier_and_tokens(is_shared, where):
    sidecar = Sidecar(is_shared=is_shared)
    starved = sidecar.arrives("starved", "batch")
    sidecar.now_us += MS
    starved.is_admitted(sidecar.now_us, served_ahead={"high": 900, "normal": 50})
    starved.ends()

    (bar,) = sidecar.spans("starved", "admission.starved")
    assert dict(bar.attributes) == {
        "admission.tier": "batch",
        "admission.served_ahead.high": 900,
        "admission.served_ahead.normal": 50,
        "admission.explanation": f"900 tokens of tier high and 50 tokens of tier normal went ahead, {where}",
    }


def test_beyond_a_thousand_the_sentence_says_that_there_are_more():
    sidecar = Sidecar()
    starved = sidecar.arrives("starved", "batch")
    moments = [sidecar.arrives(f"{n}", "high").is_admitted(passed={"batch": "level"}) for n in range(1030)]
    starved.is_admitted(moments[0])
    starved.ends()

    (bar,) = sidecar.spans("starved", "admission.starved")
    because = "because high is more important"
    assert bar.attributes["admission.explanation"] == f"at least 1,024 requests of tier high went ahead {because}"


def test_one_that_was_preempted_links_to_who_got_its_room_and_not_to_itself():
    sidecar = Sidecar()
    victim = sidecar.arrives("victim", "batch")
    waiter = sidecar.arrives("waiter", "batch")
    admitted_us = victim.is_admitted()
    urgent = sidecar.arrives("urgent", "high")
    victim.is_preempted(admitted_us)
    overtaken_us = urgent.is_admitted(passed={"batch": "level"})
    victim.is_admitted(overtaken_us)
    waiter.is_admitted(overtaken_us)
    for request in (urgent, victim, waiter):
        request.ends()

    before, again = sidecar.spans("victim", "admission.queued")
    (bar,) = sidecar.spans("victim", "admission.starved")
    assert linked(before) == linked(again) == []
    assert [link["admission.request_id"] for link in linked(bar)] == ["urgent"]
    (queued,) = sidecar.spans("waiter", "admission.queued")
    assert [link["admission.request_id"] for link in linked(queued)] == ["victim", "victim"]  # it went in twice


def test_one_of_the_same_tier_that_went_first_is_linked_to_without_a_rule():
    sidecar = Sidecar()
    starved = sidecar.arrives("starved", "batch")
    other = sidecar.arrives("other tenant's", "batch")
    starved.is_admitted(other.is_admitted())
    starved.ends()

    (bar,) = sidecar.spans("starved", "admission.starved")
    assert linked(bar) == [{"admission.tier": "batch", "admission.request_id": "other tenant's"}]


def test_a_refusal_after_a_wait_says_who_went_ahead_too():
    sidecar = Sidecar()
    starved = sidecar.arrives("starved", "batch")
    overtaken_us = sidecar.arrives("urgent", "critical", waits=False).goes_straight_in({"batch": "always_first"})
    starved.is_refused(overtaken_us)

    (bar,) = sidecar.spans("starved", "admission.starved")
    assert linked(bar) == [
        {"admission.tier": "critical", "admission.request_id": "urgent", "admission.rule": "always_first"}
    ]
    (admission,) = sidecar.spans("starved", "admission")
    assert admission.attributes["admission.explanation"] == (
        "1 request of tier critical went ahead because critical always goes first"
    )


def test_links_are_to_the_first_16():
    sidecar = Sidecar()
    ahead = [sidecar.arrives(f"ahead-{number}", "batch") for number in range(20)]
    starved = sidecar.arrives("starved", "batch")
    overtaken_us = None
    for number in range(20):
        admitted_us = sidecar.arrives(f"urgent-{number}", "high").is_admitted(passed={"batch": "level"})
        overtaken_us = admitted_us if overtaken_us is None else overtaken_us
    for request in ahead:
        request.is_admitted(overtaken_us)
    starved.is_admitted(overtaken_us)
    starved.ends()
    ahead[0].ends()

    (queued,) = sidecar.spans("starved", "admission.queued")
    (bar,) = sidecar.spans("starved", "admission.starved")
    ids = [[link["admission.request_id"] for link in linked(span)] for span in (queued, bar)]
    assert MOST_LINKS == 16
    assert ids == [[f"ahead-{number}" for number in range(16)], [f"urgent-{number}" for number in range(16)]]


def test_no_one_is_asked_about_a_request_that_did_not_wait():
    sidecar = Sidecar()
    sidecar.arrives("at once", "high", waits=False).goes_straight_in()
    assert sidecar.asked == 0

    sidecar.arrives("waits", "high").is_admitted()
    assert sidecar.asked == 1


def test_no_one_is_asked_about_a_request_that_is_sampled_out():
    sidecar = Sidecar(sampler=ALWAYS_OFF)
    sidecar.arrives("waits", "high").is_admitted()

    assert sidecar.asked == 0


class Switched(Sampler):
    """Samples while it is on."""

    is_on = True

    def should_sample(self, *arguments, **named):
        return (ALWAYS_ON if self.is_on else ALWAYS_OFF).should_sample(*arguments, **named)

    def get_description(self):
        return "switched"


@pytest.mark.parametrize("is_kept", [True, False])
def test_only_a_trace_that_is_kept_is_linked_to(is_kept):
    sampler = Switched()
    sidecar = Sidecar(sampler=sampler)
    starved = sidecar.arrives("starved", "batch")
    sampler.is_on = is_kept
    urgent = sidecar.arrives("urgent", "high")
    sampler.is_on = True
    starved.is_admitted(urgent.is_admitted(passed={"batch": "reserve"}))
    starved.ends()

    (bar,) = sidecar.spans("starved", "admission.starved")
    assert len(bar.links) == is_kept


def test_a_failing_lookup_costs_the_links_and_not_the_spans(caplog):
    def broken(*arguments):
        raise RuntimeError("no journal today")

    tracing = Tracing(find_links=broken)
    spans = tracing.play(classified(), queued(), admitted(2_100_000, 2_099_950), settled(3_000_000))

    assert set(spans) == {"admission", "admission.queued", "engine"}
    assert spans["admission"].attributes["admission.decision"] == "admitted"
    assert linked(spans["admission.queued"]) == []
    (record,) = caplog.records
    assert "tracing failed" in record.message
