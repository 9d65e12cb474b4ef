"""Hours in a running sidecar: what waits follows them, alone, in a dry run, and where the clocks of replicas differ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy.reload import FollowedHours
from tests.support.middleware import App, key
from tests.support.redis_servers import RedisServer
from tests.support.stored_sidecar import Sidecar, sidecar
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
DAY = "mon-fri 08:00-18:00 UTC"
BEGIN_S = datetime(2026, 11, 30, 8, tzinfo=timezone.utc).timestamp()
BY_HOURS = f'1000}}, limit: 75%, hours: {{"{DAY}": {{limit: 25%}}'
"""After `max_requests` of the tier batch in a pool of 4 requests: 3 of them, and by day 1."""
LIMITS = f'limits: {{requests_per_minute: 600, hours: {{"{DAY}": {{requests_per_minute: 60}}}}}}\n'


def hours_of(one: Sidecar) -> FollowedHours:
    found = one.middleware.observability._hours
    assert found is not None
    return found


def look(one: Sidecar, now_s: float) -> None:
    """The clock of a replica is set, and it looks, as it does by its timer."""
    hours = hours_of(one)
    hours._clock = lambda: now_s
    hours._look()


def use(one: Sidecar) -> tuple[int, int]:
    """How many requests of this replica hold a lease, and how many wait."""
    state: Any = one.middleware.controller.pool.state()
    own = state["store"]["own"]
    return int(own["leases"]), int(own["waiting"])


@asynccontextmanager
async def two(folder: Path, store: RedisServer, app: App, now_s: float) -> AsyncIterator[tuple[Sidecar, Sidecar]]:
    async with (
        sidecar(folder / "a", store.url, app=app, max_requests=BY_HOURS, acme=LIMITS) as one,
        sidecar(folder / "b", store.url, app=app, max_requests=BY_HOURS, acme=LIMITS) as other,
    ):
        for each in (one, other):
            look(each, now_s)
        yield one, other


async def test_what_waits_follows_the_hours_and_clocks_that_differ_do_not_fight(
    tmp_path: Path, store: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.policy")
    app = App(is_held=True)
    async with two(tmp_path, store, app, BEGIN_S) as (one, slow):
        asked = [asyncio.create_task(each.ask(key("nightly"))) for each in (one, slow, slow)]
        await until(lambda: len(app.seen) == 1 and sum(use(each)[1] for each in (one, slow)) == 2)
        told = len(caplog.records)
        end_s = BEGIN_S + 10 * 3600
        look(one, end_s)  # its clock is ahead by 7 s, and decides for both: newest rules win
        await until(lambda: len(app.seen) == 3)
        look(slow, end_s - 7)
        asked += [asyncio.create_task(each.ask(key("nightly"))) for each in (one, slow)]
        await until(lambda: sum(use(each)[1] for each in (one, slow)) == 2)
        assert len(app.seen) == 3  # all that the night's limit lets in: the slower clock has not taken it back
        look(slow, end_s)
        look(one, end_s + 7)
        app.release(2)
        await until(lambda: len(app.seen) == 5)
        app.release(3)
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        lines = [line.getMessage() for line in caplog.records[told:] if getattr(line, "event", "") == "policy_hours"]
        assert len(lines) == 2  # one of each replica
        assert all("tier batch limit 25% -> 75%" in line for line in lines)
        assert "tenant acme" in lines[0]


async def test_a_replica_that_was_cut_off_comes_back_with_what_counts(tmp_path: Path, store: RedisServer) -> None:
    app = App(is_held=True)
    async with two(tmp_path, store, app, BEGIN_S - 1) as (one, other):
        for each in (one, other):
            look(each, BEGIN_S)
        asked = [asyncio.create_task(each.ask(key("nightly"))) for each in (one, other)]
        await until(lambda: len(app.seen) == 1 and sum(use(each)[1] for each in (one, other)) == 1)
        store.pause()
        try:
            look(other, BEGIN_S + 10 * 3600)
        finally:
            store.resume()
        await until(lambda: len(app.seen) == 2)
        app.release(2)
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}


async def test_a_tenants_limits_and_the_pages_follow(tmp_path: Path, store: RedisServer) -> None:
    async with sidecar(tmp_path, store.url, "stored_tenants: true\n", max_requests=BY_HOURS, acme=LIMITS) as one:
        look(one, BEGIN_S - 1)
        assert (await one.ask(key("acme"))).headers["x-ratelimit-limit-requests"] == "600"
        record = {"tenant": "bulk", "tier": "batch", "keys": [], "limits": {"hours": {DAY: {"max_output_tokens": 5}}}}
        assert (await one.call("POST", "/tenants", record))[0] == 201
        look(one, BEGIN_S)
        assert (await one.ask(key("acme"))).headers["x-ratelimit-limit-requests"] == "60"
        named = one.middleware.controller.policy.named
        assert named["bulk"].limits.max_output_tokens == 5
        _, answer = await one.call("GET", "/tenants/bulk")
        assert answer["tenants"][0]["record"]["limits"] == {"hours": {DAY: {"max_output_tokens": 5}}}
        _, answer = await one.call("GET", "/tenants/acme")
        assert answer["tenants"][0]["record"]["limits"]["hours"] == {DAY: {"requests_per_minute": 60}}
        _, state = await one.call("GET", "/state")
        assert state["policy"]["hours"]["next_change"] is not None
        assert one.middleware.controller.policy.generation == hours_of(one).policy.generation


async def test_a_dry_run_goes_on_over_the_hours(tmp_path: Path, store: RedisServer) -> None:
    app = App(is_held=True)
    async with sidecar(tmp_path, store.url, "mode: observe\n", app=app, max_requests=BY_HOURS) as one:
        look(one, BEGIN_S)
        asked = [asyncio.create_task(one.ask(key("nightly"))) for _ in range(2)]
        await until(lambda: len(app.seen) == 2 and use(one) == (1, 1))  # the second would wait
        _, report = await one.call("GET", "/observed")
        look(one, BEGIN_S + 10 * 3600)
        await until(lambda: use(one) == (2, 0))
        app.release(2)
        await asyncio.gather(*asked)

        async def counts_both() -> bool:
            _, found = await one.call("GET", "/observed")
            return bool(found["since_s"] == report["since_s"] and found["total"]["requests"] == 2)

        await until(counts_both)
