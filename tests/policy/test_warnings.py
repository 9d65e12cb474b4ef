from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.policy.loading import load, load_files
from sidecar.policy.warnings import warnings
from tests.policy.files import pool, tenant

HASH = "sha256:" + "0" * 64


def _said(folder: Path, tiers: str, rest: str = "", capacity: str = "tokens: 1000, requests: 100") -> list[str]:
    text = f"engine: vllm\ncapacity: {{{capacity}}}\ntiers: {tiers}\nanonymous: normal\n{rest}"
    return [str(warning) for warning in warnings(load(pool(folder, text)))]


def test_a_policy_that_surprises_nobody_has_no_warnings(tmp_path: Path) -> None:
    assert _said(tmp_path, "{high: {reserve: 20%}, normal: {reserve: 5%}}") == []


def test_a_tier_without_a_reserve_under_one_that_can_fill_the_pool_can_starve(tmp_path: Path) -> None:
    said = "can starve: it has no reserve, does not age, and high can hold the whole pool; give it a reserve, even 5%"
    assert [f"tiers.normal: {said}"] == _said(tmp_path, "{high: {}, normal: {}}")


def test_aging_up_to_the_tier_above_saves_from_starving(tmp_path: Path) -> None:
    aging = "aging: {promote_after: 5m, ceiling: high}\n"
    assert _said(tmp_path, "{high: {}, normal: {}}", aging) == []


def test_aging_that_ends_below_does_not(tmp_path: Path) -> None:
    found = _said(
        tmp_path, "{high: {}, normal: {reserve: 1%}, low: {}}", "aging: {promote_after: 5m, ceiling: normal}\n"
    )
    said = "can starve: it has no reserve, ages no further than normal, and high can hold the whole pool; "
    assert [f"tiers.low: {said}give it a reserve, even 5%"] == found


@pytest.mark.parametrize(("limits", "starves"), [((60, 30), False), ((60, 40), True)])
def test_limits_above_save_from_starving_only_if_they_leave_room_together(
    tmp_path: Path, limits: tuple[int, int], starves: bool
) -> None:
    first, second = limits
    tiers = f"{{a: {{reserve: 1%, limit: {first}%}}, b: {{reserve: 1%, limit: {second}%}}, normal: {{}}}}"
    assert starves is any("can starve" in said for said in _said(tmp_path, tiers))


def test_a_pool_without_a_bound_on_requests_is_not_filled_by_requests(tmp_path: Path) -> None:
    assert _said(tmp_path, "{a: {reserve: 1%, limit: 50%}, normal: {}}", capacity="tokens: 1000") == []


def test_more_than_four_fifths_reserved_turns_priorities_off(tmp_path: Path) -> None:
    said = "85% of the pool is reserved, so priorities hardly matter under overload; reserve 80% at most"
    assert [f"tiers: {said}"] == _said(tmp_path, "{high: {reserve: 45%}, normal: {reserve: 40%}}")
    assert _said(tmp_path, "{high: {reserve: 40%}, normal: {reserve: 40%}}") == []


def test_a_tier_that_lends_nothing_says_what_it_costs(tmp_path: Path) -> None:
    said = "lends nothing: while it is idle, 300 tokens (30% of the pool) stay unused; "
    assert [f"tiers.high.lend: {said}lend more, unless it must start at once"] == _said(
        tmp_path, "{high: {reserve: 30%, lend: 0%}, normal: {reserve: 5%, lend: 10%}}"
    )


def test_a_pool_of_requests_alone_is_counted_in_requests(tmp_path: Path) -> None:
    (said,) = _said(tmp_path, "{high: {reserve: 30%, lend: 0%}, normal: {reserve: 5%}}", capacity="requests: 15")
    assert "4 requests (27% of the pool) stay unused" in said


@pytest.mark.parametrize(("aging", "largest"), [("", "700"), ("aging: {promote_after: 1s, ceiling: high}\n", "1,000")])
def test_a_request_larger_than_the_tier_could_ever_be_given(tmp_path: Path, aging: str, largest: str) -> None:
    tiers = "{high: {reserve: 60%, lend: 50%}, normal: {reserve: 5%, max_request_tokens: 2k}}"
    (said,) = _said(tmp_path, tiers, aging)
    assert said.startswith(f"tiers.normal.max_request_tokens: 2,000 is more than the {largest} tokens it could ever be")


def test_a_tiers_own_limit_counts_too(tmp_path: Path) -> None:
    (said,) = _said(tmp_path, "{normal: {limit: 10%, max_request_tokens: 101}}")
    assert "101 is more than the 100 tokens it could ever be given" in said


def _of_limits(folder: Path, lines: str) -> list[str]:
    pool(
        folder,
        "engine: vllm\ncapacity: {tokens: 1000}\ntiers: {normal: {}, low: {reserve: 5%}}\ntenants: tenants/*.yaml\n",
    )
    tenant(folder, "a", f"tenant: acme\nkeys: [{HASH}]\ntier: normal\n{lines}\n")
    loaded = load_files(folder)
    return [str(one) for one in warnings(loaded.policy, loaded.place)]


def test_a_limit_that_lets_no_ordinary_request_through_is_said_with_its_line(tmp_path: Path) -> None:
    (said,) = _of_limits(tmp_path, "limits: {tokens_per_minute: 600, burst: 10s}")
    assert said.startswith(
        f"{tmp_path}/tenants/a.yaml:4: tenants.acme.limits.tokens_per_minute: lets 100 tokens through"
    )
    assert "counts for 512 and its prompt" in said


def test_limits_that_let_requests_through_are_worth_no_warning(tmp_path: Path) -> None:
    assert _of_limits(tmp_path, "limits: {tokens_per_minute: 600, max_output_tokens: 80, burst: 10s}") == []
    assert _of_limits(tmp_path, "limits: {requests_per_minute: 1}\nover_limit: {downgrade: low}") == []


def test_what_happens_over_limits_that_there_are_not(tmp_path: Path) -> None:
    (said,) = _of_limits(tmp_path, "limits: {max_output_tokens: 80}\nover_limit: {downgrade: low}")
    assert "tenants.acme.over_limit: does nothing without limits" in said


def test_preempting_and_being_preempted_each_need_the_other(tmp_path: Path) -> None:
    both = "{high: {reserve: 20%, preempt_after: 500ms}, normal: {reserve: 5%, preemptible: true}}"
    assert _said(tmp_path, both) == []
    (said,) = _said(tmp_path, "{high: {reserve: 20%, preempt_after: 500ms}, normal: {reserve: 5%}}")
    assert said.startswith("tiers.high.preempt_after: does nothing: no less important tier is preemptible; write ")
    (said,) = _said(tmp_path, "{high: {reserve: 20%}, normal: {reserve: 5%, preemptible: true}}")
    assert said.startswith("tiers.normal.preemptible: does nothing: no more important tier has preempt_after; write ")
    (said,) = _said(tmp_path, both, "max_preemptions: 0\n")
    assert said.startswith("tiers.normal.preemptible: does nothing: max_preemptions is 0; ")


@pytest.mark.parametrize(
    ("high", "normal"),
    [("preemptible: true", "preempt_after: 1s"), ("lend: 100%", "preempt_after: 1s, preemptible: true")],
    ids=["the wrong way around", "one tier is both"],
)
def test_only_a_less_important_tier_is_preempted(tmp_path: Path, high: str, normal: str) -> None:
    found = "\n".join(_said(tmp_path, f"{{high: {{reserve: 20%, {high}}}, normal: {{reserve: 5%, {normal}}}}}"))
    assert "preempt_after: does nothing: no less important tier is preemptible" in found
    assert "preemptible: does nothing: no more important tier has preempt_after" in found


def test_a_policy_that_lets_nobody_in_is_worth_a_warning(tmp_path: Path) -> None:
    path = pool(tmp_path, "engine: vllm\ncapacity: {tokens: 1000}\ntiers: {normal: {}}\n")
    assert [warning.path for warning in warnings(load(path))] == ["tenants"]
