"""Several workers on one port: they share one pool, and end, reload and start again together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.support.redis_servers import RedisServer, first_binary
from tests.workers.running import (
    WITHIN_S,
    Command,
    children,
    events,
    held_engine,
    is_running,
    serving,
    started,
    until,
    write_policy,
)

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has workers")]


async def both_have_some(command: Command, streams: list[asyncio.Task[tuple[int, bytes]]]) -> None:
    """Sends requests that stream until each worker has one: the system divides the connections by chance."""
    while not all((await command.under_way()).values()):
        assert len(streams) < 40
        streams.append(asyncio.ensure_future(command.stream()))
        await until(lambda: counts(command, len(streams)), "the last has come")


async def counts(command: Command, requests: int) -> bool:
    return sum((await command.under_way()).values()) == requests


async def test_two_workers_share_one_pool_and_one_port_and_drain_together(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=3), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        streams += [asyncio.ensure_future(command.stream()) for _ in range(6)]
        await until(lambda: engine.running == 3, "the pool is full")
        state = await command.page("/state")
        assert state["pool"]["capacity"]["requests"] == 3
        assert state["pool"]["store"]["replicas"] == 2
        assert sum(row["store"]["own"]["leases"] for row in state["workers"]) == 3
        command.signal(signal.SIGTERM)
        await until(lambda: draining(command), "it drains")
        assert await command.ask() == 503
        engine.release.set()
        answers = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
        code, log = await command.ended()
    assert [status for status, _ in answers] == [200] * len(streams)
    assert all(body.endswith(b"[DONE]\n\n") for _, body in answers)
    assert engine.most == 3
    assert code == 0
    assert events(log).count("draining") == 2
    assert "Traceback" not in log


async def draining(command: Command) -> bool:
    return (await command.page("/state")).get("draining", False)


@pytest.mark.long
async def test_a_store_that_is_named_has_the_pool_and_no_other_is_started(tmp_path: Path) -> None:
    with RedisServer(first_binary(), tmp_path) as store:
        async with (
            held_engine() as engine,
            serving(write_policy(tmp_path), engine.url, SIDECAR_STORE=store.url) as command,
        ):
            assert await command.ask() == 200
            assert children(command.process.pid) == set(await command.pids())
            assert any(str(key).startswith("admission:") for key in store.command("KEYS", "*"))
            command.signal(signal.SIGTERM)
            assert (await command.ended())[0] == 0


@pytest.mark.long
async def test_a_service_manager_that_signals_every_process_cuts_no_request_off(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=40), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        for pid in [*children(command.process.pid), command.process.pid]:
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(1)
        engine.release.set()
        answers = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
        code, log = await command.ended()
    assert {status for status, _ in answers} == {200}
    assert code == 0
    assert "cut" not in events(log)
    assert "Traceback" not in log


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5])
async def test_a_signal_during_the_start_leaves_nothing(after_s: float, tmp_path: Path) -> None:
    arguments = ("--upstream", "http://127.0.0.1:9", "--policy", str(write_policy(tmp_path)))
    async with started("--workers", "2", *arguments) as process:
        await asyncio.sleep(after_s)
        begun = children(process.pid)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert not any(map(is_running, begun))
    assert process.returncode in (0, -signal.SIGTERM)  # the latter before it has any process
    assert "Traceback" not in errors.decode()


@pytest.mark.long
async def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path), engine.url) as command:
        stream = asyncio.ensure_future(command.stream())
        await until(lambda: engine.running == 1, "it streams")
        command.signal(signal.SIGTERM)
        await until(lambda: draining(command), "it drains")
        command.signal(signal.SIGINT)
        code, log = await asyncio.wait_for(command.ended(), 15)
        with pytest.raises(aiohttp.ClientError):
            await stream
    assert code == 0
    assert "cut" in events(log)


@pytest.mark.long
async def test_a_worker_that_is_killed_harms_no_request_of_the_other_and_is_started_again(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=40), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        counts, pids = await command.under_way(), await command.pids()
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: sum(stream.done() for stream in streams) == counts[1], "the dead worker's streams end")
        # The other takes every new connection meanwhile, and the dead one's leases come back.
        assert [await command.ask() for _ in range(5)] == [200] * 5
        await until(lambda: is_restarted(command, pids), "it is started again")
        await until(lambda: holds(command, counts[2]), "the dead worker's leases have come back")
        assert (await command.page("/readyz"))["notices"] == []
        engine.release.set()
        ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), WITHIN_S)
        after = await command.pids()
        command.signal(signal.SIGTERM)
        code, log = await command.ended()
    assert Counter(isinstance(one, aiohttp.ClientError) for one in ended) == {True: counts[1], False: counts[2]}
    assert after[1] == pids[1]
    assert code == 0
    assert events(log).count("worker_down") == 1
    assert "its process was killed by SIGKILL; it is started again" in log


async def is_restarted(command: Command, before: list[int]) -> bool:
    rows = (await command.page("/state"))["workers"]
    return all(row["state"] == "serving" for row in rows) and rows[0]["pid"] not in (None, before[0])


async def holds(command: Command, leases: int) -> bool:
    return (await command.page("/state"))["pool"]["leases"] == leases


@pytest.mark.long
async def test_sighup_reloads_all_workers(tmp_path: Path) -> None:
    policy = write_policy(tmp_path)
    async with held_engine() as engine, serving(policy, engine.url) as command:
        [before] = (await command.page("/state"))["generations"]
        write_policy(tmp_path, requests=9)
        command.signal(signal.SIGHUP)
        await until(lambda: runs_one_other(command, before), "both run the other policy")
        assert (await command.page("/state"))["pool"]["capacity"]["requests"] == 9
        assert all(row["restarts"] == 0 for row in (await command.page("/state"))["workers"])
        command.signal(signal.SIGTERM)
        _, log = await command.ended()
    assert events(log).count("policy_asked") == 2
    assert events(log).count("policy_reloaded") == 2


async def runs_one_other(command: Command, before: str) -> bool:
    generations = (await command.page("/state"))["generations"]
    return before not in generations and [len(replicas) for replicas in generations.values()] == [2]


@pytest.mark.long
async def test_a_supervisor_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path), engine.url) as command:
        stream = asyncio.ensure_future(command.stream())
        await until(lambda: engine.running == 1, "it streams")
        started = children(command.process.pid)
        assert len(started) == 3  # two workers and a store
        command.signal(signal.SIGKILL)
        await until(lambda: not any(map(is_running, started)), "workers and store end")
        with pytest.raises(aiohttp.ClientError):
            await stream
        await until(lambda: engine.running == 0, "the engine is left alone")


@pytest.mark.long
async def test_a_store_of_its_own_that_is_killed_is_started_again_and_the_workers_share_on(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=3), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        [store] = children(command.process.pid) - set(await command.pids())
        os.kill(store, signal.SIGKILL)
        await until(lambda: shares(command), "both report to the new store")
        more = [asyncio.ensure_future(command.stream()) for _ in range(6)]
        await until(lambda: engine.running == 3, "the pool is full")
        await asyncio.sleep(0.5)
        assert engine.most == 3
        await until(lambda: holds(command, 3), "the pages show it")
        engine.release.set()
        answers = await asyncio.wait_for(asyncio.gather(*streams, *more), WITHIN_S)
        command.signal(signal.SIGTERM)
        code, log = await command.ended()
    assert {status for status, _ in answers} == {200}
    assert code == 0
    assert "worker_store_ended" in events(log)


async def shares(command: Command) -> bool:
    """Whether the store has been reached again since it was lost, and by all."""
    stores = [row["store"] for row in (await command.page("/state"))["workers"]]
    return all(store["state"] == "shared" and store["replicas"] == 2 and store["since_s"] < 5 for store in stores)


@pytest.mark.long
async def test_a_worker_that_cannot_be_kept_running_ends_the_command(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path), engine.url) as command:
        while command.process.returncode is None:
            try:
                for row in (await command.page("/state"))["workers"]:
                    if row["worker"] == 1 and row["state"] == "serving":
                        os.kill(row["pid"], signal.SIGKILL)
            except aiohttp.ClientError:
                break
            await asyncio.sleep(0.05)
        code, log = await command.ended()
    assert code == 1
    assert log.splitlines()[-1] == (
        "sidecar: worker 1 cannot be kept running: its process was killed by SIGKILL, as the times before"
    )
    assert events(log).count("worker_down") == 4


@pytest.mark.long
async def test_a_worker_that_meets_a_policy_with_a_mistake_waits_for_its_correction(tmp_path: Path) -> None:
    policy = write_policy(tmp_path)
    async with held_engine() as engine, serving(policy, engine.url) as command:
        good = policy.read_text()
        policy.write_text(good.replace("50%", "50"))
        pids = await command.pids()
        os.kill(pids[0], signal.SIGKILL)
        await until(
            lambda: says(command, f"worker 1 does not serve (down): {policy}:3: tiers.normal.reserve"), "it waits"
        )
        assert [await command.ask() for _ in range(5)] == [200] * 5
        policy.write_text(good)
        await until(lambda: is_restarted(command, pids), "it is started again")
        command.signal(signal.SIGTERM)
        assert (await command.ended())[0] == 0


@pytest.mark.long
async def test_a_worker_that_the_pool_refuses_leaves_the_port_to_the_others(tmp_path: Path) -> None:
    policy = write_policy(tmp_path)
    async with held_engine() as engine, serving(policy, engine.url) as command:
        policy.write_text(policy.read_text().replace("tiers: {", "tiers: {high: {}, "))  # needs a restart of all
        pids = await command.pids()
        os.kill(pids[0], signal.SIGKILL)
        refused = "worker 1 does not serve (started): the pool refuses this process"
        await until(lambda: says(command, refused), "it is refused")
        assert [await command.ask() for _ in range(10)] == [200] * 10
        os.kill(pids[1], signal.SIGKILL)  # now there is none that the pool would take
        await until(lambda: is_restarted(command, pids), "both serve by the new policy")
        assert [tier["tier"] for tier in (await command.page("/state"))["pool"]["tiers"]] == ["high", "normal"]


async def says(command: Command, notice: str) -> bool:
    return any(said.startswith(notice) for said in (await command.page("/readyz"))["notices"])


@pytest.mark.long
async def test_a_worker_with_a_signal_of_its_own_ends_in_order_and_is_replaced(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=40), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        pids = await command.pids()
        for _ in range(2):  # a service manager signals all processes, and the supervisor each worker
            os.kill(pids[0], signal.SIGTERM)
            await asyncio.sleep(0.3)
        engine.release.set()
        answers = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
        await until(lambda: is_restarted(command, pids), "it is replaced")
    assert {status for status, _ in answers} == {200}
