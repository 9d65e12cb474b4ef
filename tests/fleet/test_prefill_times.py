"""Learned times of prefills, and the timer that stops to count the prompt of an answer that is not streamed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.fleet import prefill_times
from sidecar.fleet.prefill_times import FIRST_S, LONGEST_S, PrefillTimes
from tests.fleet.routed import fleet_before, ok, refusing, reset, sequence, silent
from tests.support.engine import Connection, Received
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
SEEN = st.tuples(st.integers(0, 200_000), st.floats(0, 100))


@given(seen=st.lists(SEEN, max_size=30), tokens=st.integers(0, 10**6))
def test_a_time_is_never_negative_nor_longer_than_the_longest_and_grows_with_the_prompt(
    seen: list[tuple[int, float]], tokens: int
) -> None:
    times = PrefillTimes()
    for learned in seen:
        times.learn("a#1", *learned)
    found = times.expected_s("a#1", tokens)
    assert 0 <= found <= LONGEST_S
    assert times.expected_s("a#1", tokens + 1000) >= found
    assert times.expected_s("b#1", 0) == FIRST_S, "another engine has its own"


def test_an_engine_that_computes_a_thousand_tokens_in_a_tenth_of_a_second_is_learned_in_some_answers() -> None:
    times = PrefillTimes()
    times.learn("a#1", 50_000, 30.0)
    for _ in range(100):
        times.learn("a#1", 4000, 0.4)
    assert 0.35 < times.expected_s("a#1", 4000) < 0.45
    assert 0.7 < times.expected_s("a#1", 8000) < 0.9


def test_the_engines_that_are_known_are_bounded() -> None:
    times = PrefillTimes()
    for number in range(1000):
        times.learn(f"pod-{number}#1", 100, 1.0)
    assert len(times._seen) == 256
    assert times.expected_s("pod-0#1", 0) == FIRST_S


@pytest.mark.long
async def test_a_stream_teaches_and_the_prompt_of_a_whole_answer_counts_for_that_long(tmp_path: Path) -> None:
    async def slow(connection: Connection, request: Received) -> None:
        await asyncio.sleep(0.3 if b'"stream": true' in request.body else 6)
        await ok(connection, request)

    async with fleet_before(tmp_path, slow) as (sidecar, _):
        await asyncio.gather(*(sidecar.ask("word " * 200, stream=True) for _ in range(3)))
        expected_s = sidecar.routing.prefill_times.expected_s("a#1", 200)
        assert 0.2 <= expected_s < 2, "200 tokens are fewer than what the engine computed in 0.3 s"
        asking = sidecar.begin("word " * 200)
        await until(lambda: sidecar.unprefilled > 0)
        await until(lambda: sidecar.unprefilled == 0)
        assert not asking.done(), "long before its answer"
        assert sidecar.held == {"a#1": 1}
        assert (await asking).status == 200


async def test_a_timer_ends_with_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the prompt of a request that was replayed would count for as long as its first engine was to take."""

    async def refuse_and_slow_down(connection: Connection, request: Received) -> None:
        monkeypatch.setattr(prefill_times, "FIRST_S", 60.0)  # of the attempts to come
        await refusing(503, times=1)(connection, request)

    monkeypatch.setattr(prefill_times, "FIRST_S", 0.1)
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
        assert sidecar.routing.prefill_times._seen == {}
        assert sum(sidecar.routing.predicted_tokens.values()) == 0
