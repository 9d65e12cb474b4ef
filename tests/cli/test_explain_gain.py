"""`sidecar explain` of a policy with `order: gain`: the place of a request, as the scheduler would see it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.admission.request_gain import GainMeter
from sidecar.policy.compiler import load
from sidecar.scheduling.tickets import TicketGain
from tests.support.each import each
from tests.support.in_process import output
from tests.support.middleware import App, Caller, Guarded

POOL = """\
engine: vllm
capacity: {tokens: 100000, requests: 64}
order: gain
fair: 25%
tiers:
  critical: {always_first: true, limit: 50%, slo: {ttft: 1s, tpot: 60ms}, gain: {weight: 8}}
  high: {reserve: 20%, lend: 50%, slo: {ttft: 1s, tpot: 60ms}, gain: {weight: 4}}
  normal: {reserve: 0.04%, slo: {ttft: 3s, tpot: 100ms}, gain: {weight: 2}}
  batch: {}
default_tier: high
anonymous: critical
endpoints: {/v1/chat/completions: {}, /v1/embeddings: {}, /v1/responses: {}}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(POOL)
    return tmp_path


def explained(policy: Path, *arguments: str, path: str = "/v1/chat/completions") -> tuple[Any, str]:
    """The figures, and what is printed beside them."""
    target = policy / "result.json"
    printed = output("explain", policy, "--path", path, "--json", target, *arguments)
    return json.loads(target.read_text())["gain"], printed


def test_every_figure_and_rule_is_explained_to_a_stranger(policy: Path) -> None:
    out = output("explain", policy, "--path", "/v1/chat/completions", "--header", "x-priority: high")
    assert (
        out[out.index("4. ") : out.index("5. ")]
        == """\
4. Its place among requests that wait (order: gain)
   floor     tier high has 10,000 tokens and 6 requests (what it never lends of its reserve, 20%)
   promised  the first token within 1s, then one every 60ms
   expected  16 output tokens, the most that it may have, until lengths are learned; x weight 4 = 64
   costs     5.25 ms of the engine: 10 prompt x 125 us + 16 output x 250 us
   takes     20 ms and its prompt to a first token, then 25 ms for each; these four are defaults until they are measured
   density   761,904 for each second of the engine: weight x the part of its tokens in time
             by the tiers' own objectives it would have: critical 1,523,809, high 761,904, normal 380,952, batch none
   first     where it fits into what is free of its tier's floor, in fair order   (rule reserve)
   then      the highest density first; after it waited 0.98 s its density falls, for tokens
             would come late   (rule gain)
   last      after it waited 1.54 s, when no token can be in time; or while its tenant is ahead of the others of
             its tier by two of the largest requests: by level, in fair order   (rule level)

"""
    )


def test_an_order_by_level_has_no_such_step(policy: Path) -> None:
    (policy / "policy.yaml").write_text(POOL.replace("order: gain\nfair: 25%\n", ""))
    found, out = explained(policy)
    assert found is None
    assert "4. The priority sent to the engine" in out


def test_a_tier_that_is_always_first_is_said_to_be(policy: Path) -> None:
    found, out = explained(policy, "--header", "x-priority: critical")
    assert found["always_first"]
    assert "   tier critical is always first: before all that is ordered by gain" in out


def test_a_request_larger_than_its_floor_waits_for_a_turn(policy: Path) -> None:
    found, out = explained(policy, "--header", "x-priority: normal")
    assert found["floor"] == {
        "fair": 0.25, "reserve": 0.0004, "lend": 1.0, "part": 0.0001, "tokens": 10, "requests": 1, "fits": False,
    }  # fmt: skip
    said = "   first     while its tier's floor, which is smaller than it, is not full: by turns   (rule"
    assert said in out


def test_without_an_objective_a_request_is_last(policy: Path) -> None:
    found, out = explained(policy, "--header", "x-priority: batch")
    assert (found["earns"], found["weight"], found["floor"]["fits"]) == (None, None, False)
    assert "   floor     tier batch has none (fair 25% of its reserve, 0%)\n" in out
    assert "   last      by level, in fair order: its tier has no `slo` with both `ttft` and `tpot`" in out


def test_a_request_that_generates_nothing_earns_nothing(policy: Path) -> None:
    found, out = explained(policy, "--header", "x-priority: high", path="/v1/embeddings")
    assert found["earns"] is None
    assert set(found["densities"].values()) == {None}
    assert "last      by level, in fair order: it generates no tokens, or no one waits for them" in out


def test_headers_loosen_the_objective_and_never_tighten_it(policy: Path) -> None:
    headers = ("--header", "x-priority: high", "--header", "x-slo-ttft-ms: 2500", "--header", "x-slo-tpot-ms: 5")
    found, out = explained(policy, *headers)
    assert (found["ttft_s"], found["tpot_s"], found["ignored"]) == (2.5, 0.06, ["x-slo-tpot-ms"])
    said = "the first token within 2.5s, then one every 60ms, loosened by its headers; ignored: x-slo-tpot-ms"
    assert said in out


def test_a_pool_that_the_engine_sizes_has_parts_of_it(policy: Path) -> None:
    text = POOL.replace("{tokens: 100000, requests: 64}", "{from: engine}")
    (policy / "policy.yaml").write_text(text)
    found, out = explained(policy, "--header", "x-priority: high")
    assert (found["floor"]["tokens"], found["floor"]["part"]) == (None, 0.1)
    assert "tier high has 10% of the pool (what it never lends of its reserve, 20%)" in out


@each("tier", ["high", "normal", "batch"])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
        {"messages": [{"role": "user", "content": "word " * 2_000}], "max_tokens": 50, "n": 3},
        {"messages": [{"role": "user", "content": "word " * 9_000}]},
    ],
    ids=["small", "choices", "late"],
)
def test_the_figures_are_those_that_the_sidecar_gives_the_request(
    policy: Path, tier: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[TicketGain | None] = []
    appraise = GainMeter.appraise

    def spy(meter: GainMeter, request: Any, tier_names: Any) -> TicketGain | None:
        given.append(appraise(meter, request, tier_names))
        return given[-1]

    monkeypatch.setattr(GainMeter, "appraise", spy)
    (policy / "body.json").write_text(json.dumps({"model": "m", **body}))
    raw, headers = (policy / "body.json").read_bytes(), [(b"x-priority", tier.encode())]
    asyncio.run(Caller(Guarded(App(), load(policy)).sidecar, raw, headers=headers).run())
    found, _ = explained(policy, "--header", f"x-priority: {tier}", "--body", str(policy / "body.json"))
    figures, of_explain = given
    assert figures == of_explain
    assert (figures is None) == (found["earns"] is None) == (tier == "batch")
    if figures is not None:
        earns = found["earns"]
        assert (found["weight"], earns["output_tokens"]) == (figures.weight, figures.tokens)
        assert earns["density"] == figures.earned_after(0)
        nothing_after_us = round(earns["nothing_after_s"] * 1e6)
        assert figures.earned_after(nothing_after_us - 1) >= 0 == figures.earned_after(nothing_after_us)
