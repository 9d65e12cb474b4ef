"""The step model on its own: no clock, no loop. What jumps is compared with the same engine in single steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.tools.step_model.engine import StepEngine
from sidecar.tools.step_model.kv_cache import KvCache
from sidecar.tools.step_model.model import EngineModel
from sidecar.tools.step_model.queue import Job, KeyQueue

Engine: TypeAlias = StepEngine[Job]
MODEL = EngineModel(
    name="small", step_us=1000, step_us_per_sequence=100, step_us_per_prefill_token=10, kv_tokens=64, block_tokens=4,
    max_sequences=3, chunk_tokens=8,
)  # fmt: skip
Coming = tuple[int, int, int, int, bool]
"""When, the rank, tokens of prompt and answer, and whether the prompt is shared."""


def engine_of(
    *jobs: Job, preempts: bool = True, admits_ahead: bool = False, jumps: bool = False, **sizes: int
) -> Engine:
    """An engine in which these wait, first come, first served, unless they have places."""
    model = msgspec.structs.replace(MODEL, **sizes)
    engine: Engine = StepEngine(model, KeyQueue(), preempts=preempts, admits_ahead=admits_ahead, jumps=jumps)
    for number, job in enumerate(jobs):
        job.place = (*job.place[0], 0.0), number
        engine.push(job, 0)
    return engine


def step(engine: Engine) -> None:
    """One plan, from its begin to its end."""
    engine.begin(engine.ends_us[-1] if engine.ends_us else 0)
    engine.advance()


def blocks_of(number: int, coming: Coming) -> Sequence[bytes]:
    _, _, prompt, _, is_shared = coming
    name = "shared" if is_shared else f"own {number}"
    return [f"{name} {block}".encode() for block in range(prompt // MODEL.block_tokens)]


def played(comings: Sequence[Coming], *, jumps: bool, preempts: bool) -> tuple[list[list[int]], int, int]:
    """The moments of every request's tokens, the preemptions, and the plans."""
    engine: Engine = StepEngine(MODEL, KeyQueue(), jumps=jumps, preempts=preempts)
    jobs = [Job(one[2], one[3], blocks_of(number, one)) for number, one in enumerate(comings)]
    now_us = coming = plans = 0
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
            plans += 1
    assert engine.cache.held_tokens == 0
    moments = [[at for a, b in job.stretches for at in engine.ends_us[a:b]] for job in jobs]
    return moments, engine.preemptions, plans


comings = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 2), st.integers(1, 24), st.integers(1, 30), st.booleans()),
    min_size=1,
    max_size=12,
).map(lambda found: sorted(found, key=lambda one: one[0]))


@settings(max_examples=200, deadline=None)
@given(comings, st.booleans())
def test_every_token_comes_at_the_same_microsecond_as_in_single_steps(found: list[Coming], preempts: bool) -> None:
    jumped, stepped = (played(found, jumps=jumps, preempts=preempts) for jumps in (True, False))
    assert jumped[:2] == stepped[:2]
    assert jumped[2] <= stepped[2]


def test_a_decode_without_news_is_one_plan() -> None:
    engine = engine_of(Job(4, 20), jumps=True)
    plans = 0
    for _ in itertools.takewhile(lambda _: len(engine), itertools.count()):
        step(engine)
        plans += 1
    assert plans == 2, "the prompt, and all that follows"
    assert len(engine.ends_us) == engine.steps == 20


# -- prompts


def test_the_first_token_comes_at_the_end_of_the_step_that_finishes_the_prefill() -> None:
    engine = engine_of(Job(15, 2))
    emitted = []
    while len(engine):
        engine.begin(0)
        emitted.append(len(engine.advance().emitted))
    assert emitted == [0, 1, 1]


def test_prefills_share_one_budget_oldest_first_and_a_step_grows_with_both() -> None:
    first, second = Job(6, 1), Job(6, 1)
    engine = engine_of(first, second)
    begun = engine.begin(0)
    assert (first.prefilled, second.prefilled, begun.prefill_tokens) == (6, 2, 8)
    assert engine.due_us == 1000 + 2 * 100 + 8 * 10
    assert engine.advance().finished == [first]


def test_a_head_that_does_not_fit_the_kv_cache_blocks_those_behind_it() -> None:
    running, big, small = Job(8, 40), Job(30, 1), Job(1, 1)
    engine = engine_of(running, big, small, preempts=False, admits_ahead=True)
    assert engine.begin(0).admitted == [running]
    assert len(engine.queue) == 2


def test_prompts_wait_in_the_order_of_the_queue_until_a_step_has_tokens_for_them() -> None:
    jobs = [Job(MODEL.chunk_tokens, 2), Job(MODEL.chunk_tokens // 2, 2), Job(MODEL.chunk_tokens, 2), Job(1, 2)]
    for job, rank in zip(jobs, (0.0, 2.0, 2.0, 1.0), strict=True):
        job.place = (rank,), 0
    engine = engine_of(*jobs, max_sequences=4)
    ran = []
    while len(engine):
        engine.begin(0)
        ran.append([job.started_us is not None for job in jobs])
        engine.advance()
    assert ran[0] == [True, False, False, False], "the whole step is the first one's"
    assert ran[1] == [True, True, True, True], "by rank: one token, half a step, and the begin of the last"
    assert [len(job.stretches) for job in jobs] == [1] * 4


def test_one_that_admits_ahead_fills_its_slots_before_it_has_tokens_for_them() -> None:
    engine = engine_of(Job(16, 2), Job(16, 2), admits_ahead=True)
    assert len(engine.begin(0).admitted) == 2


def test_a_pooling_request_ends_with_its_prefill_and_emits_nothing() -> None:
    job = Job(8, 0)
    engine = engine_of(job)
    engine.begin(0)
    found = engine.advance()
    assert (found.first, found.emitted, found.finished, engine.length(job)) == ([], [], [job], 0)


# -- requests that leave


def test_a_request_that_is_removed_leaves_with_the_step_that_runs() -> None:
    job, other = Job(20, 5), Job(4, 5)
    engine = engine_of(job)
    engine.begin(0)
    engine.remove(job, 1)
    engine.push(other, 1)
    engine.remove(other, 1)
    assert engine.advance().removed == [job, other]
    assert (len(engine), engine.cache.held_tokens, engine.steps) == (0, 0, 1)


def test_a_request_that_has_its_first_token_by_then_stays() -> None:
    job = Job(4, 5)
    engine = engine_of(job)
    engine.begin(0)
    engine.remove(job, 1)
    found = engine.advance()
    assert (found.first, found.removed) == ([job], [])
    assert len(engine) == 1


# -- a KV cache that overflows


def test_the_newest_is_preempted_when_a_token_finds_no_room_and_computed_again() -> None:
    first, second, third = Job(16, 30), Job(16, 30), Job(1, 1)
    engine = engine_of(first, second, third, max_sequences=2, chunk_tokens=32)
    while not engine.preemptions:
        begun = engine.begin(0)
        if not engine.preemptions:
            engine.advance()
    assert engine.steps == 17, "32 tokens of prompts and 16 of each output fill it"
    assert (begun.admitted, begun.lost_tokens, engine.last_preemptions) == ([], 16 + second.emitted, 1)
    assert engine.queue.peek() is second, "before all that came later"
    engine.advance()
    while len(engine):
        step(engine)
    assert (engine.length(first), engine.length(second)) == (30, 30), "no token is generated twice"
    assert (first.preemptions, second.preemptions) == (0, engine.preemptions)


def test_the_less_important_is_preempted_though_it_came_first() -> None:
    low, high = Job(16, 30), Job(16, 30)
    low.place, high.place = ((10.0,), 0), ((0.0,), 0)
    engine = engine_of(low, high, chunk_tokens=32)
    while len(engine):
        step(engine)
    assert high.preemptions == 0 < low.preemptions


# -- whatever comes

requests = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12), st.integers(0, 2)), max_size=25)


@settings(max_examples=160, deadline=None)
@given(
    requests,
    st.tuples(st.integers(1, 6), st.integers(1, 64), st.integers(88, 216)),
    st.sampled_from([1, 4, 16]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sets(st.integers(0, 24)),
)
def test_every_token_is_generated_once_and_no_one_exceeds_the_engine(
    asked: list[tuple[int, int, int]],
    size: tuple[int, int, int],
    block: int,
    switches: tuple[bool, bool, bool],
    dropped: set[int],
) -> None:
    (slots, budget, kv_tokens), (caches, preempts, admits_ahead) = size, switches
    model = msgspec.structs.replace(MODEL, max_sequences=slots, chunk_tokens=budget, kv_tokens=kv_tokens)
    cache = KvCache(kv_tokens, block, caches_prefixes=caches)
    engine: Engine = StepEngine(model, KeyQueue(), cache, preempts=preempts, admits_ahead=admits_ahead, jumps=False)
    same_prompt = [bytes([number]) for number in range(64)]
    jobs = [Job(prompt, output, same_prompt[: prompt // block] if caches else ()) for prompt, output, _ in asked]
    for number, job in enumerate(jobs):
        job.place = (float(asked[number][2]),), number
        engine.push(job, 0)
    emitted, ended, admitted = dict.fromkeys(jobs, 0), set[Job](), list[Job]()
    gone = deque(jobs[index] for index in sorted(dropped) if index < len(jobs))
    while len(engine):
        begun = engine.begin(0)
        admitted += begun.admitted
        assert not (engine.last_preemptions and begun.admitted)
        assert begun.prefill_tokens <= budget
        assert engine.running <= slots
        assert cache.held_tokens <= kv_tokens
        if gone and engine.drop(gone[0]):
            ended.add(gone[0])
        if gone:
            gone.popleft()
        found = engine.advance()
        for job in found.emitted:
            emitted[job] += 1
        assert not ended.intersection(found.finished)
        assert all(emitted[job] == job.output for job in found.finished)
        ended.update(found.finished)
        assert engine.steps < 20_000, "it ends"
    assert ended == set(jobs)
    assert engine.preemptions == sum(job.preemptions for job in jobs)
    assert (cache.held_tokens, preempts or not engine.preemptions) == (0, True)
    if not engine.preemptions:
        assert admitted == sorted(admitted, key=lambda job: job.place)
