"""Values that are above zero as they are written, and nothing as they are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from tests.policy.files import SMALL, mistakes, pool


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
    assert policy.rules.tiers[2].limit[1] == 1
