"""The benchmark of one GPU, with a model that computes nothing: its requests, its engine, its figures, its mistakes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from benchmarks.gpu.decoder import LARGE, TINY
from benchmarks.gpu.plan import KINDS, LONGEST, TIERS, planned
from benchmarks.gpu.playing import ADMISSION, EQUAL, PRIORITY, WAYS, Played, play, play_all
from benchmarks.gpu.report import costs, figures, text

pytestmark = [pytest.mark.long, pytest.mark.alone]

STEP_S = 0.008
"""Much longer than what computes between two steps, on a busy machine too."""
PLACES = 8


class Numbers:
    """A model that counts: the token after N is N + 1. It remembers how many places it computed together."""

    def __init__(self) -> None:
        self.most = 0
        self.prompts: list[int] = []

    def prefill(self, place: int, prompt: Sequence[int]) -> int:
        assert 0 <= place < PLACES
        self.prompts.append(len(prompt))
        time.sleep(STEP_S / 4)
        return 0

    def decode(self, places: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        assert len(set(places)) == len(places)
        self.most = max(self.most, len(places))
        time.sleep(STEP_S)
        return [token + 1 for token in tokens]


@pytest.fixture(scope="module")
def played() -> dict[str, Played]:
    requests = planned(60, 3, 100, 1 / 16)
    found = play_all(Numbers(), PLACES, requests, 1, lambda _: None)
    return {one.way: one for one in found}


def median_first_s(played: Played, tier: str) -> float:
    times = sorted(seen.first_s for seen in played.seen if seen.tier == tier and seen.first_s is not None)
    return times[len(times) // 2]


def test_the_plan_is_the_same_for_the_same_seed_and_has_every_tier() -> None:
    requests = planned(160, 1, 1000)
    assert requests == planned(160, 1, 1000)
    assert requests != planned(160, 2, 1000)
    assert {tier: sum(one.tier == tier for one in requests) for tier in TIERS} == {
        "interactive": 32,
        "default": 48,
        "bulk": 80,
    }
    for one in requests:
        kind = KINDS[one.tier]
        assert kind.prompt[0] <= len(one.prompt) <= kind.prompt[1]
        assert kind.output[0] <= one.output_tokens <= kind.output[1]
        assert len(one.prompt) + one.output_tokens <= LONGEST
        assert max(one.prompt) < 1000


def test_every_request_gets_all_its_tokens_in_every_way(played: dict[str, Played]) -> None:
    assert set(played) == set(WAYS)
    for one in played.values():
        assert len(one.seen) == 60
        assert all(seen.first_s is not None and seen.first_s <= seen.last_s <= one.whole_s for seen in one.seen)


def test_admission_keeps_the_queue_out_of_the_engine(played: dict[str, Played]) -> None:
    assert played[EQUAL].most_in_engine_queue == played[PRIORITY].most_in_engine_queue == 60
    assert played[ADMISSION].most_in_engine_queue <= PLACES


@pytest.mark.parametrize("way", [PRIORITY, ADMISSION])
def test_interactive_requests_are_first_where_tiers_count(played: dict[str, Played], way: str) -> None:
    for tier in ("default", "bulk"):
        assert median_first_s(played[way], "interactive") < median_first_s(played[way], tier)
    assert median_first_s(played[way], "interactive") < median_first_s(played[EQUAL], "interactive")


def test_places_are_computed_together_and_never_more_than_there_are() -> None:
    import asyncio

    model, requests = Numbers(), planned(30, 1, 100, 1 / 16)
    found = asyncio.run(play(ADMISSION, model, PLACES, requests))
    assert model.most == PLACES
    assert sorted(model.prompts) == sorted(len(one.prompt) for one in requests)
    assert 0 <= found.device.idle_share < 1
    assert found.device.busy_s > STEP_S


def test_the_report_has_every_way_and_what_admission_costs(played: dict[str, Played]) -> None:
    found = figures(list(played.values()))
    shown = text("about", found)
    for words in (*WAYS, "interactive TTFT p99", "device idle", "points of the device's time idle"):
        assert words in shown
    assert costs(found)["idle_points"] == pytest.approx(
        100 * (played[ADMISSION].device.idle_share - played[PRIORITY].device.idle_share)
    )


def test_the_large_model_has_eight_billion_parameters_and_says_what_memory_it_needs() -> None:
    assert LARGE.parameters == pytest.approx(8.03e9, rel=0.01)
    assert 20 * 2**30 < LARGE.bytes_needed(32, LONGEST) < 30 * 2**30
    assert TINY.parameters < 1e6
