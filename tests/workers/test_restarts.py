"""What a command with several workers survives. One command has it all, test by test: each leaves it as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from tests.workers.running import (
    WITHIN_S,
    Command,
    HeldEngine,
    both_have_some,
    children,
    events,
    held_engine,
    is_restarted,
    serving,
    until,
    write_policy,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has workers"),
]
Streams = list[asyncio.Task[tuple[int, bytes]]]


class Workers(NamedTuple):
    """The command, its policy's file, and the engine before which it runs."""

    command: Command
    policy: Path
    engine: HeldEngine

    async def reloads(self, requests: int) -> str:
        """All workers run by a policy that admits so many requests. Returns what was logged meanwhile."""
        so_far = len(self.command.log)
        [before] = (await self.command.page("/state"))["generations"]
        write_policy(self.policy.parent, requests)
        self.command.signal(signal.SIGHUP)
        await until(lambda: runs_one_other(self.command, before), "both run the other policy")
        return self.command.log[so_far:]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def command_of_all(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    policy = write_policy(tmp_path_factory.mktemp("workers"), requests=40)
    async with held_engine() as engine, serving(policy, engine.url) as command:
        yield Workers(command, policy, engine)
        command.signal(signal.SIGTERM)
        code, log = await command.ended()
        assert code == 0
        assert "Traceback" not in log


@pytest.fixture
async def workers(command_of_all: Workers) -> AsyncIterator[Workers]:
    """The command of all tests. The engine answers at the latest when the test ends."""
    engine = command_of_all.engine
    engine.release, engine.most = asyncio.Event(), 0
    yield command_of_all
    engine.release.set()
    await until(lambda: engine.running == 0, "all requests have ended")


async def test_sighup_reloads_all_workers(workers: Workers) -> None:
    command = workers.command
    before = (await command.page("/state"))["workers"]
    log = await workers.reloads(39)
    state = await command.page("/state")
    assert state["pool"]["capacity"]["requests"] == 39
    assert [row["restarts"] for row in state["workers"]] == [row["restarts"] for row in before]
    assert events(log).count("policy_asked") == 2
    assert events(log).count("policy_reloaded") == 2
    await workers.reloads(40)


async def runs_one_other(command: Command, before: str) -> bool:
    generations = (await command.page("/state"))["generations"]
    return before not in generations and [len(replicas) for replicas in generations.values()] == [2]


async def test_a_worker_that_is_killed_harms_no_request_of_the_other_and_is_started_again(workers: Workers) -> None:
    command, so_far = workers.command, len(workers.command.log)
    streams: Streams = []
    await both_have_some(command, streams)
    counts, pids = await command.under_way(), await command.pids()
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: sum(stream.done() for stream in streams) == counts[1], "the dead worker's streams end")
    # The other takes every new connection meanwhile, and the dead one's leases come back.
    assert [await command.ask() for _ in range(5)] == [200] * 5
    await until(lambda: is_restarted(command, 1, pids), "it is started again")
    await until(lambda: holds(command, counts[2]), "the dead worker's leases have come back")
    assert (await command.page("/readyz"))["notices"] == []
    workers.engine.release.set()
    ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), WITHIN_S)
    assert Counter(isinstance(one, aiohttp.ClientError) for one in ended) == {True: counts[1], False: counts[2]}
    assert (await command.pids())[1] == pids[1]
    log = command.log[so_far:]
    assert events(log).count("worker_down") == 1
    assert "its process was killed by SIGKILL; it is started again" in log


async def holds(command: Command, leases: int) -> bool:
    return (await command.page("/state"))["pool"]["leases"] == leases


async def test_a_worker_with_a_signal_of_its_own_ends_in_order_and_is_replaced(workers: Workers) -> None:
    command = workers.command
    streams: Streams = []
    await both_have_some(command, streams)
    pids = await command.pids()
    for _ in range(2):  # a service manager signals all processes, and the supervisor each worker
        os.kill(pids[1], signal.SIGTERM)
        await asyncio.sleep(0.3)
    workers.engine.release.set()
    answers = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
    await until(lambda: is_restarted(command, 2, pids), "it is replaced")
    assert {status for status, _ in answers} == {200}


async def test_a_store_of_its_own_that_is_killed_is_started_again_and_the_workers_share_on(workers: Workers) -> None:
    command, engine, so_far = workers.command, workers.engine, len(workers.command.log)
    await workers.reloads(3)
    streams: Streams = []
    await both_have_some(command, streams)
    [store] = children(command.process.pid) - set(await command.pids())
    os.kill(store, signal.SIGKILL)
    await until(lambda: shares(command), "both report to the new store")
    streams += [asyncio.ensure_future(command.stream()) for _ in range(6)]
    await until(lambda: engine.running == 3, "the pool is full")
    await asyncio.sleep(0.5)
    assert engine.most == 3
    await until(lambda: holds(command, 3), "the pages show it")
    engine.release.set()
    answers = await asyncio.wait_for(asyncio.gather(*streams), WITHIN_S)
    assert {status for status, _ in answers} == {200}
    assert "worker_store_ended" in events(command.log[so_far:])
    await workers.reloads(40)


async def shares(command: Command) -> bool:
    """Whether all have reported the requests that they have to the new store, and know of each other there."""
    stores = [row["pool"]["store"] for row in (await command.page("/state"))["workers"]]
    return all(store["replicas"] == 2 and not store["reason"].startswith("0 requests") for store in stores)


async def test_a_worker_that_meets_a_policy_with_a_mistake_waits_for_its_correction(workers: Workers) -> None:
    command, policy = workers.command, workers.policy
    good = policy.read_text()
    policy.write_text(good.replace("50%", "50") + "".join(f"mistake_{each}: 1\n" for each in range(200)))
    pids = await command.pids()
    os.kill(pids[0], signal.SIGKILL)
    mistake = f"worker 1 does not serve (down): {policy}:3: tiers.normal.reserve"
    await until(lambda: says(command, mistake), "it waits")
    assert [await command.ask() for _ in range(5)] == [200] * 5
    policy.write_text(good)
    await until(lambda: is_restarted(command, 1, pids), "it is started again")


async def test_a_worker_that_the_pool_refuses_leaves_the_port_to_the_others(workers: Workers) -> None:
    """The last of these tests: the pool has other tiers afterwards."""
    command, policy = workers.command, workers.policy
    policy.write_text(policy.read_text().replace("tiers: {", "tiers: {high: {}, "))  # needs a restart of all
    pids = await command.pids()
    os.kill(pids[1], signal.SIGKILL)
    refused = "worker 2 does not serve (started): the pool refuses this process"
    await until(lambda: says(command, refused), "it is refused")
    assert [await command.ask() for _ in range(10)] == [200] * 10
    os.kill(pids[0], signal.SIGKILL)  # now there is none that the pool would take
    await until(lambda: is_restarted(command, 1, pids), "both serve by the new policy")
    assert [tier["tier"] for tier in (await command.page("/state"))["pool"]["tiers"]] == ["high", "normal"]


async def says(command: Command, notice: str) -> bool:
    return any(said.startswith(notice) for said in (await command.page("/readyz"))["notices"])
