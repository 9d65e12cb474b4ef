from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from sidecar.policy.compiler import load, load_files
from sidecar.policy.warnings import warnings
from tests.policy.files import pool, tenant
from tests.support.each import each

HASH = "sha256:" + "0" * 64
SOURCES = "sources: [header, endpoint, key]\n"
"""No body: vLLM's own numbers there are worth a warning of their own."""


def _said(folder: Path, tiers: str, rest: str = "", capacity: str = "tokens: 1000, requests: 100") -> list[str]:
    text = f"engine: vllm\ncapacity: {{{capacity}}}\ntiers: {tiers}\nanonymous: normal\n{SOURCES}{rest}"
    return [str(warning) for warning in warnings(load(pool(folder, text)))]


def test_a_policy_that_surprises_no_one_has_no_warnings(tmp_path: Path) -> None:
    assert _said(tmp_path, "{high: {reserve: 20%}, normal: {reserve: 10%}}") == []


@each(
    ("tiers", "kept"),
    [
        ("{high: {reserve: 20%, @}, normal: {reserve: 10%}, batch: {reserve: 10%}}", None),
        ("{high: {reserve: 20%, slo: {ttft: 1s, tpot: 60ms}}, normal: {reserve: 50%}}", None),
        ("{high: {reserve: 20%, @}, normal: {reserve: 30%}, batch: {reserve: 30%}}", 60),
        ("{high: {reserve: 20%, @}, normal: {reserve: 20%, limit: 30%}}", 20),
        ("{high: {reserve: 40%}, normal: {reserve: 10%, @}, batch: {reserve: 10%}}", None),
    ],
)
def test_floors_that_leave_nothing_to_take_for_a_guarded_tier(tmp_path: Path, tiers: str, kept: int | None) -> None:
    found = _said(tmp_path, tiers.replace("@", "slo: {ttft: 1s, tpot: 60ms, hold: 97%}"))
    begin = f"tiers.high.slo.hold: does little: the reserves of less important tiers, {kept}% of the pool, are theirs "
    assert len(found) == (kept is not None)
    assert all(begin in one for one in found)


def test_a_share_of_requests_is_kept_beside_its_tier(tmp_path: Path) -> None:
    slo = "slo: {ttft: 1s, tpot: 60ms, hold: 97.5%}"
    text = f"engine: vllm\ncapacity: {{tokens: 1000}}\ntiers: {{high: {{{slo}}}, normal: {{}}}}\nanonymous: normal\n"
    assert [tier.hold for tier in load(pool(tmp_path, text)).tiers] == [Fraction(975, 1000), 0]


@each(
    ("rest", "said"),
    [
        ("unguarded: deny\npublic: [/metrics]\n", []),
        ("unguarded: allow\n", []),
        ("unguarded: allow\nanonymous: deny\n", ["unguarded: allow passes every path"]),
        ("unguarded: allow\npublic: []\n", ["public: unguarded: allow leaves every page open"]),
        ("unguarded: generating\npublic: [/a]\n", ["public: unguarded: generating leaves every page open"]),
    ],
)
def test_what_lets_in_those_who_are_kept_out(tmp_path: Path, rest: str, said: list[str]) -> None:
    text = (
        "engine: vllm\ncapacity: {tokens: 1000, requests: 100}\ntiers: {high: {reserve: 20%}, normal: {reserve: 9%}}\n"
    )
    text += f"{SOURCES}tenants: t.yaml\n" + rest + ("" if "anonymous" in rest else "anonymous: normal\n")
    (tmp_path / "t.yaml").write_text(f'tenant: acme\nkeys: ["{HASH}"]\ntier: normal\n')
    found = [
        str(warning) for warning in warnings(load(pool(tmp_path, text))) if warning.path in {"public", "unguarded"}
    ]
    assert [one[: len(begin)] for one, begin in zip(found, said, strict=True)] == said


def test_a_shared_pool_needs_the_number_of_its_replicas(tmp_path: Path) -> None:
    tiers, store = "{high: {reserve: 20%}, normal: {reserve: 10%}}", "store: redis://127.0.0.1:6379/0\n"
    (found,) = _said(tmp_path, tiers, store)
    assert "store: each replica that starts while the store cannot be reached takes the whole pool" in found
    for rest in ("replicas: 2\n", "on_store_loss: closed\n"):
        assert _said(tmp_path, tiers, store + rest) == []


def test_pages_of_every_origin_without_a_key_are_worth_a_warning(tmp_path: Path) -> None:
    tiers = "{high: {reserve: 20%}, normal: {reserve: 10%}}"
    assert _said(tmp_path, tiers, 'cors: {origins: ["https://app.example"]}\n') == []
    (found,) = _said(tmp_path, tiers, 'cors: {origins: ["*"]}\n')
    assert "cors.origins: with anonymous a tier, every page" in found


def test_a_tier_without_a_reserve_under_one_that_can_fill_the_pool_can_starve(tmp_path: Path) -> None:
    said = "can starve: it has no reserve, does not age, and high can hold the whole pool; give it a reserve, even 5%"
    assert [f"tiers.normal: {said}"] == _said(tmp_path, "{high: {}, normal: {}}")


def test_a_tier_that_accepts_no_second_sequence_is_a_surprise(tmp_path: Path) -> None:
    tiers = "{high: {reserve: 70%}, normal: {reserve: 10%, limit: 25%}}"
    said = [line for line in _said(tmp_path, tiers, capacity="tokens: 1000, requests: 7") if "one sequence" in line]
    assert len(said) == 1
    assert said[0].startswith("tiers.normal: accepts requests of one sequence: one with n: 2 gets a 400 at once; ")
    assert not any("one sequence" in line for line in _said(tmp_path, tiers, capacity="requests: 8"))


def test_aging_up_to_the_tier_above_saves_from_starving(tmp_path: Path) -> None:
    aging = "aging: {promote_after: 5m, ceiling: high}\n"
    assert _said(tmp_path, "{high: {}, normal: {}}", aging) == []


def test_aging_that_ends_below_does_not(tmp_path: Path) -> None:
    found = _said(
        tmp_path, "{high: {}, normal: {reserve: 20%}, low: {}}", "aging: {promote_after: 5m, ceiling: normal}\n"
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
    assert _said(tmp_path, "{a: {reserve: 10%, limit: 50%}, normal: {}}", capacity="tokens: 1000") == []


def test_more_than_four_fifths_reserved_turns_priorities_off(tmp_path: Path) -> None:
    said = (
        "85% of the pool is reserved, so priorities hardly matter under overload, and no tier with a reserve accepts "
        "a request larger than that and the 15% left; reserve 80% at most"
    )
    assert [f"tiers: {said}"] == _said(tmp_path, "{high: {reserve: 45%}, normal: {reserve: 40%}}")
    (said,) = _said(tmp_path, "{high: {reserve: 60%}, normal: {reserve: 40%}}")
    assert "accepts a request larger than that; reserve 80% at most" in said
    assert _said(tmp_path, "{high: {reserve: 40%}, normal: {reserve: 40%}}") == []


def test_a_tier_that_lends_nothing_says_what_it_costs(tmp_path: Path) -> None:
    said = "lends nothing: while it is idle, 300 tokens (30% of the pool) stay unused; "
    better = (
        "lend all of it and take room back, by preempt_after: 250ms here and preemptible: true in a less important "
        "tier, unless the engine cannot abort requests"
    )
    assert [f"tiers.high.lend: {said}{better}"] == _said(
        tmp_path, "{high: {reserve: 30%, lend: 0%}, normal: {reserve: 10%, lend: 10%}}"
    )


@each(
    ("timeouts", "said"),
    [
        ("first_byte: 600ms", []),
        ("first_byte: 500ms", ["first_byte of 500ms ends requests that the slo's ttft of 500ms still calls in time"]),
        ("first_byte: 2m, total: 1m", ["first_byte of 2m does nothing: total ends the request after 1m"]),
        ("between_bytes: 5m, total: 5m", ["between_bytes of 5m does nothing: total ends the request after 5m"]),
        ("total: 5m", []),
    ],
)
def test_a_timeout_that_breaks_a_promise_or_is_never_reached(tmp_path: Path, timeouts: str, said: list[str]) -> None:
    tiers = f"{{normal: {{slo: {{ttft: 500ms}}, timeouts: {{{timeouts}}}}}}}"
    found = _said(tmp_path, tiers)
    assert [one.partition("timeouts: ")[2].partition(";")[0] for one in found] == said, found


def test_a_pool_of_requests_alone_is_counted_in_requests(tmp_path: Path) -> None:
    (said,) = _said(tmp_path, "{high: {reserve: 30%, lend: 0%}, normal: {reserve: 10%}}", capacity="requests: 15")
    assert "4 requests (27% of the pool) stay unused" in said


@each(
    ("critical", "normal", "is_late"),
    [
        ("", "", True),
        (", lend: 0%", "", False),
        (", lend: 50%", "", False),
        (", preempt_after: 250ms", ", preemptible: true", False),
    ],
)
def test_an_emergency_tier_that_lends_all_and_takes_nothing_back_is_late(
    tmp_path: Path, critical: str, normal: str, is_late: bool
) -> None:
    tiers = (
        f"{{critical: {{reserve: 10%, limit: 50%, always_first: true{critical}}}, normal: {{reserve: 10%{normal}}}}}"
    )
    said = [one for one in _said(tmp_path, tiers) if "lends its whole reserve" in one]
    assert said == is_late * [
        "tiers.critical: lends its whole reserve and takes no room back: in a full pool it starts only when requests "
        "of others end; write preempt_after: 250ms here and preemptible: true in a less important tier, or lend: 0%"
    ]


def test_an_emergency_tier_without_a_reserve_was_promised_nothing(tmp_path: Path) -> None:
    assert _said(tmp_path, "{critical: {limit: 50%, always_first: true}, normal: {reserve: 20%}}") == []


def test_an_emergency_tier_beside_a_pool_of_an_unknown_size_is_late_too(tmp_path: Path) -> None:
    tiers = "{critical: {reserve: 10%, limit: 50%, always_first: true}, normal: {reserve: 10%}}"
    assert any("lends its whole reserve" in one for one in _said(tmp_path, tiers, capacity="from: engine"))


@each(
    ("normal", "aging", "largest"),
    [
        ("reserve: 10%", "", "400"),  # what the reserve of high leaves
        ("reserve: 10%", "aging: {promote_after: 1s, ceiling: high}\n", "400"),
        ("reserve: 0%", "", "700"),  # without a reserve of its own: what high does not keep free
        ("reserve: 0%", "aging: {promote_after: 1s, ceiling: high}\n", "1,000"),
    ],
)
def test_a_cap_above_the_size_limit(tmp_path: Path, normal: str, aging: str, largest: str) -> None:
    tiers = f"{{high: {{reserve: 60%, lend: 50%}}, normal: {{{normal}, max_request_tokens: 2k}}}}"
    (said,) = [one for one in _said(tmp_path, tiers, aging) if "max_request_tokens" in one]
    assert said == (
        f"tiers.normal.max_request_tokens: 2,000 is more than the tier's size limit of {largest} tokens: "
        f"a larger request gets a 400 at once; write {largest.replace(',', '')} or less, or leave this out"
    )


def test_a_tiers_own_limit_counts_too(tmp_path: Path) -> None:
    (said,) = _said(tmp_path, "{normal: {limit: 10%, max_request_tokens: 101}}")
    assert "101 is more than the tier's size limit of 100 tokens" in said


FIVE = "{a: {reserve: 10%}, b: {reserve: 10%}, c: {reserve: 10%}, normal: {reserve: 10%}, d: {reserve: 10%}}"


def test_reserves_that_are_more_than_the_pool_once_each_is_rounded_up(tmp_path: Path) -> None:
    said, *_ = _said(tmp_path, FIVE, capacity="tokens: 1000, requests: 4")
    assert said == (
        "tiers: the reserves need 5 requests, each rounded up, and the pool has 4: the floors of less important tiers "
        "are not certain; give fewer tiers a reserve, or smaller ones"
    )
    assert not any("rounded up" in line for line in _said(tmp_path, FIVE, capacity="tokens: 1000, requests: 5"))


def _first(limit: str, reserve: str = "10%") -> str:
    return f"critical: {{reserve: {reserve}, lend: 50%, limit: {limit}, always_first: true}}"


def test_an_emergency_that_takes_the_reserves_of_others(tmp_path: Path) -> None:
    (said,) = _said(tmp_path, f"{{{_first('99%', '5%')}, high: {{reserve: 20%}}, normal: {{reserve: 50%}}}}")
    assert said == (
        "tiers.critical.limit: while critical holds its limit of 99%, the reserves of high (20%) and normal (50%) are "
        "not certain; write limit: 30% or less, or reserve less"
    )
    assert _said(tmp_path, f"{{{_first('30%', '5%')}, high: {{reserve: 20%}}, normal: {{reserve: 50%}}}}") == []


def test_an_emergency_counts_in_requests_too(tmp_path: Path) -> None:
    tiers = f"{{{_first('40%')}, high: {{reserve: 30%}}, normal: {{reserve: 30%}}}}"
    assert _said(tmp_path, tiers) == []
    said, *_ = _said(tmp_path, tiers, capacity="tokens: 1000, requests: 5")  # 2 of 5, and 2 for each of the others
    assert "the reserves of high (30%) and normal (30%) are not certain; write limit: 20% or less" in said


@each(("reserve", "minutes"), [("10%", 8), ("5%", 18), ("0.1%", 949), ("0.01%", 1_000)])
def test_a_tier_that_accepts_many_reserves_says_how_long_it_owes(tmp_path: Path, reserve: str, minutes: int) -> None:
    tiers = f"{{high: {{reserve: 5%, max_request_tokens: 10k, limit: 20%}}, normal: {{reserve: {reserve}}}}}"
    (said,) = _said(tmp_path, tiers, capacity="tokens: 1M")
    assert said.startswith("tiers.normal: accepts requests of many times its reserve: one of 950,000 tokens held a ")
    assert f"keeps normal from its next turn for {minutes:,} minutes; write max_request_tokens, or raise" in said


def test_a_tier_of_eight_reserves_or_less_is_worth_no_warning(tmp_path: Path) -> None:
    tiers = "{high: {reserve: 20%}, normal: {reserve: 10%}}"
    assert _said(tmp_path, tiers, capacity="tokens: 1000") == []
    (said,) = _said(tmp_path, tiers.replace("20%", "19%"), capacity="tokens: 1000")
    assert "one of 810 tokens held a minute keeps normal from its next turn for 7 minutes" in said
    assert _said(tmp_path, tiers.replace("reserve: 10%", "reserve: 10%, max_request_tokens: 800")) == []


def test_what_a_tier_owes_counts_in_requests_too(tmp_path: Path) -> None:
    tiers = "{high: {reserve: 5%, limit: 20%}, normal: {reserve: 5%, max_request_tokens: 50}}"
    (said,) = _said(tmp_path, tiers, capacity="tokens: 1000, requests: 100")
    assert said.endswith(
        "one of 95 sequences held a minute keeps normal from its next turn for 18 minutes; raise the reserve"
    )


def test_a_pool_whose_size_the_engine_says_is_judged_in_shares(tmp_path: Path) -> None:
    tiers = "{high: {reserve: 5%, limit: 20%}, normal: {reserve: 5%}}"
    (said,) = _said(tmp_path, tiers, capacity="from: engine")
    assert "one of 95% of the pool held a minute keeps normal from its next turn for 18 minutes" in said


MODELS = """\
engines: {static: [{name: a, url: http://a}], capacity: {tokens: 1000}}
models: {llama: {cost: {output: 5}}}
"""


def _of_limits(folder: Path, lines: str, more: str = "") -> list[str]:
    size = "" if "engines" in more else "capacity: {tokens: 1000}\n"
    pool(
        folder,
        f"engine: vllm\n{size}tiers: {{normal: {{}}, low: {{reserve: 20%}}}}\ntenants: tenants/*.yaml\n{more}"
        + SOURCES,
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


def test_a_limit_is_compared_with_what_requests_count_for(tmp_path: Path) -> None:
    limits = "limits: {tokens_per_minute: 2000}"
    assert _of_limits(tmp_path, limits) == []
    (said,) = _of_limits(tmp_path, limits, "cost: {output: 4}\n")
    assert "counts for 2,048 and its prompt" in said
    assert _of_limits(tmp_path, limits, "cost: {input: 0, output: 0.5}\n") == []


def test_a_limit_at_a_model_that_there_is_not(tmp_path: Path) -> None:
    (said,) = _of_limits(tmp_path, "limits: {models: {lama: {tokens_per_minute: 50k}}}")
    assert "tenants.acme.limits.models.lama: limits nothing: the pool's file has no model of this name" in said
    (said,) = _of_limits(tmp_path, "limits: {models: {lama: {tokens_per_minute: 50k}}}", MODELS)
    assert said.endswith('did you mean "llama"?')
    (said,) = _of_limits(tmp_path, "limits: {models: {llama: {tokens_per_minute: 2000}}}", MODELS)
    assert "tenants.acme.limits.models.llama.tokens_per_minute: lets 2,000 tokens through" in said
    assert "counts for 2,560 and its prompt" in said
    assert (
        _of_limits(
            tmp_path, "limits: {models: {llama: {requests_per_minute: 1}}}\nover_limit: {downgrade: low}", MODELS
        )
        == []
    )


def test_limits_that_let_requests_through_are_worth_no_warning(tmp_path: Path) -> None:
    assert _of_limits(tmp_path, "limits: {tokens_per_minute: 600, max_output_tokens: 80, burst: 10s}") == []
    assert _of_limits(tmp_path, "limits: {requests_per_minute: 1}\nover_limit: {downgrade: low}") == []


def test_what_happens_over_limits_that_there_are_not(tmp_path: Path) -> None:
    (said,) = _of_limits(tmp_path, "limits: {max_output_tokens: 80}\nover_limit: {downgrade: low}")
    assert "tenants.acme.over_limit: does nothing without limits" in said


def test_preempting_and_being_preempted_each_need_the_other(tmp_path: Path) -> None:
    both = "{high: {reserve: 20%, preempt_after: 500ms}, normal: {reserve: 10%, preemptible: true}}"
    assert _said(tmp_path, both) == []
    (said,) = _said(tmp_path, "{high: {reserve: 20%, preempt_after: 500ms}, normal: {reserve: 10%}}")
    assert said.startswith("tiers.high.preempt_after: does nothing: no less important tier is preemptible; write ")
    (said,) = _said(tmp_path, "{high: {reserve: 20%}, normal: {reserve: 10%, preemptible: true}}")
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
    path = pool(tmp_path, f"engine: vllm\ncapacity: {{tokens: 1000}}\ntiers: {{normal: {{}}}}\n{SOURCES}")
    assert [warning.path for warning in warnings(load(path))] == ["tenants"]


ENGINES_NUMBERS = "tiers: {high: {reserve: 20%}, normal: {reserve: 10%}, batch: {reserve: 10%}}\nanonymous: normal\n"


@pytest.mark.parametrize(
    ("engine", "title", "levels"),
    [("vllm", "vLLM", "{high: -10, normal: 0, batch: 10}"), ("sglang", "SGLang", "{high: 10, normal: 0, batch: -10}")],
)
def test_an_engines_own_numbers_in_a_body_are_worth_a_warning_that_says_what_to_write(
    engine: str, title: str, levels: str, tmp_path: Path
) -> None:
    text = f"engine: {engine}\ncapacity: {{tokens: 1000, requests: 100}}\n{ENGINES_NUMBERS}"
    loaded = load_files(path := pool(tmp_path, text))
    assert [str(warning) for warning in warnings(loaded.policy, loaded.place)] == [
        f"{path}:1: engine: a number in a body's priority is read from 0 to 1: priority: 0 means the last tier, batch, "
        f"and 2 or more gets a 400, while {title} takes any whole number; where clients send its numbers, "
        f"write sources: [engine, body, header, endpoint, key] and engine_levels: {levels}"
    ]
    written = f"{text}sources: [engine, body, header, endpoint, key]\nengine_levels: {levels}\n"
    assert warnings(load(pool(tmp_path, written))) == ()


@each("engine", ["tensorrt-llm", "dynamo", "none"])
def test_an_engine_without_whole_numbers_in_the_body_is_worth_none(engine: str, tmp_path: Path) -> None:
    text = f"engine: {engine}\ncapacity: {{tokens: 1000, requests: 100}}\n{ENGINES_NUMBERS}"
    assert warnings(load(pool(tmp_path, text))) == ()


def test_unsized_requests_that_hold_a_tiers_size_limit_are_warned_of(tmp_path: Path) -> None:
    tiers = "{high: {reserve: 20%}, normal: {reserve: 10%, max_request_tokens: 100}, batch: {reserve: 10%}}"
    said = (
        "unsized: a request whose prompt cannot be sized holds its tier's size limit: in high 80% of the pool's "
        "tokens, so that few others run beside it; write max_request_tokens in high and batch"
    )
    assert _said(tmp_path, tiers, "unsized: hold\n") == [said]
    assert _said(tmp_path, tiers, "unsized: hold\n", capacity="from: engine") == [said]


def test_unsized_requests_with_a_bound_in_every_tier_are_not(tmp_path: Path) -> None:
    tiers = "{high: {reserve: 20%, max_request_tokens: 200}, normal: {reserve: 10%, max_request_tokens: 100}}"
    assert _said(tmp_path, tiers, "unsized: hold\n") == []
    assert _said(tmp_path, "{high: {reserve: 20%}, normal: {reserve: 10%}}", "unsized: refuse\n") == []
    no_tokens = _said(tmp_path, "{high: {reserve: 20%}, normal: {reserve: 10%}}", "unsized: hold\n", "requests: 100")
    assert no_tokens == []  # without a bound on tokens it holds none of them


UNREAD = "no one reads the engine's preemptions, so the quantile never rises; write from: engine, or learn: cautious"


@each(
    ("engine", "capacity", "said"),
    [
        ("vllm", "tokens: 1000, requests: 100, learn: full", UNREAD),
        ("vllm", "from: engine, tokens: 1000, requests: 100, learn: full", None),
        ("vllm", "tokens: 1000, requests: 100, learn: cautious", None),
        ("vllm", "tokens: 1000, requests: 100", None),
        (
            "tensorrt-llm",
            "from: engine, requests: 8, learn: full",
            "TensorRT-LLM reports no preemptions, so the quantile never rises; write learn: cautious",
        ),
        (
            "none",
            "tokens: 1000, requests: 100, learn: full",
            "the engine reports no preemptions, so the quantile never rises; write learn: cautious",
        ),
    ],
)
def test_full_trust_that_no_one_checks_is_worth_a_warning(
    tmp_path: Path, engine: str, capacity: str, said: str | None
) -> None:
    tiers = "{high: {reserve: 20%}, normal: {reserve: 10%}}"
    text = f"engine: {engine}\ncapacity: {{{capacity}}}\ntiers: {tiers}\nanonymous: normal\n{SOURCES}"
    loaded = load_files(pool(tmp_path, text))
    found = [str(warning) for warning in warnings(loaded.policy, loaded.place)]
    assert found == ([] if said is None else [f"{tmp_path}/policy.yaml:2: capacity.learn: {said}"])
