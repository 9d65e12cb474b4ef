"""The overview of a real pool with real waits, and what becomes of it when other replicas tell of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest

from sidecar.admin.app import admin_app
from sidecar.admin.routes import LivePages
from sidecar.cluster import overview as module
from sidecar.cluster.document import OldestWaiter, Overview, Promised, TenantView
from sidecar.cluster.overview import PoolOverview
from sidecar.cluster.report import ReplicaReport, TierWaits, pack
from sidecar.cluster.sampler import Sources
from sidecar.engines.view import Amount
from sidecar.events import Admitted, Classified, Obstacle, Outcome, Preempted, Queued, Received, Settled
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.policy.tier import ServiceObjectives
from sidecar.pools import PeerReport, Pool, StoreError
from sidecar.pools.redis import RedisLink, ledger_connector
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.metrics.tenants import TenantHolding
from sidecar.telemetry.recent import Recent
from tests.pools.harness import Clock, ask, simple
from tests.support.redis_servers import RedisServer
from tests.support.serving import serving
from tests.support.waiting import until
from tests.telemetry.span_stories import begin

pytestmark = pytest.mark.anyio
NOW_S = 1_700_000_003.0


class Telling(Pool):
    """A pool whose other replicas are the test's."""

    others: Mapping[str, PeerReport] = {}
    trouble: str | None = None
    reported = b""

    async def share(self, report: bytes) -> Mapping[str, PeerReport]:
        if self.trouble is not None:
            raise StoreError(self.trouble)
        self.reported = report
        return self.others


def sources_of(pool: Pool, policy: Policy, **more: Any) -> Sources:
    plain: dict[str, Any] = {
        "recent": Recent(),
        "tenants": dict,
        "refusals": Journal().refusals,
        "notices": list,
        "oldest": pool.oldest,
    }
    return Sources(policy=lambda: policy, pool=pool, **{**plain, **more})


def policy_of() -> Policy:
    policy = simple(("high", "batch"), requests=10)
    slo = ServiceObjectives(starvation_s=1800.0)
    return replace(policy, tiers=(policy.tiers[0], replace(policy.tiers[1], slo=slo)))


async def test_it_shows_what_the_pool_holds_and_who_waits() -> None:
    clock, policy = Clock(), policy_of()
    pool = Pool(policy, clock)
    await pool.enter(ask(tokens=60))
    await pool.enter(ask(tier=1, tokens=60))
    clock.advance(1)
    await pool.enter(ask(tier=0, tokens=30))  # came later, and goes first
    clock.advance(2)
    live = PoolOverview(
        sources_of(pool, policy, tenants=lambda: {"acme": TenantHolding(90, 2, 1)}, notices=lambda: ["look"]),
        lambda: NOW_S,
    )
    shown = live.overview()
    assert (shown.capacity, shown.held, shown.free) == (Amount(100, 10), Amount(90, 2), Amount(10, 8))
    assert (shown.mode, shown.store, shown.notices, shown.starving) == ("local", None, ["look"], "batch")
    assert shown.tenants == [TenantView("acme", 90, 2, 1)]
    high, batch = shown.tiers
    assert (high.level, high.held, high.oldest) == (0, Amount(90, 2), None)
    assert (batch.queued, batch.slo) == (Amount(60, 1), Promised(starvation_s=1800.0))
    assert (batch.oldest.wait_s, batch.oldest.starvation_s, batch.oldest.served_ahead) == (3.0, 2.0, {"high": 30})
    assert batch.recent[-1].wait_max_s == 3.0  # although it has not ended
    assert [(one.leases, one.waiting, one.seen_s_ago) for one in shown.replicas] == [(2, 1, 0.0)]


async def test_who_was_preempted_and_not_admitted_again_is_a_refusal_that_says_so() -> None:
    journal, recent, policy = Journal(now_us=lambda: 5_000_000), Recent(), policy_of()
    events = (
        Classified(1, "batch", "acme", "key", None, "chat", None, None, False, 10, 1),
        Admitted(1, 0, 0, None, {}, 1),
        Preempted(2_000_001, 1, 1),
        Queued(2_000_001, Obstacle.PREEMPTED, "its room went"),
        Settled(4_000_001, Outcome.FAILED, 503, 0, None, None, "queue_timeout"),
    )
    for listener in (journal, recent):
        tell = begin(listener, Received(0, round((NOW_S - 4) * 1e9), "POST", "/", [], "mine"), None)
        for event in events:
            tell(event)
    shown = PoolOverview(sources_of(Pool(policy), policy, recent=recent, refusals=journal.refusals), lambda: NOW_S)
    (refusal,) = shown.overview().refusals
    assert (refusal.request_id, refusal.code, refusal.status) == ("mine", "queue_timeout", 503)
    assert (refusal.preempted, refusal.waited_s) == (1, 4.0)


async def test_five_seconds_in_which_nothing_but_a_preemption_happened_are_reported() -> None:
    recent, policy = Recent(), policy_of()
    tell = begin(recent, Received(0, round((NOW_S - 6) * 1e9), "POST", "/", [], "mine"), None)
    tell(Classified(1, "batch", "acme", "key", None, "chat", None, None, False, 10, 1))
    tell(Admitted(1, 0, 0, None, {}, 1))
    tell(Preempted(6_000_001, 1, 1))
    batch = PoolOverview(sources_of(Pool(policy), policy, recent=recent), lambda: NOW_S).overview().tiers[1]
    assert (batch.recent[-1].preempted, batch.recent[-1].engine_lost_s) == (1, 6.0)


async def test_what_was_made_a_moment_ago_serves_everybody_who_asks() -> None:
    times = [NOW_S]
    policy = policy_of()
    live = PoolOverview(sources_of(Pool(policy), policy), lambda: times[0])
    first = live.overview()
    times[0] += module.FRESH_S * 0.9
    assert live.overview() is first
    times[0] += module.FRESH_S
    assert live.overview() is not first
    times[0] -= 3600  # the calendar was set back
    assert live.overview().at_s == times[0]


async def test_an_unbounded_pool_is_shown_without_bounds() -> None:
    policy = simple(tokens=None)
    shown = PoolOverview(sources_of(Pool(policy), policy)).overview()
    assert (shown.capacity, shown.free) == (Amount(), Amount())
    assert msgspec.json.decode(msgspec.json.encode(shown))["capacity"] == {"tokens": None, "requests": None}


def other(name: str, **more: Any) -> ReplicaReport:
    plain: dict[str, Any] = {"leases": 5, "waiting": 6, "mode": "enforce"}
    return ReplicaReport(name, f"host-{name}", **{**plain, **more})


async def test_other_replicas_are_shown_until_they_are_silent_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_EVERY_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    times, policy = [NOW_S], policy_of()
    pool = Telling(policy)
    pool.others = {"two": PeerReport(1.5, pack(other("two"))), "old": PeerReport(0.1, b"of another version")}
    live = PoolOverview(sources_of(pool, policy), lambda: times[0])
    await live.open()
    await asyncio.sleep(0.05)
    shown = live.overview()
    assert [(one.host, one.leases, one.seen_s_ago) for one in shown.replicas if one.replica == "two"] == [
        ("host-two", 5, 1.5)
    ]
    assert any("replica old is not shown" in notice for notice in shown.notices)
    pool.trouble = "the store is divided: gone"
    await asyncio.sleep(0.05)
    times[0] += 3
    shown = live.overview()
    assert [one.seen_s_ago for one in shown.replicas if one.replica == "two"] == [4.5]
    assert "the other replicas are not shown: the store is divided: gone" in shown.notices
    times[0] += module.FORGET_AFTER_S
    assert [one.replica for one in live.overview().replicas] == [live.overview().replica]
    await live.close()


async def test_what_waits_in_any_replica_of_the_same_mode_is_the_pools() -> None:
    policy = policy_of()
    pool = Telling(policy)
    longest = OldestWaiter(40.0, 30.0, {"high": 700}, "two")
    waits = [TierWaits("batch", Amount(500, 5), longest)]
    shadows = [TierWaits("batch", Amount(9, 9), OldestWaiter(99.0, 99.0, {}, "three"))]
    pool.others = {
        "two": PeerReport(1.0, pack(other("two", tiers=waits))),
        "three": PeerReport(1.0, pack(other("three", tiers=shadows, mode="observe"))),
    }
    live = PoolOverview(sources_of(pool, policy), lambda: NOW_S)
    await live._share()
    shown = live.overview()
    assert (shown.tiers[1].queued, shown.tiers[1].oldest) == (Amount(500, 5), longest)
    assert shown.headline.startswith("batch starves: its oldest request has waited 40 s and starved 30 s.")
    assert [it.recent[-1].wait_max_s for it in shown.tiers] == [0.0, 0.0], "the last minutes are this process's own"


async def test_every_replica_reports_how_often_the_whole_pool_is_wanted(store: RedisServer) -> None:
    """Two replicas over a real store: one has what is held, the other what waits."""
    policy, address = policy_of(), store_address(store.url)
    links = [RedisLink(ledger_connector(address, policy.pool), policy.pool) for _ in range(2)]
    pools = [Pool(policy, link=link) for link in links]
    lives = [PoolOverview(sources_of(pool, policy), lambda: NOW_S) for pool in pools]
    assert [live.wanted() for live in lives] == [None, None], "the store has not answered yet"
    try:
        for pool in pools:
            await pool.open()
        await pools[0].enter(ask(tokens=90))
        await pools[1].enter(ask(tier=1, tokens=60))
        for live in (*lives, *lives):  # the first has read the other's report when it shares again
            await live._share()
        await until(lambda: [live.wanted() for live in lives] == [1.5, 1.5], what="both report the same")
    finally:
        for pool in pools:
            await pool.close()
    assert [live.wanted() for live in lives] == [1.5, 1.5], "as it was, while it is not known"


async def test_replicas_that_observe_want_what_they_would_hold_and_those_that_pass_say_nothing() -> None:
    policy = replace(policy_of(), mode=Mode.OBSERVE)
    pool = Telling(policy)
    waits = [TierWaits("batch", Amount(50, 5))]
    pool.others = {
        "two": PeerReport(1.0, pack(other("two", tiers=waits, mode="observe"))),
        "three": PeerReport(1.0, pack(other("three", tiers=waits))),
    }
    live = PoolOverview(sources_of(pool, policy), lambda: NOW_S)
    await live._share()
    assert live.wanted() == 0.5
    policy = replace(policy, mode=Mode.PASS)
    live._sources = sources_of(pool, policy)
    assert live.wanted() is None, "an autoscaler that read 0 would end the engines"


async def test_a_tier_that_waits_at_its_own_limit_in_another_replica_does_not_starve() -> None:
    policy = policy_of()
    pool = Telling(policy)
    waits = [TierWaits("batch", Amount(500, 5), OldestWaiter(40.0, 30.0, {"high": 700}, "two"), is_at_limit=True)]
    pool.others = {"two": PeerReport(1.0, pack(other("two", tiers=waits)))}
    live = PoolOverview(sources_of(pool, policy), lambda: NOW_S)
    await live._share()
    assert live.overview().headline == "No request starves. batch waits longest: 40 s, at its own limit."


async def test_a_defect_in_sharing_is_reported_and_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_EVERY_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    policy = policy_of()
    pool = Telling(policy)
    pool.others = 7  # type: ignore[assignment]
    live = PoolOverview(sources_of(pool, policy, oldest=lambda: 1 / 0))
    await live.open()
    await asyncio.sleep(0.03)
    live._sources = sources_of(pool, policy)
    pool.others = {"two": PeerReport(0.0, pack(other("two")))}
    await asyncio.sleep(0.05)
    assert len(live.overview().replicas) == 2
    await live.close()


async def test_the_pages_are_served_and_the_document_is_what_top_reads() -> None:
    policy = policy_of()
    pages = LivePages(PoolOverview(sources_of(Pool(policy), policy)))
    admin = admin_app(state=dict, readiness=list, routes=pages.routes())
    async with serving(admin) as served, aiohttp.ClientSession(served.url) as client:
        async with client.get("/overview") as response:
            assert response.content_type == "application/json"
            assert msgspec.json.decode(await response.read(), type=Overview).tiers[1].tier == "batch"
        async with client.get("/") as response:
            policy_header = response.headers["content-security-policy"]
            assert response.content_type == "text/html"
        assert "default-src 'none'" in policy_header
        assert "unsafe" not in policy_header
        async with client.head("/overview/stream") as response:
            assert response.status == 200
