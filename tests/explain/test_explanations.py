"""Why a request waited, asked at the admin port of a real sidecar: who went ahead, and by which rule."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider

from sidecar.admin.app import admin_app
from sidecar.admin.routes import story_routes
from sidecar.cli.explain_request import text
from sidecar.events import Admitted, Classified, Event, Obstacle, Placed, Queued, Received
from sidecar.explain import phrases
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.document import DryRunDetails, Explanation, WaitDetails
from sidecar.explain.steps import Step, steps
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.telemetry.ahead import OTHER_REPLICAS, AheadGroup, UnknownAhead
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.cluster.views import overview
from tests.support.each import each
from tests.support.middleware import App, Guarded, key, monitor, write_policy
from tests.support.serving import Served, serving
from tests.support.shared_pools import begun_store, shared_pool
from tests.support.waiting import until
from tests.telemetry.span_stories import begin

pytestmark = pytest.mark.anyio
SLOTS = 2
PASSED = "passed at once (mode: observe); "
POLICY = """\
engine: vllm
capacity: {tokens: 100k, requests: 2}
aging: {promote_after: 50ms, ceiling: normal}
tiers:
  critical: {limit: 50%, always_first: true}
  high: {reserve: 50%}
  normal: {}
  low: {limit: 50%}
  batch: {queue: {max_wait: 100ms}}
anonymous: critical
endpoints: {/v1/chat/completions: {}}
tenants: tenants/*.yaml
"""


def policy(text: str = POLICY) -> Policy:
    with tempfile.TemporaryDirectory() as folder:
        path = write_policy(Path(folder))
        path.write_text(text)
        return load(path)


class Explained(Guarded):
    """A sidecar that keeps a journal, with its admin port."""

    journal: Journal
    admin: Served

    async def send(self, tier: str, request_id: str, *headers: str) -> asyncio.Task[Any]:
        """Sends a request, and returns when it waits, runs or is over."""
        sent = asyncio.create_task(self.ask(None, f"x-priority: {tier}", f"x-request-id: {request_id}", *headers))
        await until(lambda: self.knows(request_id, "queued", "admitted", "refused"))
        return sent

    def knows(self, request_id: str, *events: str) -> bool:
        """Whether one of these has happened to it."""
        record = self.journal.find(request_id)
        return record is not None and any(getattr(record, event) is not None for event in events)

    async def get(self, wanted: str) -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.admin.url}/requests/{quote(wanted, safe='')}") as response,
        ):
            return response.status, await response.read()

    async def story(self, wanted: str) -> Explanation:
        status, body = await self.get(wanted)
        assert status == 200, body
        return msgspec.json.decode(body, type=Explanation)


@asynccontextmanager
async def explained(app: App, with_policy: Policy | None = None, pool: Pool | None = None) -> AsyncIterator[Explained]:
    used = with_policy or policy()
    guarded = Explained(app, used)
    guarded.journal = Journal()
    monitor(guarded.sidecar, EventDispatcher(RequestTracer(TracerProvider(shutdown_on_exit=False)), [guarded.journal]))
    if pool is not None:
        guarded.sidecar.pool = guarded.pool = pool  # type: ignore[assignment]
    builder = ExplanationBuilder(guarded.journal, lambda: [tier.name for tier in used.tiers], "lab", pool is not None)
    pages = story_routes(builder, overview)
    admin = admin_app(state=guarded.sidecar.state, readiness=guarded.sidecar.readiness, routes=pages)
    async with serving(guarded.sidecar) as guarded.served, serving(admin) as guarded.admin:
        yield guarded


async def finished(app: App, sent: Sequence[asyncio.Task[Any]]) -> None:
    app.release(100)
    await asyncio.gather(*sent)


async def test_one_that_was_overtaken_hears_by_whom_and_why() -> None:
    app = App(is_held=True)
    async with explained(app) as sidecar:
        sent = [await sidecar.send("normal", f"holds-{n}") for n in range(SLOTS)]
        sent.append(await sidecar.send("low", "victim"))
        sent.append(await sidecar.send("high", "overtakes"))
        story = await sidecar.story("victim")
        assert story.state == "waiting"
        assert story.conclusion.startswith("has waited ")
        assert story.conclusion.endswith(
            "so far: the pool has no room: 2 of 2 requests are held, and it asks for 1 request; "
            "no request went ahead of it"
        )
        app.release()
        await until(lambda: sidecar.knows("overtakes", "admitted"))
        story = await sidecar.story("victim")
        assert story.state == "waiting"
        assert story.wait.starvation_s > 0
        assert "1 request of tier high went ahead because high held less than its reserve" in story.conclusion
        app.release()
        await until(lambda: sidecar.knows("victim", "admitted"))
        assert (await sidecar.story("victim")).state == "running"
        await finished(app, sent)
        story = await sidecar.story("victim")

    assert (story.state, story.pool, story.path, story.others) == ("completed", "lab", "/v1/chat/completions", 0)
    assert (story.asked.tier, story.asked.tenant, story.asked.source) == ("low", "anonymous", "header")
    assert story.in_the_way.obstacle == "no_room"
    wait = story.wait
    assert 0 < wait.starvation_s < wait.queue_wait_s
    assert wait.overtaken_by == wait.first[0]
    (group,) = wait.groups
    assert (group.tier, group.rule, group.came_later, group.requests, group.tokens) == ("high", "reserve", True, 1, 19)
    assert wait.unseen == []
    ahead = wait.first[0]
    assert (ahead.request_id, ahead.because) == ("overtakes", "high held less than its reserve")
    assert wait.overtaken_at_s == pytest.approx(ahead.admitted_at_s, abs=0.001)
    assert story.arrived_at_s < ahead.arrived_at_s < ahead.admitted_at_s
    assert (story.ended.outcome, story.ended.status) == ("completed", 200)
    assert story.trace_id is not None
    assert ahead.trace_id not in (None, story.trace_id)


@each(
    ("tenant", "engine", "rule", "sentence"),
    [
        ("t", "b#1", "claim", "it waited for its own engine"),
        ("other", "b#1", "fair_share", "the tenants of low take turns by their share"),
        ("t", None, "fair_share", "the tenants of low take turns by their share"),
    ],
)
def test_within_a_tier_a_later_request_of_the_same_tenant_goes_first_by_a_claim(
    tenant: str, engine: str | None, rule: str, sentence: str
) -> None:
    journal = Journal(now_us=lambda: 1000)
    ahead = arrives(journal, "ahead", "low", 20, tenant)
    ahead(Admitted(50, 30, 0, None, {}, 3, {}, engine=engine))
    arrives(journal, "waiter", "low", 10)
    story = ExplanationBuilder(journal, lambda: TIERS, "lab", is_shared=False).explain("waiter")
    (group,) = story.wait.groups
    assert (group.rule, group.because) == (rule, sentence)


@pytest.mark.parametrize(("claimed_us", "rule"), [(60, "claim"), (10, "fair_share")])
def test_of_several_tenants_the_time_of_the_claim_decides(claimed_us: int, rule: str) -> None:
    journal = Journal(now_us=lambda: 1000)
    ahead = arrives(journal, "ahead", "low", 20, "other")
    ahead(Admitted(50, 30, 0, None, {}, 3, {}, engine="b#1"))
    placed = Placed(100, 4, 0, 0, 0, claimed_us=claimed_us)
    waiter = arrives(journal, "waiter", "low", 10)
    waiter(Admitted(100, 90, 50, 50, {"low": 5}, 3, {}, engine="a#1", placed=placed))
    story = ExplanationBuilder(journal, lambda: TIERS, "lab", is_shared=False).explain("waiter")
    assert [group.rule for group in story.wait.groups] == [rule]


TIERS = ("critical", "high", "normal", "low", "batch")


def arrives(journal: Journal, request_id: str, tier: str, at_us: int, tenant: str = "t") -> Callable[[Event], None]:
    """One that holds 5 tokens and has to wait, by its events alone."""
    tell = begin(journal, Received(at_us, 10**18, "POST", "/", [], request_id), None)
    tell(Classified(at_us, tier, tenant, "header", None, "chat", "m", 1, False, 5, 1))
    tell(Queued(at_us, Obstacle.NO_ROOM, "no room"))
    return tell


@each(
    ("waiter", "ahead", "admitted", "rule", "sentence"),
    [
        ("low", ("high", 20), (1, {"low": "reserve"}), "reserve", "high held less than its reserve"),
        ("low", ("critical", 20), (0, {"low": "always_first"}), "always_first", "critical always goes first"),
        ("low", ("high", 20), (1, {"low": "level"}), "level", "high is more important"),
        (
            "normal",
            ("batch", 20),
            (1, {"normal": "level"}),
            "level",
            "batch had waited so long that it ranked with high",
        ),
        ("low", ("batch", 20), (4, {"low": "limit"}), "limit", "low was at its limit"),
        ("low", ("low", 20), (3, {}), "fair_share", "the tenants of low take turns by their share"),
        ("low", ("low", 5), (3, {}), "turn", "they came earlier"),
        ("low", ("high", 5), (1, {"low": "reserve"}), "turn", "high came earlier"),
        ("low", ("high", 20), (1, {}), "behind", "others of low stood before it, and had come later than high"),
        ("low", ("high", 20), (1, {"low": "new_one"}), "new_one", "of the rule new_one"),
    ],
)
def test_every_rule_has_its_sentence(
    waiter: str, ahead: tuple[str, int], admitted: tuple[int, dict[str, str]], rule: str, sentence: str
) -> None:
    journal = Journal(now_us=lambda: 1000)
    (tier, arrived_us), (level, passed) = ahead, admitted
    arrives(journal, "ahead", tier, arrived_us)(Admitted(50, 50 - arrived_us, 0, None, {}, level, passed))
    arrives(journal, "waiter", waiter, 10)
    story = ExplanationBuilder(journal, lambda: TIERS, "lab", is_shared=False).explain("waiter")
    (group,) = story.wait.groups
    assert (group.rule, group.because, group.came_later) == (rule, sentence, arrived_us > 10)


def test_what_is_not_kept_any_more_is_counted_in_tokens() -> None:
    journal = Journal(most_admissions=8, now_us=lambda: 1000)
    victim = arrives(journal, "victim", "batch", 0)
    for number in range(100):
        at_us = 10 + number
        arrives(journal, str(number), "high", at_us)(Admitted(at_us, 0, 0, None, {}, 1, {"batch": "reserve"}))
    victim(Admitted(200, 200, 190, 10, {"high": 500}, 4))
    story = ExplanationBuilder(journal, lambda: TIERS, "lab", is_shared=False).explain("victim")
    (unseen,) = story.wait.unseen
    (group,) = story.wait.groups
    assert unseen.tokens + group.tokens == 500
    assert 8 <= group.requests <= 9
    assert unseen.where == "admitted so long ago that they are not kept any more"


async def test_a_refusal_without_a_wait_and_one_after_a_wait() -> None:
    app = App(is_held=True)
    async with explained(app) as sidecar:
        refused = await sidecar.ask(None, "authorization: Bearer sk-nobody", "x-request-id: stranger")
        assert refused.status == 401
        sent = [await sidecar.send("normal", f"holds-{n}") for n in range(SLOTS)]
        assert (await sidecar.ask(None, "x-priority: batch", "x-request-id: too-long")).status == 503
        await finished(app, sent)
        stranger, too_long = await sidecar.story("stranger"), await sidecar.story("too-long")
    assert stranger.conclusion == (
        "refused at once with 401 invalid_api_key: this API key is not known here; ask the operator for one"
    )
    assert (stranger.state, stranger.asked, stranger.wait, stranger.admitted) == ("refused", None, None, None)
    assert too_long.state == "refused"
    assert (too_long.refused.status, too_long.refused.code) == (503, "queue_timeout")
    assert too_long.wait.queue_wait_s >= 0.1
    assert "; then refused with 503 queue_timeout: no room came free for tier batch within 0.1 s" in too_long.conclusion


async def test_a_refusal_after_the_key_was_read_names_the_tenant() -> None:
    async with explained(App()) as sidecar:
        assert (await sidecar.ask(None, key("acme"), "x-priority: gold", "x-request-id: bad-tier")).status == 400
        assert (await sidecar.ask(b"[", key("acme"), "x-request-id: bad-body")).status == 400
        stories = [await sidecar.story("bad-tier"), await sidecar.story("bad-body")]
    for story in stories:
        assert story.refused.tenant == "acme"
        assert next(steps(story)) == Step("asked by", "tenant acme, tier normal; it ended before it entered the pool")


async def test_one_that_did_not_wait_says_so() -> None:
    async with explained(App()) as sidecar:
        await (await sidecar.send("normal", "quick"))
        story = await sidecar.story("quick")
    assert (story.conclusion, story.wait, story.in_the_way) == ("admitted at once, without a wait", None, None)
    assert (story.admitted.level, story.admitted.aged_to, story.admitted.engine_priority) == (2, None, 20)
    assert story.answered.status == 200


async def test_observing_one_that_would_have_been_refused_or_would_have_waited_is_found_and_says_so() -> None:
    app = App()
    async with explained(app, policy(POLICY + "mode: observe\n")) as sidecar:
        await (await sidecar.send("normal", "quick"))
        # An answer that takes no time may end before the shadow request is decided on.
        said = ("enforcing would have admitted it at once", "enforcing had not decided when it ended")
        assert (await conclusion(sidecar, "quick")).removeprefix(PASSED) in said
        await sidecar.ask(None, "x-priority: urgent", "x-request-id: wrong")
        assert await conclusion(sidecar, "wrong") == f"{PASSED}enforcing would have refused it at once: unknown_tier"
        assert "would have refused it before" in text(await sidecar.story("wrong"))


def test_what_enforcing_would_have_done_has_a_sentence_for_every_verdict() -> None:
    def said(dry_run: DryRunDetails) -> str:
        story = Explanation("id", "", "running", "lab", 0.0, "POST", "/v1/completions", 0.0, dry_run=dry_run)
        return phrases.conclusion(story).removeprefix(PASSED)

    assert said(DryRunDetails()) == "enforcing would not have admitted it yet"
    waited = "enforcing would have admitted it after a wait of 8.70 s, of which 1.00 s starved"
    assert said(DryRunDetails("admitted", None, 8.7, 1.0)) == waited
    late = "enforcing would have refused it after a wait of 3.00 s: queue_timeout"
    assert said(DryRunDetails("refused", "queue_timeout", 3.0)) == late
    assert "would have disconnected" in said(DryRunDetails("abandoned", "client_left"))
    assert said(DryRunDetails("unknown", "stopped")).endswith("is not known: stopped")


def test_the_sentence_counts_what_other_replicas_admitted_first() -> None:
    group = AheadGroup("high", False, "turn", "it came earlier", 3, 300)
    wait = WaitDetails(1.0, 0.0, None, None, [group], [UnknownAhead("high", 3126, OTHER_REPLICAS)], [])
    story = Explanation("id", "", "running", "lab", 0.0, "POST", "/v1/completions", 0.0, wait=wait)
    assert phrases.conclusion(story) == (
        "waited 1.00 s: there was no room; no request overtook it; 3 requests known here and 3,126 tokens went first, "
        "admitted by other replicas of the pool"
    )


async def conclusion(sidecar: Explained, request_id: str) -> str:
    return (await sidecar.story(request_id)).conclusion


async def test_one_whose_client_hung_up_says_so() -> None:
    app = App(is_held=True)
    async with explained(app) as sidecar:
        sent = [await sidecar.send("normal", f"holds-{n}") for n in range(SLOTS)]
        leaver = await sidecar.send("low", "leaver")
        leaver.cancel()
        await sidecar.until(waiting=0)
        story = await sidecar.story("leaver")
        await finished(app, sent)
    assert (story.state, story.refused and story.refused.code) == ("abandoned", "client_left")
    assert story.conclusion.endswith("no request went ahead of it; then the client disconnected before it was admitted")


async def test_what_is_not_known_is_said_with_how_long_it_is_kept() -> None:
    async with explained(App()) as sidecar:
        status, body = await sidecar.get("nobody/has?this#id")
    assert status == 404
    error = msgspec.json.decode(body)["error"]
    assert error["code"] == "unknown_request"
    assert "no request with the id or trace id 'nobody/has?this#id' is known here" in error["message"]
    assert "at most 15 minutes" in error["message"]


async def test_any_id_a_client_may_send_is_found_and_a_trace_too_and_the_newest_of_several() -> None:
    odd = 'a/b?c#d%20e;f&g="h"<i>../..'
    async with explained(App()) as sidecar:
        for _ in range(3):
            await (await sidecar.send("normal", odd))
        story = await sidecar.story(odd)
        assert (story.request_id, story.others) == (odd, 2)
        assert story.trace_id is not None
        same = await sidecar.story(story.trace_id)
    assert (same.request_id, same.arrived_at_s, same.others) == (odd, story.arrived_at_s, 0)


# -- two replicas


async def test_in_a_shared_pool_the_other_replicas_part_is_counted_in_tokens(tmp_path: Path) -> None:
    used = policy(POLICY.replace("max_wait: 100ms", "max_wait: 10s"))
    app, other_app = App(is_held=True), App(is_held=True)
    with begun_store(tmp_path) as server:
        pools = [shared_pool(used, server) for _ in range(2)]
        for pool in pools:
            await pool.open()
        async with explained(app, used, pools[0]) as sidecar, explained(other_app, used, pools[1]) as other:
            sent = [await sidecar.send("normal", f"holds-{n}") for n in range(SLOTS)]
            await until(lambda: all(sidecar.knows(f"holds-{n}", "admitted") for n in range(SLOTS)))
            sent.append(await sidecar.send("batch", "victim"))
            there = await other.send("high", "overtakes-elsewhere")
            app.release()
            await until(lambda: other.knows("overtakes-elsewhere", "admitted"))
            await asyncio.sleep(1)  # it starves so long; when that began is known to a call's round trip
            other_app.release()
            await there
            await finished(app, sent)
            story = await sidecar.story("victim")
            assert (await sidecar.get("overtakes-elsewhere"))[0] == 404
            assert b"ask the other replicas, too" in (await sidecar.get("overtakes-elsewhere"))[1]
            assert (await other.story("overtakes-elsewhere")).state == "completed"
        for pool in pools:
            await pool.close()
    (unseen,) = story.wait.unseen
    assert (unseen.tier, unseen.tokens) == ("high", 19)
    assert unseen.where == "admitted by other replicas of the pool"
    assert (story.wait.overtaken_by, story.wait.first) == (None, [])
    assert story.wait.starvation_s > 0
    assert ": 19 tokens of tier high went ahead, admitted by other replicas of the pool" in story.conclusion
