"""The benchmark of one GPU, with a model that computes nothing: its requests, its engine, its figures, its mistakes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from benchmarks.gpu.plan import planned
from benchmarks.gpu.playing import ADMISSION, EQUAL, PRIORITY, WAYS, Played, play_all
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


def test_the_report_has_every_way_and_what_admission_costs(played: dict[str, Played]) -> None:
    found = figures(list(played.values()))
    shown = text("about", found)
    for words in (*WAYS, "interactive TTFT p99", "device idle", "points of the device's time idle"):
        assert words in shown
    assert costs(found)["idle_points"] == pytest.approx(
        100 * (played[ADMISSION].device.idle_share - played[PRIORITY].device.idle_share)
    )
