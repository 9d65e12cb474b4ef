"""Values that are above zero as they are written, and nothing as they are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from tests.policy.files import SMALL, mistakes, pool, tenant
from tests.support.each import each

HASH = "sha256:" + "0" * 64
TOO_SHORT = 'is less than a microsecond, and times are counted in those; write "1us"'


@each(
    ("line", "key"),
    [
        ("aging: {promote_after: 0.4us, ceiling: high}", "aging.promote_after"),
        ("keep_alive: 0.4us", "keep_alive"),
        ("trace_waits: 0.4us", "trace_waits"),
        ("body_timeout: 0.0004ms", "body_timeout"),
        ("disconnect_grace: 0.4us", "disconnect_grace"),
    ],
)
def test_a_time_of_the_pool_that_would_be_rounded_to_nothing_is_refused(tmp_path: Path, line: str, key: str) -> None:
    (found,) = mistakes(pool(tmp_path, f"{SMALL}{line}\n"))
    written = line.rpartition("{")[2].split(": ")[1].split(",")[0]
    assert f'policy.yaml:7: {key}: "{written}" {TOO_SHORT}' == found


@each(
    ("body", "key"),
    [
        ("preempt_after: 0.4us", "preempt_after"),
        ("queue: {max_wait: 0.4us}", "queue.max_wait"),
        ("slo: {ttft: 0.4us}", "slo.ttft"),
        ("slo: {queue_wait: 0.4us}", "slo.queue_wait"),
        ("slo: {starvation: 0.4us}", "slo.starvation"),
    ],
)
def test_a_time_of_a_tier_that_would_be_rounded_to_nothing_is_refused(tmp_path: Path, body: str, key: str) -> None:
    (found,) = mistakes(pool(tmp_path, SMALL.replace("high: {}", f"high: {{{body}}}")))
    assert f'policy.yaml:4: tiers.high.{key}: "0.4us" {TOO_SHORT}' == found


def test_a_tenants_burst_that_would_be_rounded_to_nothing_is_refused(tmp_path: Path) -> None:
    limits = "limits: {tokens_per_minute: 60k, burst: 0.4us}"
    tenant(tmp_path, "acme", f"tenant: acme\nkeys: [{HASH}]\ntier: normal\n{limits}\n")
    (found,) = mistakes(pool(tmp_path, f"{SMALL}tenants: tenants/*.yaml\n"))
    assert f'tenants/acme.yaml:4: limits.burst: "0.4us" {TOO_SHORT}' == found


def test_a_microsecond_is_a_time(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, f"{SMALL}aging: {{promote_after: 1us, ceiling: high}}\n"))
    assert policy.rules.promote_after_us == 1


@pytest.mark.parametrize("key", ["preempt_after", "disconnect_grace"])
def test_no_time_at_all_may_be_written_where_that_has_a_meaning(tmp_path: Path, key: str) -> None:
    at_tier = SMALL.replace("high: {}", "high: {preempt_after: 0s}")
    assert mistakes(pool(tmp_path, at_tier if key == "preempt_after" else f"{SMALL}{key}: 0s\n")) == []


@pytest.mark.parametrize(
    ("limit", "said"),
    [("5%", "5% of 10 requests"), ("0.05%", "0.05% of 1000 tokens")],
)
def test_a_limit_below_one_request_or_one_token_is_refused(tmp_path: Path, limit: str, said: str) -> None:
    found = mistakes(pool(tmp_path, SMALL.replace("batch: {}", f"batch: {{limit: {limit}}}")))
    refused = f"policy.yaml:6: tiers.batch.limit: {said} is less than one, and admits nothing, ever"
    assert f"{refused}; write a larger share" == found[0]


def test_a_limit_of_exactly_one_request_is_a_limit(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, SMALL.replace("batch: {}", "batch: {limit: 10%}")))
    assert policy.rules.tiers[2].limit_requests == 1
