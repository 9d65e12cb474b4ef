"""What an operator sees of engines, and a drain: a real fleet before emulated engines, and its pool."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.engines import watch as engine_watch
from sidecar.engines.view import Amount, DrainEnd
from sidecar.fleet import view as fleet_view
from sidecar.fleet.view import Prompts, RecentPrompts
from tests.fleet.engines import listed
from tests.fleet.views import lease_of, viewed
from tests.support.waiting import other_tasks, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "RETRY_EVERY_S", 0.05)
    monkeypatch.setattr(fleet_view, "LOOK_EVERY_S", 0.01)


async def test_a_row_joins_the_member_and_its_ledger() -> None:
    async with viewed() as seen:
        lease = await lease_of(seen.pool, tokens=30, prompt=20)
        a, b = seen.view.documents()
        assert (a.name, a.id, a.state, a.takes_new, a.reason) == ("a", "a#1", "ready", True, None)
        assert a.url == f"http://127.0.0.1:{seen.engines[0].port}"
        assert (a.capacity, a.effective) == (Amount(1000, 8), Amount(1000, 8))
        assert (a.held, a.unprefilled_tokens, a.in_flight) == (Amount(30, 1), 20, 0)
        assert (b.held, b.unprefilled_tokens, b.hit_rate) == (Amount(0, 0), 0, None)
        lease.settle()
        assert seen.view.documents()[0].held == Amount(0, 0)


async def test_a_drain_ends_when_the_last_lease_of_the_engine_has_ended() -> None:
    async with viewed() as seen:
        leases = [await lease_of(seen.pool) for _ in range(4)]
        held = [lease for lease in leases if lease.grant and lease.grant.engine == "a#1"]
        assert len(held) == 2
        await seen.view.drain("a")
        drained = asyncio.create_task(seen.view.drained("a", 60))
        await until(lambda: not seen.pool.engines()[0].takes_new)
        row = seen.view.documents()[0]
        assert (row.state, row.takes_new, row.effective) == ("draining", False, Amount(0, 0))
        newer = [await lease_of(seen.pool) for _ in range(3)]
        assert {lease.grant.engine for lease in newer if lease.grant} == {"b#1"}
        for lease in held:
            assert not drained.done()
            lease.settle()
        assert await drained is DrainEnd.EMPTY
        assert seen.view.documents()[1].held.requests == 5


async def test_the_pool_knows_of_a_drain_at_once() -> None:
    async with viewed() as seen:
        await seen.view.drain("a")
        assert not seen.pool.engines()[0].takes_new
        assert await seen.view.drained("a", 0) is DrainEnd.EMPTY


async def test_a_request_that_the_pool_did_not_place_keeps_an_engine_too() -> None:
    async with viewed() as seen:
        member = seen.fleet.members()[0]
        member.open_requests += 1  # one of `GET /v1/models`, say
        await seen.view.drain("a")
        assert await seen.view.drained("a", 0.05) is DrainEnd.TIMED_OUT
        member.open_requests -= 1
        assert await seen.view.drained("a", 60) is DrainEnd.EMPTY


async def test_a_drain_that_is_resumed_or_takes_too_long() -> None:
    async with viewed() as seen:
        lease = await lease_of(seen.pool)
        await seen.view.drain("a")
        await seen.view.drain("a")
        assert await seen.view.drained("a", 0.05) is DrainEnd.TIMED_OUT
        drained = asyncio.create_task(seen.view.drained("a", 60))
        await asyncio.sleep(0.03)
        await seen.view.resume("a")
        assert await drained is DrainEnd.RESUMED
        await until(lambda: seen.pool.engines()[0].takes_new)
        assert (await lease_of(seen.pool)).grant is not None
        lease.settle()


async def test_an_engine_that_restarts_or_goes_while_it_drains_has_drained_when_its_last_lease_ends() -> None:
    async with viewed(3) as seen:
        leases = [await lease_of(seen.pool) for _ in range(3)]
        await seen.view.drain("a")
        await seen.view.drain("b")
        waits = [asyncio.create_task(seen.view.drained(name, 60)) for name in "ab"]
        await seen.engines[0].stop()
        await until(lambda: seen.view.documents()[0].state == "down")
        await seen.engines[0].start()
        await until(lambda: "a#2" in [row.id for row in seen.view.documents()])
        listed(seen.fleet, [seen.addresses()[0], seen.addresses()[2]])
        await asyncio.sleep(0.1)
        assert [wait.done() for wait in waits] == [False, False]
        rows = {row.id: row for row in seen.view.documents()}
        assert (rows["a#1"].state, rows["a#1"].held.requests, rows["a#1"].url) == ("gone", 1, None)
        assert not rows["a#2"].draining
        assert rows["b#1"].state == "gone"
        for lease in leases:
            lease.settle()
        assert [await wait for wait in waits] == [DrainEnd.EMPTY] * 2
        await until(lambda: [row.id for row in seen.view.documents()] == ["a#2", "c#1"])


async def test_a_canceled_wait_leaves_nothing_and_the_engine_drains_on() -> None:
    async with viewed() as seen:
        lease = await lease_of(seen.pool)
        before = other_tasks()
        await seen.view.drain("a")
        waits = [asyncio.create_task(seen.view.drained("a", 60)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await until(lambda: len(other_tasks()) <= len(before))  # probes come and go
        assert seen.view.documents()[0].state == "draining"
        lease.settle()


async def test_the_names_are_the_operators() -> None:
    async with viewed() as seen:
        for change in (seen.view.drain, seen.view.resume):
            with pytest.raises(KeyError):
                await change("a#1")
        with pytest.raises(KeyError):
            await seen.view.drained("nobody", 1)


def test_recent_prompts_are_those_of_five_minutes() -> None:
    recent = RecentPrompts()
    assert recent.note(0.0, Prompts(10, 5, 0, 0)) == Prompts(10, 5, 0, 0)
    for second in range(1, 1000):
        found = recent.note(float(second), Prompts(10 + second, 5, second, second // 2))
    assert 300 <= found.sent <= 306
    assert found.predicted == 0
    assert found.measured in (150, 151, 152, 153)
    assert len(recent._noted) <= 62
