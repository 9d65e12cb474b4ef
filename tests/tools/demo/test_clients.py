"""The demo's traffic: every run of one seed gets the same, in order, and more than the engine can do."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from sidecar.policy.compiler import load, shipped_policies
from sidecar.tools.demo.clients import BURST, BURST_AT, BURST_S, OUTPUT_TOKENS, PROMPT_TOKENS, STREAMS, arrivals


def test_one_seed_gives_one_sequence_and_another_seed_another() -> None:
    assert arrivals(3.0, seed=7) == arrivals(3.0, seed=7)
    assert arrivals(3.0, seed=7) != arrivals(3.0, seed=8)


def test_they_come_in_order_and_within_the_run() -> None:
    times = [arrival.at_s for arrival in arrivals(8.0)]
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert times[0] >= 0
    assert times[-1] < 8.0


def test_every_stream_comes_as_often_as_it_says() -> None:
    seconds = 60.0
    counts = Counter(arrival.stream.tier for arrival in arrivals(seconds))
    assert set(counts) == {stream.tier for stream in STREAMS}
    for stream in STREAMS:
        expected = stream.per_second * seconds + (BURST if stream.tier == "critical" else 0)
        assert counts[stream.tier] == pytest.approx(expected, abs=5 * expected**0.5)


def test_an_incident_is_a_burst_of_critical_requests() -> None:
    begin_s = BURST_AT * 8.0
    times = [one.at_s for one in arrivals(8.0) if one.stream.tier == "critical"]
    assert sum(begin_s <= at_s <= begin_s + BURST_S for at_s in times) >= BURST
    assert {one.stream.header for one in arrivals(8.0) if one.stream.tier == "critical"} == {"critical"}


def test_a_run_that_ends_within_the_burst_has_no_request_after_its_end() -> None:
    assert all(one.at_s < 0.1 for one in arrivals(0.1))


def test_sizes_stay_within_their_bounds() -> None:
    found = arrivals(8.0)
    assert all(PROMPT_TOKENS[0] <= arrival.prompt_tokens <= PROMPT_TOKENS[1] for arrival in found)
    assert all(OUTPUT_TOKENS[0] <= arrival.output_tokens <= OUTPUT_TOKENS[1] for arrival in found)


def test_keys_and_tiers_are_those_of_the_shipped_policy() -> None:
    import hashlib

    policy = load(shipped_policies())
    for stream in STREAMS:
        tenant = policy.tenants[hashlib.sha256(stream.key.encode()).hexdigest()]
        level = policy.level_for(stream.header or stream.tier)
        assert level >= tenant.max_level, f"{stream.tier} would be clamped"
        assert stream.header is not None or level == tenant.level
