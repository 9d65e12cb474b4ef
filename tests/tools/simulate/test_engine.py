"""The engine that jumps, against the emulator's own scheduler, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.tools.emulator.kv_cache import KvCache
from sidecar.tools.emulator.scheduler import Rank, RunningBatch, StepModel, WaitingQueue
from sidecar.tools.emulator.scheduler import Sequence as Emulated
from sidecar.tools.simulate.engine import Job, KeyQueue, SimulatedEngine
from sidecar.tools.simulate.engine_model import EngineModel

MODEL = EngineModel(
    name="small", step_us=1000, step_us_per_sequence=100, step_us_per_prefill_token=10, kv_tokens=64, block_tokens=4,
    max_sequences=3, chunk_tokens=8,
)  # fmt: skip
Coming = tuple[int, int, int, int, bool]
"""When, the rank, tokens of prompt and answer, and whether the prompt is shared."""


def blocks_of(number: int, coming: Coming) -> Sequence[bytes]:
    _, _, prompt, _, is_shared = coming
    name = "shared" if is_shared else f"own {number}"
    return [f"{name} {block}".encode() for block in range(prompt // MODEL.block_tokens)]


def simulated(comings: Sequence[Coming]) -> tuple[list[list[int]], int]:
    """The moments of every request's tokens, and the preemptions."""
    engine = SimulatedEngine(MODEL, KeyQueue(), admits_ahead=True)
    jobs = [Job(one[2], one[3], blocks_of(number, one)) for number, one in enumerate(comings)]
    now_us = coming = 0
    while coming < len(jobs) or len(engine):
        times = [] if engine.due_us is None else [engine.due_us]
        now_us = min([*times, *(one[0] for one in comings[coming : coming + 1])])
        if engine.due_us == now_us:
            engine.advance()
        while coming < len(jobs) and comings[coming][0] <= now_us:
            jobs[coming].place = (float(comings[coming][1]),), coming
            engine.push(jobs[coming], now_us)
            coming += 1
        if engine.due_us is None:
            engine.begin(now_us)
    assert engine.cache.held_tokens == 0
    return [[at for a, b in job.stretches for at in engine.ends_us[a:b]] for job in jobs], engine.preemptions


def emulated(comings: Sequence[Coming]) -> tuple[list[list[int]], int]:
    """The same by `RunningBatch`, one step at a time."""
    model = StepModel(
        max_num_seqs=MODEL.max_sequences, prefill_tokens_per_step=MODEL.chunk_tokens, kv_tokens=MODEL.kv_tokens,
        step_s=1000, step_s_per_seq=100, step_s_per_prefill_token=10,
    )  # fmt: skip
    cache = KvCache(MODEL.kv_tokens, MODEL.block_tokens, caches_prefixes=True)
    batch: RunningBatch[Emulated] = RunningBatch(model, cache, preempts=True)
    queue: WaitingQueue[Emulated] = WaitingQueue(lambda rank, _: (rank.value or 0,))
    jobs = [Emulated(one[2], one[3], blocks_of(number, one)) for number, one in enumerate(comings)]
    moments: dict[Emulated, list[int]] = {job: [] for job in jobs}
    now_us = coming = 0
    while coming < len(jobs) or len(batch) or len(queue):
        if not len(batch) and not len(queue):
            now_us = max(now_us, comings[coming][0])
        while coming < len(jobs) and comings[coming][0] <= now_us:
            queue.push(jobs[coming], Rank(value=comings[coming][1]), 0.0)
            coming += 1
        now_us += round(batch.begin(queue).duration_s)
        for job in batch.end().emitted:
            moments[job].append(now_us)
    return [moments[job] for job in jobs], batch.preemptions


comings = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 2), st.integers(1, 24), st.integers(1, 30), st.booleans()),
    min_size=1,
    max_size=12,
).map(lambda found: sorted(found, key=lambda one: one[0]))


@settings(max_examples=200, deadline=None)
@given(comings)
def test_every_token_comes_at_the_same_microsecond_as_from_the_emulators_scheduler(found: list[Coming]) -> None:
    assert simulated(found) == emulated(found)


def test_requests_that_outgrow_the_cache_are_preempted_and_computed_again() -> None:
    found = [(0, 0, 8, 30, False), (0, 1, 8, 30, False), (10, 2, 8, 30, False)]
    moments, preemptions = simulated(found)
    assert preemptions >= 1
    assert [len(one) for one in moments] == [30, 30, 30]
    assert (moments, preemptions) == emulated(found)


def test_a_decode_without_news_is_one_plan() -> None:
    engine = SimulatedEngine(MODEL, KeyQueue())
    engine.push(Job(4, 20), 0)
    plans = 0
    for _ in itertools.takewhile(lambda _: len(engine), itertools.count()):
        engine.begin(engine.ends_us[-1] if engine.ends_us else 0)
        engine.advance()
        plans += 1
    assert plans == 2, "the prompt, and all that follows"
    assert len(engine.ends_us) == 20


@pytest.mark.parametrize("at_us", [1, 1100, 1101, 3333])
def test_a_request_that_comes_meanwhile_runs_with_the_next_step(at_us: int) -> None:
    found = [(0, 0, 4, 12, False), (at_us, 0, 4, 3, False)]
    assert simulated(found) == emulated(found)


def test_prompts_wait_in_the_order_of_the_queue_until_a_step_has_tokens_for_them() -> None:
    engine = SimulatedEngine(msgspec.structs.replace(MODEL, max_sequences=4), KeyQueue())
    jobs = [Job(MODEL.chunk_tokens, 2), Job(MODEL.chunk_tokens // 2, 2), Job(MODEL.chunk_tokens, 2), Job(1, 2)]
    for number, rank in enumerate((0, 2, 2, 1)):
        jobs[number].place = (float(rank),), number
        engine.push(jobs[number], 0)
    ran = []
    while len(engine):
        engine.begin(engine.ends_us[-1] if engine.ends_us else 0)
        ran.append([job.started_us is not None for job in jobs])
        engine.advance()
    assert ran[0] == [True, False, False, False], "the whole step is the first one's"
    assert ran[1] == [True, True, True, True], "by rank: one token, half a step, and the begin of the last"
    assert [len(job.stretches) for job in jobs] == [1] * 4


def test_a_request_that_is_removed_leaves_with_the_step_that_runs() -> None:
    engine = SimulatedEngine(MODEL, KeyQueue())
    job, other = Job(20, 5), Job(4, 5)
    engine.push(job, 0)
    engine.begin(0)
    engine.remove(job, 1)
    engine.push(other, 1)
    engine.remove(other, 1)
    assert engine.advance().removed == [job, other]
    assert len(engine) == 0
    assert engine.cache.held_tokens == 0
    assert len(engine.ends_us) == 1


def test_a_request_that_has_its_first_token_by_then_stays() -> None:
    engine = SimulatedEngine(MODEL, KeyQueue())
    job = Job(4, 5)
    engine.push(job, 0)
    engine.begin(0)
    engine.remove(job, 1)
    found = engine.advance()
    assert (found.first, found.removed) == ([job], [])
    assert len(engine) == 1
