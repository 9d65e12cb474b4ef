"""A report doubts itself where a premise fails, names it, and is silent otherwise."""

from __future__ import annotations

import pytest

from sidecar.cluster.dry_run import doubts
from sidecar.events import Observed, ShadowHolds, Verdict
from sidecar.telemetry.dry_run import DryRunCounts

GOOD = ShadowHolds(
    shadows=1000, guessed=300, guessed_and_known=300, guessed_s=310, known_s=300, arrivals=500, followed=130
)


def of(unknown: dict[str, int] | None = None, requests: int = 1000, **holds: float) -> list[tuple[str, str]]:
    fields = {name: getattr(GOOD, name) for name in ShadowHolds.__struct_fields__}
    shadows = ShadowHolds(**{**fields, **holds})
    counts = DryRunCounts(requests=requests, unknown=unknown or {})
    return [(one.tier, one.reason) for one in doubts(counts, {"batch": counts}, {"batch": shadows})]


def test_nothing_is_doubted_without_a_reason() -> None:
    assert of() == []
    assert of(unlearned=50, lost=50, left=50) == []  # a twentieth
    assert of({"stopped": 900}) == []  # the server's end is no fault of the figures
    assert doubts(DryRunCounts(), {}, {}) == []
    assert doubts(DryRunCounts(), {"batch": DryRunCounts()}, {"batch": ShadowHolds()}) == []


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        ({"unlearned": 60}, "60 of 1,000 requests came while the engine ran more than the pool admits"),
        ({"lost": 60}, "The engine refused or failed 60 of 1,000 requests"),
        ({"left": 60}, "60 of 1,000 clients disconnected because the engine was slow"),
        ({"guessed_s": 450}, "300 of 1,000 requests would have ended before they did"),
        ({"guessed_and_known": 10}, "their output lengths could not be guessed"),
    ],
)
def test_a_premise_that_fails_is_named_for_all_tiers(holds: dict[str, float], said: str) -> None:
    ((tier, reason),) = of(**holds)
    assert tier == ""
    assert said in reason


def test_requests_that_were_not_followed_are_missing_in_the_figures() -> None:
    ((_, reason),) = of({"too_many_shadows": 20})
    assert "20 of 1,000 requests were not followed" in reason


def test_a_closed_loop_is_a_doubt_about_its_tier() -> None:
    ((tier, reason),) = of(followed=480)
    assert tier == "batch"
    assert "(96% of 500 came directly after an end)" in reason
    assert of(followed=29, arrivals=29) == []


def waited(*waits_s: float) -> DryRunCounts:
    counts = DryRunCounts()
    for wait_s in waits_s:
        counts.note(observed(wait_s))
    return counts


def observed(wait_s: float) -> Observed:
    return Observed(0, "id", "generation", Verdict.ADMITTED, None, "high", "tenant", round(wait_s * 1e6), 0, {})


@pytest.mark.parametrize(
    ("waits_s", "is_doubted"),
    [
        ([0.0] * 49 + [2.7], True),
        ([1.0] * 49 + [2.7], True),
        ([2.0] * 49 + [2.7], False),  # the others wait about as long
        ([0.0] * 49 + [0.4], False),  # too short to matter
        ([0.0] * 150 + [2.7] * 2, False),  # two of so many are no chance
        ([], False),
    ],
)
def test_a_99th_percentile_that_is_one_request_is_doubted(waits_s: list[float], is_doubted: bool) -> None:
    counts = waited(*waits_s)
    found = doubts(counts, {"high": counts}, {"high": GOOD})
    assert [one.tier for one in found] == ["high"] * is_doubted
    assert all("one request's" in one.reason and "2.7 s" in one.reason for one in found)
