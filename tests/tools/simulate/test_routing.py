"""The routers among the baselines, each against its rule, `CacheAware` against the benchmark's radix tree."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.fleet_routers.cache_aware import CacheAware as OnText
from benchmarks.fleet_routers.rule import Request as Sent
from sidecar.tools.replay.trace import TraceRow
from sidecar.tools.simulate.baselines import CacheAware, FewestRequests, LeastRequests, RoundRobin
from sidecar.tools.simulate.load import Request


def request(blocks: Sequence[bytes] = (), tokens: int | None = None) -> Request:
    row = TraceRow(line=1, at_s=0.0, input_tokens=len(blocks) if tokens is None else tokens, output_tokens=1)
    return Request(row, 0, "tenant", blocks)


def test_round_robin_takes_each_in_turn_whatever_runs() -> None:
    rule = RoundRobin()
    assert [rule.select(request(), [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]


def test_least_requests_takes_equals_in_turn_and_the_fewest_first() -> None:
    rule = LeastRequests()
    assert [rule.select(request(), [0, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert rule.select(request(), [0, 5, 5]) == 0
    assert [FewestRequests().select(request(), [1, 0, 0]) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_cache_aware_sends_where_the_router_that_was_read_sends(seed: int) -> None:
    """A block is a letter here, and 16 tokens; the radix tree splits its nodes, ours has one for each block."""
    rng = random.Random(seed)
    ours, theirs = CacheAware(1), OnText(4, 1)
    running = [0] * 4
    for _ in range(300):
        text = bytes(rng.choices(b"ab", k=rng.randint(1, 12)))
        running[rng.randrange(4)] = rng.choice([0, 1, 50, 70, 200])
        theirs.requests = list(running)
        expected = theirs.select(Sent(text))
        assert ours.select(request([bytes([one]) for one in text]), running) == expected


def test_a_prompt_without_a_known_prefix_goes_to_the_fewest() -> None:
    rule = CacheAware(16)
    assert rule.select(request(tokens=500), [3, 1, 2]) == 1
    assert rule.select(request([b"x"], tokens=500), [3, 1, 2]) == 1
    assert rule.select(request([b"x"], tokens=500), [0, 1, 2]) == 0, "16 of 500 tokens are no 0.3 of the prompt"
    assert rule.select(request([b"x"], tokens=20), [0, 1, 2]) == 1
