"""The step model on its own: no clock, no loop."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.tools.emulator.kv_cache import KvCache
from sidecar.tools.emulator.scheduler import (
    Rank,
    RunningBatch,
    Sequence,
    StepModel,
    WaitingQueue,
    first_come,
    vllm_order,
)


def queue_of(*sequences: Sequence) -> WaitingQueue[Sequence]:
    queue: WaitingQueue[Sequence] = WaitingQueue(first_come)
    for sequence in sequences:
        queue.push(sequence, Rank(), 0.0)
    return queue


def test_the_first_token_comes_at_the_end_of_the_step_that_finishes_the_prefill() -> None:
    sequence = Sequence(prompt_tokens=1_000, output_tokens=2)
    batch: RunningBatch[Sequence] = RunningBatch(StepModel(prefill_tokens_per_step=512))
    queue = queue_of(sequence)
    emitted = []
    for _ in range(3):
        batch.begin(queue)
        emitted.append(len(batch.end().emitted))
    assert emitted == [0, 1, 1]
    assert len(batch) == 0


def test_prefills_share_one_budget_oldest_first() -> None:
    first, second = Sequence(300, 1), Sequence(300, 1)
    batch: RunningBatch[Sequence] = RunningBatch(StepModel(prefill_tokens_per_step=400))
    step = batch.begin(queue_of(first, second))
    assert (first.prefilled, second.prefilled, step.prefill_tokens) == (300, 100, 400)
    assert batch.end().finished == [first]


def test_a_step_grows_with_the_batch_and_with_its_prefill() -> None:
    model = StepModel(step_s=0.010, step_s_per_seq=0.001, step_s_per_prefill_token=0.0001)
    batch: RunningBatch[Sequence] = RunningBatch(model)
    assert batch.begin(queue_of(Sequence(100, 5), Sequence(50, 5))).duration_s == pytest.approx(0.010 + 0.002 + 0.015)


def test_a_head_that_does_not_fit_the_kv_cache_blocks_those_behind_it() -> None:
    running, big, small = Sequence(10, 40), Sequence(60, 1), Sequence(1, 1)
    batch: RunningBatch[Sequence] = RunningBatch(StepModel(kv_tokens=100))
    queue = queue_of(running, big, small)
    assert batch.begin(queue).admitted == [running]
    assert len(queue) == 2


def test_a_removed_sequence_frees_its_slot_and_its_kv_between_the_halves_of_a_step() -> None:
    sequence = Sequence(10, 10)
    batch: RunningBatch[Sequence] = RunningBatch(StepModel(kv_tokens=100))
    batch.begin(queue_of(sequence))
    assert batch.kv_tokens_held == 20
    assert batch.remove(sequence)
    assert not batch.remove(sequence)
    assert (len(batch), batch.kv_tokens_held, batch.end().emitted) == (0, 0, [])


def test_a_pooling_request_ends_with_its_prefill_and_emits_nothing() -> None:
    batch: RunningBatch[Sequence] = RunningBatch(StepModel())
    sequence = Sequence(10, 0)
    batch.begin(queue_of(sequence))
    output = batch.end()
    assert (output.emitted, output.finished) == ([], [sequence])


@pytest.mark.parametrize("wrong", [{"max_num_seqs": 0}, {"kv_tokens": 0}, {"step_s": -1.0}])
def test_figures_that_no_engine_could_run_with_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        StepModel(**wrong)


requests = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12), st.integers(0, 2)), max_size=25)


@settings(max_examples=80, deadline=None)
@given(requests, st.integers(1, 5), st.integers(1, 64), st.integers(72, 200), st.sets(st.integers(0, 24)))
def test_tokens_are_conserved_and_no_one_exceeds_the_engine(
    asked: list[tuple[int, int, int]], slots: int, budget: int, kv_tokens: int, canceled: set[int]
) -> None:
    model = StepModel(max_num_seqs=slots, prefill_tokens_per_step=budget, kv_tokens=kv_tokens)
    batch: RunningBatch[Sequence] = RunningBatch(model)
    queue: WaitingQueue[Sequence] = WaitingQueue(vllm_order)
    sequences = [Sequence(prompt, output) for prompt, output, _ in asked]
    for sequence, (_, _, priority) in zip(sequences, asked, strict=True):
        queue.push(sequence, Rank(priority), 0.0)
    admitted: list[Sequence] = []
    finished: list[Sequence] = []
    gone = deque(sequences[index] for index in sorted(canceled) if index < len(sequences))
    left: set[Sequence] = set()
    while len(batch) or len(queue):
        step = batch.begin(queue)
        admitted += step.admitted
        running = [s for s in admitted if s not in finished and s not in left]
        assert len(batch) == len(running) <= slots
        assert batch.kv_tokens_held == sum(s.tokens for s in running) <= kv_tokens
        assert step.prefill_tokens <= budget
        if gone and (queue.remove(gone[0]) or batch.remove(gone[0])):
            left.add(gone[0])
        if gone:
            gone.popleft()
        output = batch.end()
        assert len(set(output.emitted)) == len(output.emitted)
        finished += output.finished
    assert set(finished) | left == set(sequences)
    assert not set(finished) & left
    assert all(s.emitted == s.output_tokens and s.prefilled == s.prompt_tokens for s in finished)
    place = {sequence: index for index, sequence in enumerate(sequences)}
    keys = [(asked[place[s]][2], place[s]) for s in admitted]
    assert keys == sorted(keys)  # all arrived at once: by priority, then first come, first served


# -- a KV cache that overflows


def preempting(kv_tokens: int, **settings: int) -> RunningBatch[Sequence]:
    return RunningBatch(StepModel(kv_tokens=kv_tokens, **settings), preempts=True)


def test_the_newest_is_preempted_when_a_token_finds_no_room_and_computed_again() -> None:
    first, second = Sequence(40, 30), Sequence(40, 30)
    batch, queue = preempting(100), queue_of(first, second)
    emitted: dict[Sequence, int] = {first: 0, second: 0}
    preempted_at = None
    for number in range(200):
        step = batch.begin(queue)
        if step.preempted and preempted_at is None:
            preempted_at = number
            assert (step.preempted, step.lost_tokens, step.admitted) == ([second], 40 + second.emitted, [])
            assert batch.kv_tokens_held == 40 + first.emitted
        for sequence in batch.end().emitted:
            emitted[sequence] += 1
        if not len(batch) and not len(queue):
            break
    assert preempted_at == 11, "80 tokens of prompts and 10 of each output fill it"
    assert emitted == {first: 30, second: 30}, "no token is generated twice"
    assert (first.preemptions, second.preemptions, batch.preemptions) == (0, second.preemptions, second.preemptions)


def test_the_less_important_is_preempted_though_it_came_first() -> None:
    low, high = Sequence(40, 30), Sequence(40, 30)
    queue: WaitingQueue[Sequence] = WaitingQueue(vllm_order)
    queue.push(low, Rank(10), 0.0)
    queue.push(high, Rank(0), 1.0)
    batch = preempting(100)
    while len(batch) or len(queue):
        batch.begin(queue)
        batch.end()
    assert high.preemptions == 0 < low.preemptions


def test_what_was_preempted_waits_before_all_that_came_later() -> None:
    first, second, third = Sequence(40, 30), Sequence(40, 30), Sequence(1, 1)
    batch, queue = preempting(100, max_num_seqs=2), queue_of(first, second, third)
    while not batch.preemptions:
        batch.begin(queue)
        batch.end()
    assert queue.peek() is second


def test_a_sequence_that_is_removed_while_it_waits_to_be_computed_again_leaves_nothing() -> None:
    first, second = Sequence(40, 30), Sequence(40, 30)
    batch, queue = preempting(100), queue_of(first, second)
    while not batch.preemptions:
        batch.begin(queue)
        batch.end()
    assert queue.remove(second)
    assert batch.remove(first)
    assert (len(queue), len(batch), batch.kv_tokens_held) == (0, 0, 0)


@settings(max_examples=80, deadline=None)
@given(
    requests,
    st.tuples(st.integers(1, 6), st.integers(1, 64), st.integers(72, 200)),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
    st.sets(st.integers(0, 24)),
)
def test_every_token_is_generated_once_whatever_is_preempted(
    asked: list[tuple[int, int, int]],
    size: tuple[int, int, int],
    block: int,
    caches: bool,
    canceled: set[int],
) -> None:
    slots, budget, kv_tokens = size
    model = StepModel(max_num_seqs=slots, prefill_tokens_per_step=budget, kv_tokens=kv_tokens)
    cache = KvCache(kv_tokens + 16, block, caches_prefixes=caches)
    batch: RunningBatch[Sequence] = RunningBatch(model, cache, preempts=True)
    queue: WaitingQueue[Sequence] = WaitingQueue(vllm_order)
    same_prompt = [bytes([number]) for number in range(64)]
    sequences = [
        Sequence(prompt, output, same_prompt[: prompt // block] if caches else ()) for prompt, output, _ in asked
    ]
    for sequence, (_, _, priority) in zip(sequences, asked, strict=True):
        queue.push(sequence, Rank(priority), 0.0)
    emitted, left, steps = dict.fromkeys(sequences, 0), set[Sequence](), 0
    gone = deque(sequences[index] for index in sorted(canceled) if index < len(sequences))
    while len(batch) or len(queue):
        steps += 1
        assert steps < 20_000, "it ends"
        step = batch.begin(queue)
        assert not (step.preempted and step.admitted)
        assert batch.kv_tokens_held <= kv_tokens + 16
        assert len(batch) <= slots
        if gone and (queue.remove(gone[0]) or batch.remove(gone[0])):
            left.add(gone[0])
        if gone:
            gone.popleft()
        for sequence in batch.end().emitted:
            emitted[sequence] += 1
    assert all(emitted[sequence] == sequence.output_tokens for sequence in set(sequences) - left)
    assert batch.preemptions == sum(sequence.preemptions for sequence in sequences)
    assert batch.kv_tokens_held == 0
