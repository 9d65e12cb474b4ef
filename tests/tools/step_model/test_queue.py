"""Each engine's order, and leaving the queue."""

from __future__ import annotations

import pytest

from sidecar.tools.step_model.queue import (
    Job,
    KeyQueue,
    Order,
    Rank,
    dynamo_order,
    first_come,
    sglang_order,
    trtllm_order,
    vllm_order,
)


def order_of(order: Order, *arrivals: tuple[Rank, float]) -> list[int]:
    """In which order the arrivals are served, by their position."""
    queue: KeyQueue[Job] = KeyQueue()
    for number, arrival in enumerate(arrivals):
        job = Job(1, 1)
        job.place = order(*arrival), number
        queue.push(job)
    return [queue.pop().place[1] for _ in arrivals]


@pytest.mark.parametrize(
    ("order", "values", "expected"),
    [
        (first_come, [9, 1, 5, None], [0, 1, 2, 3]),
        (trtllm_order, [0.1, 0.9, None, 0.6], [1, 3, 2, 0]),
        (vllm_order, [9, -1, None, 5], [1, 2, 3, 0]),
        (sglang_order, [-9, 1, None, 5], [3, 1, 0, 2]),
        (dynamo_order, [0, 7, None, 3], [1, 3, 0, 2]),
    ],
)
def test_each_engine_has_its_own_direction_and_place_for_the_untagged(
    order: Order, values: list[float | None], expected: list[int]
) -> None:
    arrivals = [(Rank(value), 0.1 * index) for index, value in enumerate(values)]
    assert order_of(order, *arrivals) == expected


def test_dynamo_gives_seconds_of_head_start_and_no_more() -> None:
    assert order_of(dynamo_order, (Rank(0), 0.0), (Rank(5), 4.0)) == [1, 0]
    assert order_of(dynamo_order, (Rank(0), 0.0), (Rank(5), 6.0)) == [0, 1]


def test_dynamo_takes_a_negative_priority_for_zero_and_strict_before_all() -> None:
    assert order_of(dynamo_order, (Rank(-50), 0.0), (Rank(0), 1.0)) == [0, 1]
    assert order_of(dynamo_order, (Rank(1_000), 0.0), (Rank(0, strict=1), 9.0)) == [1, 0]
