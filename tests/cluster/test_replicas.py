"""Two sidecars of one pool in a real store: the page of either shows both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from sidecar.pools.redis.connection import ledger_key
from tests.cluster.replicas import POLICY, Replica, overload, replicas, until_shown
from tests.support.redis_servers import RedisServer
from tests.support.shared_pools import begun_store

pytestmark = [pytest.mark.anyio, pytest.mark.long]


def has_both(shown: Any) -> bool:
    return len(shown["replicas"]) == 2 and all(one["leases"] + one["waiting"] > 0 for one in shown["replicas"])


class Two(NamedTuple):
    store: RedisServer
    first: Replica
    second: Replica


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    with (
        begun_store(folder) as store,
        replicas(folder, 2, POLICY, SIDECAR_STORE=store.url) as (first, second),
    ):
        yield Two(store, first, second)


async def test_either_page_shows_both_and_the_tier_that_starves_in_either(two: Two) -> None:
    async with overload([two.first.url, two.second.url]):
        shown = [await until_shown(one, has_both) for one in (two.first, two.second)]
        for one in shown:
            assert one["mode"] == "shared"
            assert one["store"]["state"] == "shared"
            assert one["notices"] == []
            assert {replica["replica"] for replica in one["replicas"]} == {other["replica"] for other in shown}
            assert all(0 <= replica["seen_s_ago"] < 5 for replica in one["replicas"])
            queued = sum(tier["queued"]["requests"] for tier in one["tiers"])
            assert queued == sum(replica["waiting"] for replica in one["replicas"])
        starving = await until_shown(
            two.first, lambda one: one["starving"] == "batch" and one["tiers"][1]["overtaken_by"]
        )
        by = starving["tiers"][1]["overtaken_by"]["high"]
        assert by["requests"] > 0
        assert set(by["rules"]) <= {"level", "reserve"}
        assert {tenant["tenant"] for tenant in starving["tenants"]} == {"anonymous"}


async def test_a_refusal_is_on_the_page_of_the_replica_that_refused(two: Two) -> None:
    request_id = await two.first.refused()
    shown = await until_shown(two.first, lambda one: len(one["refusals"]) == 1)
    (refusal,) = shown["refusals"]
    assert (refusal["request_id"], refusal["code"]) == (request_id, "invalid_api_key")
    assert (await two.second.overview())["refusals"] == []


async def test_one_that_ends_takes_its_leave_and_leaves_nothing_behind(two: Two) -> None:
    key = f"{ledger_key('default')}:reports"
    assert two.store.command("HLEN", key) == 2
    two.second.process.terminate()
    assert await asyncio.to_thread(two.second.process.wait, 10) == 0
    assert two.store.command("HLEN", key) == 1  # at once: not by its silence
    await until_shown(two.first, lambda one: len(one["replicas"]) == 1)
    two.first.process.terminate()
    assert await asyncio.to_thread(two.first.process.wait, 10) == 0
    assert two.store.command("EXISTS", key) == 0
