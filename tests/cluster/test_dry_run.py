"""The report of what enforcing would have done: its figures, its conclusion, and the table that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_struct

from sidecar.admission.dry_run.shadow import WaitingShadow
from sidecar.cli.observed import lines as table
from sidecar.cluster.dry_run import ObservedReport, observed_report
from sidecar.events import Observed, ShadowHolds, Verdict
from sidecar.policy.choices import Mode
from sidecar.policy.tier import ServiceObjectives
from sidecar.pools.guards import GuardFigures
from sidecar.telemetry.dry_run import DryRunReport, DryRunStats
from sidecar.tools.text import WIDTH
from tests.support.middleware import policy

POLICY = replace(policy(), mode=Mode.OBSERVE)
AT_S = 1_800_000_000.0


def told(verdict: Verdict = Verdict.ADMITTED, code: str | None = None, wait_s: float = 0, **more: Any) -> Observed:
    plain = {"at_us": 1, "request_id": "r", "generation": POLICY.generation, "tier": "batch", "tenant": "acme"}
    return Observed(verdict=verdict, code=code, queue_wait_us=round(wait_s * 1e6), **{**plain, **more})


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def heard(
    *all_told: Observed,
    waiting_s: Sequence[float] = (),
    since_s: float = 60,
    until_s: float | None = None,
    holds: Mapping[str, ShadowHolds] = {},
) -> DryRunReport | None:
    """The period of this process. `since_s` and `until_s` are so long ago."""
    generation = all_told[0].generation if all_told else ""
    clock = Clock(AT_S - since_s)
    waiting = [WaitingShadow(generation, "batch", "acme", round(one_s * 1e6)) for one_s in waiting_s]
    tallies = DryRunStats(clock, lambda: waiting, lambda: holds)
    if all_told:
        tallies.begin(generation, 0)
    for one in all_told:
        tallies.note(one)
    if until_s is not None:
        clock.now_s = AT_S - until_s
        tallies.end()
    return tallies.read(20)


ROLLOUT = [
    *[told()] * 4283,
    *[told(Verdict.REFUSED, "queue_timeout", 30, tier="batch", starvation_us=29_000_000)] * 8,
    *[told(Verdict.REFUSED, "invalid_api_key", tier=None, tenant=None)] * 3,
    told(Verdict.REFUSED, "queue_full", tier="batch", tenant="globex"),
    *[told(wait_s=1.25, tier="high", served_ahead={"high": 700})] * 14,
    told(Verdict.ABANDONED, "client_left", 2.0),
]


def report_of(period: DryRunReport | None, others: Sequence[str] = (), mode: Mode = Mode.OBSERVE) -> ObservedReport:
    return observed_report(replace(POLICY, mode=mode), period, "a", others, AT_S)


def test_it_says_in_a_sentence_what_enforcing_would_have_done() -> None:
    assert report_of(heard(*ROLLOUT)).conclusion == (
        "Enforcing would have refused 12 of 4,310 requests (0.3%): 8 of batch by queue_timeout, 3 by invalid_api_key, "
        "1 of batch by queue_full. 14 (0.3%) would have waited before they were admitted, the longest 1.2 s (high); "
        "8 would have starved, the longest 29 s (batch)."
    )


def test_nothing_to_say_is_said_too() -> None:
    assert report_of(heard()).conclusion == "No request has been observed yet by this policy."
    assert report_of(heard(told())).conclusion == (
        "Enforcing would have refused none of 1 request. No request would have waited and then been admitted; none "
        "would have starved."
    )
    assert "this policy is enforced" in report_of(heard(), mode=Mode.ENFORCE).conclusion


def test_what_is_not_known_is_said() -> None:
    conclusion = report_of(heard(told(), told(Verdict.UNKNOWN, "stopped"), waiting_s=(1, 2, 4.5))).conclusion
    assert conclusion.endswith(
        "Of 1 it is not known (stopped). 3 more would still be waiting, the longest for 4.5 s so far."
    )


def test_those_that_still_wait_are_in_the_quantiles_and_the_longest_as_the_least_they_can_be() -> None:
    report = report_of(heard(told(wait_s=1), told(wait_s=1), waiting_s=[30.0] * 17))
    (batch,) = report.tiers
    assert (batch.waiting, report.undecided, report.total.waiting) == (17, 17, 17)
    assert batch.wait_p99_s == pytest.approx(30, rel=0.05)
    assert (batch.wait_p50_is_least, batch.wait_p99_is_least, batch.wait_max_is_least) == (True, True, True)
    assert batch.wait_max_s == 30.0
    (row,) = (line for line in table(report) if line.startswith("batch "))
    assert row.split()[-1] == "17"
    assert row.count("> 30 s") >= 1
    # Waits that are over cannot grow.
    few = report_of(heard(*[told(wait_s=1)] * 99, waiting_s=[30.0]))
    assert (few.tiers[0].wait_p50_is_least, few.tiers[0].wait_p99_is_least) == (False, False)


def test_clients_that_ask_for_more_than_they_may_have_are_named() -> None:
    clamped = [told(clamped_from="high")] * 3 + [told(clamped_from="critical", tenant="globex")]
    report = report_of(heard(told(), *clamped, told(clamped_from="high")))
    assert report.tiers[0].clamped == {"high": 4, "critical": 1}
    text = "\n".join(table(report))
    assert "clamped to what tier batch may have: 4 that asked for high\n" in text
    assert "clamped to what tenant globex may have: 1 that asked for critical\n" in text


def test_a_report_of_an_ended_period_says_that_it_is_over() -> None:
    enforcing = replace(POLICY, mode=Mode.ENFORCE, generation="enforced")
    ended = heard(told(), told(Verdict.REFUSED, "queue_full"), waiting_s=(3,), until_s=20)
    report = observed_report(enforcing, ended, "a", [], AT_S)
    assert (report.mode, report.generation) == ("enforce", POLICY.generation)
    assert (report.since_s, report.until_s) == (AT_S - 60, AT_S - 20)
    assert (report.replicas, report.left_out, report.undecided) == (["a"], [], 1)
    text = "\n".join(table(report))
    assert "since 2027-01-15 07:59:00 UTC until 2027-01-15 07:59:40 UTC (40 s)" in " ".join(text.split())
    assert "Observing is over" in text
    assert "1 replica observed" in " ".join(text.split())


def test_a_period_by_another_policy_is_not_shown_while_observing() -> None:
    report = report_of(heard(told(generation="x"), until_s=5))
    assert (report.generation, report.replicas, report.total.requests) == (POLICY.generation, [], 0)
    enforcing = replace(POLICY, mode=Mode.ENFORCE, generation="enforced")
    report = observed_report(enforcing, heard(told(generation="x"), until_s=5), "a", [], AT_S)
    assert (report.generation, report.replicas, report.total.requests) == ("x", ["a"], 1)


def test_a_doubt_marks_the_rows_that_it_concerns() -> None:
    shadows = {"batch": ShadowHolds(shadows=100, arrivals=100, followed=97), "high": ShadowHolds(shadows=100)}
    report = report_of(heard(told(), told(tier="high"), holds=shadows))
    assert [(row.name, row.is_trusted) for row in report.tiers] == [("high", True), ("batch", False)]
    assert not report.total.is_trusted
    lines = table(report)
    text = " ".join(" ".join(lines).split())
    assert "NOT TO BE TRUSTED at this load: Clients of batch seem to send their next request" in text
    assert any(line.startswith("batch !") for line in lines)
    assert any(line.startswith("high  ") for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_a_tier_with_hold_says_what_its_slo_was_and_would_have_been() -> None:
    objectives = ServiceObjectives(ttft_s=0.5, tpot_s=0.04, hold=Fraction(97, 100))
    first, *others = POLICY.tiers
    held = replace(POLICY, tiers=(replace(first, slo=objectives), *others))
    seen = {first.name: ShadowHolds(met=1, missed=3, would_meet=1990, would_miss=10)}
    guard = GuardFigures(first.name, 0.14, 0.1, 0.2, 1990, 10, is_in_vain=False)
    period = heard(told(), holds=seen)
    (slo,) = observed_report(held, period, "a", [], AT_S, [guard]).slo
    assert (slo.tier, slo.hold, slo.share, slo.is_trusted) == (first.name, 0.97, 0.14, True)
    text = " ".join(table(observed_report(held, period, "a", [], AT_S, [guard])))
    assert (
        f"SLO of {first.name}: 25.0% of 4 streams met it as they passed; by estimate 99.5% of 2,000 would have, of 97% "
        "promised. Less important requests would fill the pool to 14% now."
    ) in " ".join(text.split())
    doubted = heard(told(), holds={first.name: replace_struct(seen[first.name], shadows=100, lost=20)})
    assert f"SLO of {first.name} !: " in " ".join(table(observed_report(held, doubted, "a", [], AT_S, [guard])))
    over = observed_report(held, heard(told(), holds=seen, until_s=5), "a", [], AT_S, [guard])
    assert over.slo[0].share is None
    assert "would fill" not in " ".join(table(over))
    assert report_of(period).slo == []


def test_rows_are_in_the_policys_order_and_tenants_by_size() -> None:
    report = report_of(heard(*ROLLOUT))
    assert [row.name for row in report.tiers] == ["high", "batch", ""]
    assert [row.name for row in report.tenants] == ["acme", "", "globex"]
    high = report.tiers[0]
    assert (high.requests, high.waited, high.wait_max_s, high.served_ahead) == (14, 14, 1.25, {"high": 9800})
    assert high.wait_p50_s == high.wait_p99_s  # all the same, and right to 5%
    assert abs(high.wait_p50_s - 1.25) <= 0.0625
    assert report.total.requests == sum(row.requests for row in report.tiers) == 4310
    assert report.since_s == AT_S - 60


def test_a_stranger_can_read_the_table() -> None:
    lines = table(report_of(heard(*ROLLOUT), ["c"]))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("mode: observe, policy ")
    assert "since 2027-01-15 07:59:00 UTC (1 m 00 s), 1 replica observes" in " ".join(text.split())
    assert "not counted: 1 replica observes, too (c). Each has a report of its own" in text
    assert "Enforcing would have refused 12 of 4,310 requests (0.3%)" in text
    (heading,) = (line for line in lines if line.startswith("TIER"))
    (high,) = (line for line in lines if line.startswith("high "))
    assert heading.split()[:6] == ["TIER", "REQUESTS", "WAITED", "P50", "P99", "LONGEST"]
    assert high.split()[:3] == ["high", "14", "14"]
    assert len(heading) == len(high)
    assert "refused of tier batch: 8 queue_timeout, 1 queue_full" in text
    assert "refused of tenant (not known): 3 invalid_api_key" in text
    assert "tokens that went ahead while high waited: 9,800 of high" in text


def test_without_requests_there_is_no_table() -> None:
    assert not any("TIER" in line for line in table(report_of(heard())))


def test_a_name_cannot_command_the_terminal() -> None:
    report = report_of(heard(told(tier="\x1b[2J", tenant="\x1b]0;x\x07")))
    assert "\x1b" not in "\n".join(table(report))


def test_the_document_is_what_the_command_reads() -> None:
    report = report_of(heard(*ROLLOUT))
    assert msgspec.json.decode(msgspec.json.encode(report), type=ObservedReport) == report
