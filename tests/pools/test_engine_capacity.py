"""A pool that is as large as its engine says: read, followed, kept when unreadable, held back when it is full."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from sidecar.engines import Vllm
from sidecar.engines.pages import Page, Unread
from sidecar.errors import CapacityUnknown, RequestTooLarge
from sidecar.policy.capacity import Capacity
from sidecar.policy.choices import CapacitySource
from sidecar.policy.model import Policy
from sidecar.pools import EngineSize, Pool
from tests.pools.harness import ask, simple
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
EVERY_S = 0.01


class Engine:
    """An engine's pages, and what a test makes of it."""

    host = None

    def __init__(self, kv_tokens: int | None = 1000, seqs: int | None = None) -> None:
        self.kv_tokens = kv_tokens
        self.seqs = seqs
        self.waiting = 0
        self.running = 0
        self.preemptions: int | None = None
        self.is_reachable = True
        self.reads = 0

    async def get(self, path: str) -> Page:
        self.reads += 1
        if not self.is_reachable:
            raise Unread("GET /metrics answered 502")
        if path != "/metrics":
            info = f'{{"vllm_config": {{"scheduler_config": {{"max_num_seqs": {self.seqs}}}}}}}'
            return Page(200, info) if self.seqs and path.startswith("/server_info") else Page(404, "")
        cache = (
            "" if self.kv_tokens is None else f'vllm:cache_config_info{{kv_cache_size_tokens="{self.kv_tokens}"}} 1\n'
        )
        running = f"vllm:num_requests_running {self.running}\n"
        if self.preemptions is not None:
            running += f'vllm:num_preemptions_total{{engine="0"}} {self.preemptions}\n'
        return Page(200, f"{cache}{running}vllm:num_requests_waiting {self.waiting}\n")


def policy_of(fraction: str = "1", waiting: int = 2, **written: int) -> Policy:
    capacity = Capacity(read_from=CapacitySource.ENGINE, fraction=Fraction(fraction), waiting=waiting, **written)
    policy = simple(tokens=None)
    high, low = policy.tiers
    return replace(policy, engine=Vllm, capacity=capacity, tiers=(replace(high, reserve=Fraction(1, 5)), low))


def sized(engine: Engine, policy: Policy, every_s: float = EVERY_S) -> Pool:
    return Pool(policy, size=EngineSize(policy, engine, read_every_s=every_s))


@asynccontextmanager
async def following(engine: Engine, policy: Policy | None = None, every_s: float = EVERY_S) -> AsyncIterator[Pool]:
    pool = sized(engine, policy or policy_of(), every_s)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


def capacity(pool: Pool) -> Any:
    return pool.state()["capacity"]


@pytest.mark.parametrize(
    ("fraction", "written", "tokens", "requests"),
    [
        ("1", {}, 1000, 6),
        ("9/10", {}, 900, 6),
        ("1/2", {}, 500, 6),  # four run whatever part of the tokens may be filled, and two may wait
        ("1", {"tokens": 70}, 70, 6),
        ("1", {"requests": 3}, 1000, 3),
    ],
)
async def test_the_pool_has_the_policys_part_of_what_the_engine_holds(
    fraction: str, written: dict[str, int], tokens: int, requests: int
) -> None:
    async with following(Engine(1000, 4), policy_of(fraction, **written)) as pool:
        assert capacity(pool) == {"tokens": tokens, "requests": requests}
        assert pool.state()["tiers"][0]["reserve"]["tokens"] == -(-tokens // 5)  # type: ignore[index]
        assert (pool.readiness(), pool.notices()) == ((), [])


async def test_no_one_is_admitted_before_the_engine_has_spoken_and_all_is_well_when_it_has() -> None:
    engine = Engine()
    engine.is_reachable = False
    async with following(engine) as pool:
        assert "GET /metrics answered 502" in pool.readiness()[0]
        with pytest.raises(CapacityUnknown, match="GET /metrics answered 502") as refusal:
            await pool.enter(ask())
        assert refusal.value.retry_after_s == 1
        engine.is_reachable = True
        await until(lambda: not pool.readiness())
        assert (await pool.enter(ask())).grant is not None


async def test_a_server_without_a_lifespan_reads_the_engine_at_the_first_request() -> None:
    pool = sized(Engine(), policy_of())
    assert (await pool.enter(ask())).grant is not None
    await pool.close()


async def test_an_engine_that_says_nothing_of_use_is_not_guessed_at() -> None:
    async with following(Engine(kv_tokens=None)) as pool:
        assert "write capacity: tokens, requests or both" in pool.readiness()[0]


async def test_a_change_is_followed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(1000)
    async with following(engine) as pool:
        await pool.enter(ask(tokens=900))
        waiting = await pool.enter(ask(tokens=500))
        engine.kv_tokens = 2000
        await asyncio.wait_for(waiting.wait(), 60)
        engine.kv_tokens = 300
        await until(lambda: capacity(pool)["tokens"] == 300)
        with pytest.raises(RequestTooLarge):
            await pool.enter(ask(tokens=400))
    said = [record.getMessage() for record in caplog.records if "changed" in record.getMessage()]
    assert said == [
        "the engine's capacity changed: 2,000 tokens and any number of requests "
        "instead of 1,000 tokens and any number of requests",
        "the engine's capacity changed: 300 tokens and any number of requests "
        "instead of 2,000 tokens and any number of requests",
    ]


async def test_the_last_good_size_is_kept_loudly(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(1000)
    async with following(engine) as pool:
        engine.is_reachable = False
        await until(pool.notices)
        assert (await pool.enter(ask(tokens=900))).grant is not None
        assert "cannot be now: GET /metrics answered 502; going on with 1,000 tokens" in pool.notices()[0]
        assert pool.readiness() == ()
        reads = engine.reads
        await until(lambda: engine.reads > reads + 5)
        engine.is_reachable = True
        await until(lambda: not pool.notices())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in warnings if "cannot be read" in line or "again" in line] == [
        "the engine's capacity cannot be read, going on with 1,000 tokens and any number of requests: "
        "GET /metrics answered 502",
        "the engine's capacity can be read again: 1,000 tokens and any number of requests",
    ], "once each, not once a second"


async def test_one_dimension_that_is_said_no_more_is_kept() -> None:
    engine = Engine(1000, 4)
    async with following(engine) as pool:
        engine.seqs = None
        await until(pool.notices)
        assert capacity(pool) == {"tokens": 1000, "requests": 6}
        assert "no longer says how many requests it runs at once" in pool.notices()[0]


async def test_what_is_unbounded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with following(Engine(1000)):
        pass
    assert [record.getMessage() for record in caplog.records if "does not say" in record.getMessage()] == [
        "vllm does not say how many requests it holds at once: nothing bounds them until it is seen to be full; "
        "better write the number beside it, such as capacity: {from: engine, requests: 160}"
    ]


async def test_admission_stops_while_too_much_waits_inside_the_engine() -> None:
    engine = Engine()
    async with following(engine, policy_of(waiting=2)) as pool:
        await pool.enter(ask())
        engine.waiting = 3
        await until(lambda: pool.state()["engine"]["held_back"])  # type: ignore[index]
        held_up = await pool.enter(ask(tier=1))  # a tier without a reserve
        assert held_up.grant is None
        assert pool.notices() == ["3 requests wait inside the engine, more than 2"]
        engine.waiting = 2
        await asyncio.wait_for(held_up.wait(), 60)
        assert pool.notices() == []


async def test_the_engine_runs_no_more_than_it_does_while_it_is_full_and_its_tiers_take_turns() -> None:
    engine = Engine()
    async with following(engine, policy_of(waiting=2)) as pool:
        running = [await pool.enter(ask(tier=1)) for _ in range(2)]
        engine.waiting = 3
        await until(lambda: pool.state()["engine"]["held_back"])  # type: ignore[index]
        later = await pool.enter(ask(tier=1))
        first, second = await pool.enter(ask()), await pool.enter(ask())
        assert [lease.grant for lease in (later, first, second)] == [None] * 3
        running[0].settle()
        assert first.grant is not None, "it is inside its tier's reserve"
        assert [lease.grant for lease in (later, second)] == [None] * 2
        running[1].settle()
        assert second.grant is not None
        assert later.grant is None


async def test_an_engine_that_does_not_say_how_many_it_runs_shows_it_when_it_is_full() -> None:
    engine = Engine(1000)
    async with following(engine, policy_of(waiting=2)) as pool:
        assert capacity(pool)["requests"] is None
        engine.running, engine.waiting = 4, 2
        reads = engine.reads
        await until(lambda: engine.reads > reads + 6)
        assert capacity(pool)["requests"] is None, "no more wait than may: it could take more"
        engine.waiting = 3
        await until(lambda: capacity(pool)["requests"] == 4 + 2)
        engine.running = 3  # short of memory, and not of slots
        reads = engine.reads
        await until(lambda: engine.reads > reads + 6)
        assert capacity(pool)["requests"] == 4 + 2
        engine.running = 7
        await until(lambda: capacity(pool)["requests"] == 7 + 2)
        engine.running = engine.waiting = 0
        assert not pool.readiness()


async def test_what_waits_for_a_moment_only_stops_no_one() -> None:
    engine = Engine()
    async with following(engine, policy_of(waiting=2), 0.2) as pool:
        await pool.enter(ask())
        engine.waiting = 50  # a burst has arrived, and the engine takes it in with its next step
        reads = engine.reads
        await until(lambda: engine.reads > reads)
        engine.waiting = 0
        assert (await pool.enter(ask())).grant is not None
        await until(lambda: engine.reads > reads + 4)
        assert not pool.state()["engine"]["held_back"]  # type: ignore[index]


async def test_an_engine_that_is_lost_while_it_was_full_stops_no_one_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.pools.engine_reports.HELD_BACK_S", 0.2)
    engine = Engine()
    async with following(engine, policy_of(waiting=0)) as pool:
        await pool.enter(ask())
        engine.waiting = 9
        await until(lambda: pool.state()["engine"]["held_back"])  # type: ignore[index]
        waiting = await pool.enter(ask(tier=1))
        assert waiting.grant is None
        engine.is_reachable = False
        await asyncio.wait_for(waiting.wait(), 60)


async def test_a_figure_that_stands_still_stops_no_one_for_good() -> None:
    engine = Engine()
    async with following(engine, policy_of(waiting=0)) as pool:
        engine.waiting = 9  # TensorRT-LLM's gauges do not move while nothing finishes
        await until(lambda: pool.state()["engine"]["held_back"])  # type: ignore[index]
        for _ in range(5):
            lease = await asyncio.wait_for(pool.enter(ask()), 60)
            assert lease.grant is not None
            lease.settle()


async def test_a_defect_in_reading_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    async with following(engine) as pool:
        engine.get = lambda path: 1 / 0  # type: ignore[assignment,method-assign]
        await until(pool.notices)
        assert "ZeroDivisionError" in pool.notices()[0]
        assert (await pool.enter(ask())).grant is not None
        del engine.get
        await until(lambda: not pool.notices())
    assert "a defect in the sidecar" in caplog.text


async def test_preemptions_are_passed_on_also_over_a_restart_and_a_time_without_them() -> None:
    engine, passed = Engine(), list[int]()
    async with following(engine) as pool:
        assert pool._size is not None
        pool._size.reader.on_preemptions = lambda total, now_us: passed.append(total if now_us > 0 else -1)
        await until(lambda: engine.reads > 3)
        assert passed == []
        for counter, total in ((7, 0), (9, 2), (9, 2), (4, 6), (None, 6), (5, 7), (2**60, 2**60 + 2), (0, 2**60 + 2)):
            engine.preemptions, reads, known = counter, engine.reads, len(passed)
            await until(lambda: engine.reads > reads + 3)  # noqa: B023  # evaluated at once
            assert passed[-1] == total
            assert (len(passed) > known) is (counter is not None)
        assert passed == sorted(passed)
        assert pool.state()["engine"]["preemptions"] == 0  # type: ignore[index]
