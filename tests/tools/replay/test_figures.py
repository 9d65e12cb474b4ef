"""The figures of a run, from answers written by hand, and what is said of them."""

from __future__ import annotations

import dataclasses

import pytest

from sidecar.tools.loadgen import Correlation, Distribution
from sidecar.tools.replay.figures import DoorSums, request_id
from sidecar.tools.replay.prompts import Words
from sidecar.tools.replay.table import advice, meaning, table
from tests.tools.replay.seen import TIERS, played, seen


def waited(wait_ms: float, starved_ms: float = 0.0) -> dict[str, str]:
    """As the sidecar's headers say it."""
    starved = f", starved;dur={starved_ms:.1f}" if starved_ms else ""
    return {
        "x-admission-wait-ms": f"{wait_ms:.0f}",
        "server-timing": f"app;dur=3.1, admission;dur={wait_ms:.1f}{starved}",
    }


def test_a_refusal_after_a_wait_counts_in_what_the_sidecar_says() -> None:
    run = played(
        [
            seen("batch", 0.0, 1.0, headers=waited(0)),
            seen("batch", 0.0, None, error="HTTP 503: queue_timeout", headers=waited(2000, starved_ms=500)),
            seen("batch", 0.0, None, error="HTTP 503: queue_full", headers={"x-request-id": "x"}),
        ]
    ).figures
    assert run.tiers["batch"].door == DoorSums(2, 2.0, 0.5)


def test_each_tier_has_its_own_figures() -> None:
    run = played(
        [
            seen("batch", 0.0, 5.0, headers=waited(4000, starved_ms=3500)),
            seen("high", 1.0, 0.5, headers=waited(100)),
            seen("high", 2.0, 1.5, headers=waited(300.5)),
        ]
    ).figures
    assert list(run.tiers) == ["high", "batch"]
    high, batch = run.tiers["high"], run.tiers["batch"]
    assert (high.requests, high.failed, high.ttft_s) == (2, 0, Distribution(1.5, 1.5, 1.5, 1.0))
    assert high.queue_wait_s.p50 == 0.3005
    assert (high.door, batch.door) == (DoorSums(2, pytest.approx(0.4005), 0.0), DoorSums(1, 4.0, 3.5))
    assert high.tpot_s.p50 == pytest.approx(0.1)
    assert batch.starvation_s.p50 == pytest.approx(3.5)  # from 1.5 s, when a request that came later was served
    assert (run.requests, run.duration_s) == (3, 6.0)
    assert run.requests_per_s == 0.5
    assert run.output_tokens_per_s == pytest.approx(33 / 6)
    assert high.output_tokens_per_s == pytest.approx(22 / 6)


def test_what_failed_is_counted_by_its_error_and_is_in_no_other_figure() -> None:
    run = played(
        [
            seen("high", 0.0, 1.0),
            seen("high", 0.0, None, error="HTTP 503: full"),
            seen("high", 0.0, 9.0, error="cut off"),
            seen("high", 0.0, None, error="HTTP 503: full"),
        ]
    ).figures
    assert (run.failed, run.errors, run.output_tokens_per_s) == (3, {"HTTP 503: full": 2, "cut off": 1}, 11 / 10)
    assert run.tiers["high"].failed == 3
    assert run.tiers["high"].ttft_s == Distribution(1.0, 1.0, 1.0, 1.0)


def test_a_run_of_failures_alone_has_no_distributions() -> None:
    run = played([seen("high", 0.0, None, error="no"), seen("batch", 0.0, None, error="no")]).figures
    assert {tier.ttft_s for tier in run.tiers.values()} == {None}
    assert run.correlation is None
    assert "2 x no" in table([run])


def test_importance_is_the_higher_the_better_so_that_priority_that_works_is_negative() -> None:
    works = [seen(tier, 0.0, 1.0 + TIERS.index(tier) + n / 10) for tier in TIERS for n in range(5)]
    run = played(works).figures
    assert run.correlation.high < -0.8
    assert meaning(run).endswith(": the more important a request, the sooner its first token.")
    wrong = played([seen(tier, 0.0, 9.0 - TIERS.index(tier) - n / 10) for tier in TIERS for n in range(5)]).figures
    assert "the wrong way round" in meaning(wrong)


def test_a_sentence_claims_no_more_than_the_interval_does() -> None:
    run = played([seen(tier, 0.0, 1.0) for tier in TIERS]).figures
    assert "Too few answers" in meaning(run)
    weak = dataclasses.replace(run, correlation=Correlation(-0.2, -0.5, 0.1, 30))
    assert meaning(weak) == (
        "Spearman of importance and TTFT: -0.20 (95% between -0.50 and +0.10, n=30): "
        "importance made no difference that these requests can show."
    )
    assert "One tier alone" in meaning(played([seen("high", 0.0, 1.0)]).figures)


def test_the_table_s_columns_stand_under_each_other() -> None:
    head, _, title, *lines = table([played([seen(tier, 0.0, 1.234) for tier in TIERS]).figures]).splitlines()
    assert title == "by priority"
    assert {len(line) for line in lines[:3]} == {len(head)}
    assert " ".join(lines[0].split()) == "high 1 0 1.23 1.23 1.23 100.0 - - 0.00 0.00 5"


def test_a_client_that_was_too_slow_says_so() -> None:
    late = dataclasses.replace(seen("high", 0.0, 1.0), sent_s=0.4, first_token_s=1.4)
    assert "did not get to run for up to 0.40 s" in advice([played([late]).figures], Words())[0]
    stalled = dataclasses.replace(played([seen("high", 0.0, 1.0)]).figures, stalled_s=0.7)
    assert "did not get to run for up to 0.70 s" in advice([stalled], Words())[0]
    assert advice([played([seen("high", 0.0, 1.0)]).figures], Words()) == []


def test_prompts_that_became_longer_than_asked_for_are_said_so() -> None:
    [said] = advice([played([seen("high", 0.0, 1.0, prompt_tokens=80)]).figures], Words())
    assert "counted 80 prompt tokens a request, 64 were asked for (prompts by 4 bytes a token" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("HTTP 400: ignore_eos: Extra inputs are not permitted", "add --no-ignore-eos"),
        ("HTTP 400: Unsupported parameter(s): `priority`", "too old to take it"),
        ("HTTP 400: This model's maximum context length is 512 tokens", "--max-input"),
        ("HTTP 401: invalid_api_key", "--api-key"),
        ("cannot connect to x: Too many open files", "ulimit"),
    ],
)
def test_what_can_be_done_about_an_error_is_said_once(error: str, said: str) -> None:
    run = played([seen("high", 0.0, None, error=error) for _ in range(3)]).figures
    [line] = advice([run, run], Words())
    assert said in line


@pytest.mark.parametrize("header", ["x-admission-wait-ms", "x-admission-mode"])
def test_a_sidecars_answer_names_its_request_also_where_it_observes(header: str) -> None:
    assert request_id({"x-request-id": "one", header: "0"}) == "one"
    assert request_id({"x-request-id": "the-engines-own"}) is None
