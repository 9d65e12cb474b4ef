"""The tenants in a real store: several replicas, a literal list beside them, and stores that lose what they had."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from sidecar.policy.store import store_address
from sidecar.pools.base import StoreError
from sidecar.pools.redis.connection import StoreConnection
from sidecar.pools.redis.script import Script
from sidecar.tenants import stored
from sidecar.tenants.records import ChangeRefused, RefusedChange
from sidecar.tenants.stored import TenantRecords, tenants_connector, tenants_key
from tests.support.examples import examples
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
ROOT = tenants_key("p")


def text(tenant: str, *keys: str, weight: int = 1) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode({"tenant": tenant, "tier": "normal", "weight": weight, "keys": [*keys]})


def replica(server: RedisServer) -> TenantRecords:
    """A replica that knows nothing yet."""
    return TenantRecords(tenants_connector(store_address(server.url), "p"))


def client_of(server: RedisServer) -> Any:
    """An operator's client, which does what it wants with the keys."""
    return redis.Redis(host=server.host, port=server.port)


@asynccontextmanager
async def replicas(server: RedisServer, count: int) -> AsyncIterator[list[TenantRecords]]:
    """So many replicas of one pool, in a store without any tenant."""
    with client_of(server) as client:
        client.flushall()
    made = [replica(server) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            await one.close()


async def put(one: TenantRecords, tenant: str, *keys: str, weight: int = 1, replaces: bool = True) -> None:
    await one.put(tenant, lambda _: (text(tenant, *keys, weight=weight), keys), replaces=replaces)


async def refusal(change: Any) -> tuple[ChangeRefused, str | None]:
    with pytest.raises(RefusedChange) as refused:
        await change
    return refused.value.reason, refused.value.owner


async def test_what_the_store_refuses(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST_TENANTS", 2)
    async with replicas(redis_server, 2) as (one, other):
        await put(one, "acme", "k1", "k2")
        assert await refusal(put(other, "acme", "k1", replaces=False)) == (ChangeRefused.EXISTS, None)
        assert await refusal(put(other, "bulk", "k3", "k2")) == (ChangeRefused.KEY, "acme")
        assert await refusal(other.remove("bulk")) == (ChangeRefused.UNKNOWN, None)
        await put(other, "acme", "k1", replaces=True)  # gives k2 up
        await put(other, "bulk", "k3", "k2")
        assert await refusal(put(one, "more", "k4")) == (ChangeRefused.FULL, None)
        await put(one, "bulk", "k3")  # replaces, and is not one more
        await one.remove("acme")
        await put(one, "more", "k4", "k1")
        await other.synchronize()
        assert sorted(other.texts()) == ["bulk", "more"]


async def test_many_at_once_from_all_replicas(redis_server: RedisServer) -> None:
    async with replicas(redis_server, 4) as all_of_them:
        names = [f"t{number}" for number in range(40)]
        await asyncio.gather(*(put(all_of_them[at % 4], name, name) for at, name in enumerate(names)))
        for one in all_of_them:
            await one.synchronize()
            assert sorted(one.texts()) == sorted(names)
            assert one.version == 40


async def test_a_list_of_many_pages_and_more_removals_than_the_store_keeps(redis_server: RedisServer) -> None:
    async with replicas(redis_server, 2) as (one, late):
        for number in range(1_203):
            await put(one, f"t{number}", f"k{number}")
            if number == 20:
                await late.synchronize()
        newcomer = replica(redis_server)
        await newcomer.synchronize()
        assert len(newcomer.texts()) == 1_203
        for number in range(1_100):
            await one.remove(f"t{number}")
        for each in (late, newcomer):  # neither hears of each removal
            await each.synchronize()
            assert each.texts() == one.texts()
            assert len(each.texts()) == 103
        await newcomer.close()
        with client_of(redis_server) as client:
            client.flushall()
        await late.synchronize()
        another = replica(redis_server)
        await another.synchronize()
        assert another.texts() == one.texts()
        await another.close()


async def test_a_call_whose_answer_is_lost_is_made_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is in the store, and the replica does not know."""
    original, lost = StoreConnection.run, []

    async def run(self: StoreConnection, script: Any, arguments: Any) -> list[Any]:
        answer = await original(self, script, arguments)
        if arguments[0] in ("put", "remove") and arguments[0] not in lost:
            lost.append(arguments[0])
            raise StoreError("lost")
        return answer

    async with replicas(redis_server, 2) as (one, other):
        await other.synchronize()
        await put(one, "first")  # so that there is a connection that can be lost
        monkeypatch.setattr(StoreConnection, "run", run)
        await put(one, "acme", "k", replaces=False)
        await one.remove("acme")
        assert lost == ["put", "remove"]
        await put(one, "acme", "k", replaces=False)
        await other.synchronize()
        assert sorted(other.texts()) == sorted(one.texts()) == ["acme", "first"]
        assert one.version == 4


async def test_a_store_that_does_not_answer_is_said_to_and_nothing_is_forgotten(redis_server: RedisServer) -> None:
    async with replicas(redis_server, 1) as (one,):
        await put(one, "acme", "k")
        redis_server.kill()
        for change in (one.synchronize(), put(one, "bulk"), one.remove("acme")):
            with pytest.raises(StoreError, match="refused"):
                await change
        assert list(one.texts()) == ["acme"]
        redis_server.restart()  # with nothing in it
        await one.synchronize()
        newcomer = replica(redis_server)
        await newcomer.synchronize()
        assert newcomer.texts() == {"acme": text("acme", "k")}
        assert await refusal(put(newcomer, "bulk", "k")) == (ChangeRefused.KEY, "acme")  # the keys are there, too
        await newcomer.close()


async def test_the_latest_of_several_replicas_restores_the_list(redis_server: RedisServer) -> None:
    async with replicas(redis_server, 3) as (late, one, latest):
        await put(one, "acme")
        await put(one, "bulk")
        await late.synchronize()
        await put(one, "crawl")
        await put(one, "bulk", weight=2)
        await one.remove("acme")
        await latest.synchronize()
        with client_of(redis_server) as client:
            client.flushall()
        for each in (late, latest, one, late):
            await each.synchronize()
        expected = {"crawl": text("crawl"), "bulk": text("bulk", weight=2)}
        assert late.texts() == one.texts() == latest.texts() == expected
        await put(late, "delta")
        for each in (one, latest):
            await each.synchronize()
            assert sorted(each.texts()) == ["bulk", "crawl", "delta"]


async def test_a_successor_that_lacks_the_last_writes_gets_them(redis_server: RedisServer) -> None:
    """As a replica of Redis does that takes over before it has read everything."""
    async with replicas(redis_server, 2) as (one, other):
        await put(one, "acme")
        await put(one, "gone")
        await other.synchronize()
        with client_of(redis_server) as client:
            kept = {name: client.dump(name) for name in client.keys("*")}
            await one.remove("gone")
            await put(one, "bulk")
            client.flushall()
            for name, value in kept.items():
                client.restore(name, 0, value)
        await other.synchronize()
        assert sorted(other.texts()) == ["acme", "gone"]
        await one.synchronize()
        await other.synchronize()
        assert sorted(other.texts()) == sorted(one.texts()) == ["acme", "bulk"]


async def test_two_changes_of_one_version_the_store_decides(redis_server: RedisServer) -> None:
    """Where a successor without the last write took another one before that replica came back."""
    async with replicas(redis_server, 2) as (one, other):
        await put(one, "acme")
        await other.synchronize()
        with client_of(redis_server) as client:
            kept = {name: client.dump(name) for name in client.keys("*")}
            await put(one, "lost")
            await put(one, "later")
            client.flushall()
            for name, value in kept.items():
                client.restore(name, 0, value)
        await put(other, "instead")
        await one.synchronize()
        await other.synchronize()
        assert one.texts() == other.texts()
        assert sorted(one.texts()) == ["acme", "instead", "later"]


async def test_another_list_counts_and_not_ones_own(redis_server: RedisServer) -> None:
    async with replicas(redis_server, 2) as (one, other):
        await put(one, "acme")
        with client_of(redis_server) as client:
            client.flushall()
        await put(other, "bulk")
        await one.synchronize()
        assert list(one.texts()) == list(other.texts()) == ["bulk"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda client: client.hset(ROOT, "version", "many"),
        lambda client: client.hset(ROOT, mapping={"birth": b"\xff", "epoch": "0", "version": "9", "floor": "0"}),
        lambda client: client.delete(ROOT + ":records"),
        lambda client: client.set(ROOT, "text"),
        lambda client: client.zadd(ROOT + ":changed", {b"\xff\xfe": 7}),
    ],
)
async def test_keys_that_someone_spoiled_are_reported_and_nothing_is_forgotten(
    redis_server: RedisServer, spoil: Callable[[Any], Any]
) -> None:
    async with replicas(redis_server, 2) as (one, newcomer):
        await put(one, "acme", "k")
        with client_of(redis_server) as client:
            spoil(client)
        for each in (one, newcomer):
            with contextlib.suppress(StoreError):
                await asyncio.wait_for(each.synchronize(), 60)
        assert list(one.texts()) in (["acme"], [])


async def test_a_record_that_is_not_json_can_be_replaced_and_removed(redis_server: RedisServer) -> None:
    async with replicas(redis_server, 1) as (one,):
        for name in ("acme", "bulk"):
            await put(one, name, name)
        with client_of(redis_server) as client:
            client.hset(ROOT + ":records", mapping={"acme": "{", "bulk": "[1]"})
        await put(one, "acme", "another")
        await one.remove("bulk")
        assert one.texts() == {"acme": text("acme", "another")}


async def test_no_call_reads_or_writes_the_pools_own_keys(redis_server: RedisServer) -> None:
    async with replicas(redis_server, 1) as (one,):
        await put(one, "acme", "k")
        await one.remove("acme")
        await put(one, "bulk", "k")
        with client_of(redis_server) as client:
            assert all(name.decode().startswith("admission:tenants:{p}") for name in client.keys("*"))


CHANGES = some.lists(
    some.one_of(
        some.tuples(some.just("put"), some.integers(0, 2), some.integers(0, 4), some.integers(1, 3)),
        some.tuples(some.just("create"), some.integers(0, 2), some.integers(0, 4), some.integers(1, 3)),
        some.tuples(some.just("remove"), some.integers(0, 2), some.integers(0, 4), some.just(0)),
        some.tuples(some.just("read"), some.integers(0, 2), some.just(0), some.just(0)),
        some.tuples(some.sampled_from(["flush", "anew"]), some.integers(0, 2), some.just(0), some.just(0)),
    ),
    max_size=25,
)


@given(changes=CHANGES)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_replicas_agree_with_a_literal_list(redis_server: RedisServer, changes: list[Any]) -> None:
    """Changes and reads by any replica, stores that are emptied, and replicas that begin anew."""
    asyncio.run(agree(redis_server, changes))


async def agree(server: RedisServer, changes: list[Any]) -> None:
    model: dict[str, bytes] = {}
    async with replicas(server, 3) as all_of_them:
        for kind, at, number, weight in changes:
            one, name, key = all_of_them[at], f"t{number}", f"k{number}"
            if kind in ("put", "create"):
                if kind == "create" and name in model:
                    assert await refusal(put(one, name, key, replaces=False)) == (ChangeRefused.EXISTS, None)
                else:
                    await put(one, name, key, weight=weight, replaces=kind == "put")
                    model[name] = text(name, key, weight=weight)
            elif kind == "remove":
                if model.pop(name, None) is None:
                    assert await refusal(one.remove(name)) == (ChangeRefused.UNKNOWN, None)
                else:
                    await one.remove(name)
            elif kind == "read":
                await one.synchronize()
                assert one.texts() == model
            elif kind == "flush":  # with all replicas there: each brings what it knows before the next change
                with client_of(server) as client:
                    client.flushall()
                await settle(all_of_them)
            else:
                await one.close()
                all_of_them[at] = replica(server)
                await settle(all_of_them)
        await settle(all_of_them)
        assert [one.texts() for one in all_of_them] == [model] * 3
        known = all_of_them[0].texts()
        await all_of_them[0].synchronize()
        assert all_of_them[0].texts() is known


async def settle(all_of_them: list[TenantRecords]) -> None:
    for _ in range(2):
        for one in all_of_them:
            await one.synchronize()


def test_the_negative_control_of_the_literal_list(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that forgets removals is noticed."""
    source = stored._SCRIPT.source.replace("redis.call('ZADD', removed, at, tenant)", "")
    monkeypatch.setattr(stored, "_SCRIPT", Script.of(source))
    program = [("put", 0, 1, 1), ("read", 1, 0, 0), ("remove", 0, 1, 0), ("read", 1, 0, 0)]
    with pytest.raises(AssertionError):
        asyncio.run(agree(redis_server, program))
