"""`sidecar explain` of a policy with a tier whose SLO is held: what that leaves to a request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.each import each
from tests.support.in_process import output

POOL = """\
engine: vllm
capacity: {tokens: 100000, requests: 64}
tiers:
  critical: {always_first: true, limit: 50%}
  chat: {reserve: 20%, slo: {ttft: 500ms, tpot: 40ms, hold: 97%}}
  normal: {reserve: 5%}
  batch: {}
default_tier: batch
anonymous: critical
endpoints: {/v1/chat/completions: {}}
"""
TITLE = "How full it may make the pool (hold)"
PROMISE = "97% of chat within 500ms to the first token and 40ms between tokens"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(POOL)
    return tmp_path


def printed(policy: Path, tier: str, *more: object) -> str:
    return output("explain", policy, "--path", "/v1/chat/completions", "--header", f"x-priority: {tier}", *more)


@each(
    ("tier", "lines"),
    [
        (
            "normal",
            [
                "beyond its reserve it may fill the pool to 10% at first, or run alone of such work",
                f"that share moves with the SLO of chat: {PROMISE}",
            ],
        ),
        (
            "batch",
            [
                "it has no reserve, so it may fill the pool to 10% at first, or run alone of such work",
                f"that share moves with the SLO of chat: {PROMISE}",
            ],
        ),
        (
            "chat",
            [
                f"its own tier is held to its SLO: {PROMISE}",
                "beyond their reserves, less important tiers may fill the pool to 10% at first; that share moves with "
                "the SLO of chat",
            ],
        ),
    ],
)
def test_the_rule_is_explained_to_a_stranger(tier: str, lines: list[str], policy: Path) -> None:
    said = printed(policy, tier).split(f"{TITLE}\n")[1].split("\n\n")[0]
    assert said == "\n".join(f"   {line}" for line in lines)


def test_a_tier_that_nothing_holds_back_has_no_such_step(policy: Path) -> None:
    assert TITLE not in printed(policy, "critical")
    (policy / "policy.yaml").write_text(POOL.replace(", hold: 97%", ""))
    assert TITLE not in printed(policy, "batch")


def test_the_figures_are_there_as_json(policy: Path) -> None:
    target = policy / "result.json"
    printed(policy, "batch", "--json", target)
    (guard,) = json.loads(target.read_text())["guards"]["tiers"]
    assert guard == {"tier": "chat", "is_own": False, "share": 0.1, "ttft_s": 0.5, "tpot_s": 0.04, "hold": 0.97}
