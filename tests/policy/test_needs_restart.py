"""What can replace a policy that runs, and what is kept out until the next start."""

from __future__ import annotations

from pathlib import Path

import pytest
from sidecar.policy.compiler import load

from sidecar.policy.diff import needs_restart

BASE = """\
engine: vllm
forward_priority: body
capacity: {tokens: 100k, requests: 4}
tiers: {high: {reserve: 20%}, batch: {}}
default_tier: batch
anonymous: batch
"""


def keys(folder: Path, before: str, after: str) -> list[str]:
    assert before in BASE
    (folder / "policy.yaml").write_text(BASE)
    running = load(folder)
    (folder / "policy.yaml").write_text(BASE.replace(before, after))
    return needs_restart(running, load(folder))


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("engine: vllm", "engine: sglang", "engine"),
        ("forward_priority: body\n", "", "forward_priority"),
        ("{tokens: 100k, requests: 4}", "{from: engine}", "capacity.from"),
        ("batch: {}}", "batch: {}, low: {}}", "tiers (their names and order)"),
        ("{high: {reserve: 20%}, batch: {}}", "{batch: {}, high: {reserve: 20%}}", "tiers (their names and order)"),
        ("engine: vllm", "engine: vllm\nstore: redis://127.0.0.1:6379/0", "store"),
        ("engine: vllm", "engine: vllm\npool: chat", "pool"),
        ("engine: vllm", "engine: vllm\non_store_loss: closed", "on_store_loss"),
        ("engine: vllm", "engine: vllm\ntokenizer: policy.yaml", "tokenizer"),
    ],
)
def test_what_the_process_was_built_with_needs_a_restart(tmp_path: Path, before: str, after: str, key: str) -> None:
    assert keys(tmp_path, before, after) == [key]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("reserve: 20%", "reserve: 60%"),
        ("batch: {}", "batch: {limit: 50%, queue: {max_requests: 3}, preemptible: true}"),
        ("{tokens: 100k, requests: 4}", "{requests: 40}"),
        ("engine: vllm", "engine: vllm\naging: {promote_after: 1m, ceiling: high}"),
        ("engine: vllm", "engine: vllm\nmode: observe\nkeep_alive: 15s\nmax_body: 1MiB\nbody_timeout: 1s"),
        ("anonymous: batch", "anonymous: deny\nendpoints: {/v1/completions: {}}\nsources: [key]"),
    ],
)
def test_everything_else_can_be_replaced(tmp_path: Path, before: str, after: str) -> None:
    assert keys(tmp_path, before, after) == []


def test_every_key_is_named(tmp_path: Path) -> None:
    found = keys(
        tmp_path, BASE, BASE.replace("vllm", "sglang").replace("{high: {reserve: 20%}, batch: {}}", "{batch: {}}")
    )
    assert found == ["engine", "tiers (their names and order)"]
