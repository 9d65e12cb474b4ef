"""The timer that stops to count the prompt of an answer that is not streamed, and what it learns its time from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.engines import speed
from sidecar.engines.robust_line import ENOUGH, Line
from tests.fleet.routed import fleet_before, ok, refusing, reset, sequence, silent
from tests.support.engine import Connection, Received
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.mark.long
async def test_a_stream_teaches_and_the_prompt_of_a_whole_answer_counts_for_that_long(tmp_path: Path) -> None:
    async def slow(connection: Connection, request: Received) -> None:
        await asyncio.sleep(0.3 if b'"stream": true' in request.body else 6)
        await ok(connection, request)

    async with fleet_before(tmp_path, slow) as (sidecar, _):
        await asyncio.gather(*(sidecar.ask("word " * 200, stream=True) for _ in range(ENOUGH)))
        expected_s = sidecar.routing.speeds.engine("a").first.line_or_default.at(200) / 1e6
        assert 0.05 <= expected_s < 2, "200 tokens are fewer than what the engine computed in 0.3 s"
        asking = sidecar.begin("word " * 200)
        await until(lambda: sidecar.unprefilled > 0)
        await until(lambda: sidecar.unprefilled == 0)
        assert not asking.done(), "long before its answer"
        assert sidecar.held == {"a#1": 1}
        assert (await asking).status == 200


async def test_a_timer_ends_with_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the prompt of a request that was replayed would count for as long as its first engine was to take."""

    async def refuse_and_slow_down(connection: Connection, request: Received) -> None:
        monkeypatch.setattr(speed, "DEFAULT_FIRST", Line(60e6, 0.0))  # of the engines that are asked next
        await refusing(503, times=1)(connection, request)

    monkeypatch.setattr(speed, "DEFAULT_FIRST", Line(100_000.0, 0.0))
    async with fleet_before(tmp_path, refuse_and_slow_down, sequence(reset), silent) as (sidecar, a, b, c):
        asking = sidecar.begin("word " * 50)
        await until(lambda: c.count == 1)
        assert a.count
        assert b.count == 1
        await asyncio.sleep(0.3)
        assert sidecar.unprefilled > 0, "the first engine's time has passed, and the third one's has not"
        assert sidecar.held == {"c#1": 1}
        asking.cancel()


async def test_errors_teach_nothing_and_count_as_no_hits(tmp_path: Path) -> None:
    async with fleet_before(tmp_path, refusing(400), affinity="{prefix: true}") as (sidecar, _):
        for _ in range(3):
            assert (await sidecar.ask("word " * 400, stream=True)).status == 400
        assert sidecar.routing.speeds.engine("a").first.samples == 0
        assert sum(sidecar.routing.predicted_tokens.values()) == 0
