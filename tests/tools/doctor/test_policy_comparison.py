"""A policy against what an engine says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engines import Engine
from sidecar.engines.base import Facts, Gauges
from sidecar.engines.discovery import Identity
from sidecar.policy.compiler import load
from sidecar.policy.fleet import ModelAlias
from sidecar.policy.model import Policy
from sidecar.tools.doctor.conditions import is_before
from sidecar.tools.doctor.examination import Finding, compare, harm, sent
from sidecar.tools.doctor.survey import Survey
from tests.tools.emulator.emulated import SGLANG, TRTLLM, VLLM

TIERS = "tiers: {high: {}, normal: {}, low: {}}\n"


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return written(tmp_path, "engine: vllm\ncapacity: {tokens: 100k, requests: 50}\n")


def written(folder: Path, text: str) -> Policy:
    path = folder / "policy.yaml"
    path.write_text(text + TIERS)
    return load(path)


def survey(
    engine: type[Engine] = VLLM,
    version: str | None = "0.33.0",
    kv_tokens: int | None = None,
    max_running: int | None = None,
    **facts: object,
) -> Survey:
    known = Facts(version=version, **facts)  # type: ignore[arg-type]  # tests name what they mean
    gauges = Gauges(kv_tokens=kv_tokens, max_running=max_running)
    return Survey(Identity(engine, "/v1/models", "m"), engine, known, gauges)


def only(findings: object) -> Finding:
    (finding,) = findings
    return finding


def test_what_fits_is_not_mentioned(policy: Policy) -> None:
    assert compare(policy, survey(kv_tokens=100_000, max_running=50)) == []
    assert compare(None, survey()) == []


def test_another_engine_answers(policy: Policy) -> None:
    finding = only(compare(policy, survey(SGLANG, default_priority=0, by_priority=True)))
    assert finding.is_broken
    assert "`engine: vllm`, but sglang answers" in finding.text
    assert "`engine: sglang`" in finding.fix


def test_an_alias_of_a_model_that_the_engine_does_not_serve(policy: Policy) -> None:
    aliases = {"gpt-4o": ModelAlias("llama"), "o": ModelAlias("m")}
    seen = replace(survey(), identity=Identity(VLLM, "/v1/models", "m", models=("m", "my-lora")))
    finding = only(compare(replace(policy, aliases=aliases), seen))
    assert finding.text == "the alias gpt-4o is llama, which the engine does not serve: it lists m, my-lora"
    assert "`aliases: {gpt-4o: {as: NAME}}`" in finding.fix


def test_a_capacity_beyond_the_engines(policy: Policy) -> None:
    tokens, requests = compare(policy, survey(kv_tokens=80_000, max_running=40))
    assert "100,000, but the engine's KV cache holds 80,000" in tokens.text
    assert "`tokens: 76000`" in tokens.fix
    assert "50, but the engine runs 40" in requests.text


def test_a_header_that_this_version_does_not_read(tmp_path: Path, policy: Policy) -> None:
    finding = only(compare(policy, survey(version="0.27.1")))
    assert finding.is_broken
    assert "from 0.28.0 on, and this is 0.27.1" in finding.text
    by_body = written(tmp_path, "engine: vllm\nforward_priority: body\ncapacity: {requests: 50}\n")
    assert compare(by_body, survey(version="0.27.1")) == []


@pytest.mark.parametrize(("version", "breaks"), [("0.5.15", True), ("0.5.16", False)])
def test_sglangs_header(version: str, breaks: bool, tmp_path: Path) -> None:
    policy = written(tmp_path, "engine: sglang\nforward_priority: header\ncapacity: {requests: 50}\n")
    finding = only(compare(policy, survey(SGLANG, version)))
    assert finding.is_broken is breaks
    assert ("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1" in finding.fix) is not breaks


def test_sglang_that_would_throw_running_requests_out(tmp_path: Path) -> None:
    policy = written(tmp_path, "engine: sglang\ncapacity: {requests: 50}\n")
    finding = only(compare(policy, survey(SGLANG, by_priority=True, default_priority=0, preempts_beyond=3)))
    assert "span 4" in finding.text
    assert "--priority-scheduling-preemption-threshold 4" in finding.fix
    assert compare(policy, survey(SGLANG, by_priority=True, default_priority=0, preempts_beyond=4)) == []


def test_sglang_without_a_default_value() -> None:
    finding = only(compare(None, survey(SGLANG, by_priority=True, preempts_beyond=10)))
    assert "throws them out while they run" in finding.text
    assert finding.fix == "start SGLang with --default-priority-value 0"


@pytest.mark.parametrize(
    ("waiting", "default_priority", "preempts_beyond", "is_harmful"),
    [(3, None, 10, True), (0, None, 10, False), (3, 0, 10, False), (3, None, None, False)],
)
def test_a_probe_that_would_throw_requests_of_others_out(
    waiting: int, default_priority: int | None, preempts_beyond: int | None, is_harmful: bool
) -> None:
    found = survey(SGLANG, default_priority=default_priority, preempts_beyond=preempts_beyond)
    found = replace(found, gauges=Gauges(running=0, waiting=waiting))
    assert (harm(found) is not None) is is_harmful


def test_an_engine_that_gets_no_priority(tmp_path: Path) -> None:
    policy = written(tmp_path, "engine: none\ncapacity: {requests: 50}\n")
    assert "`engine: vllm`" in only(compare(policy, survey())).fix
    assert sent(policy) == "nothing: the policy's engine is none"


def test_what_the_ladder_sends(policy: Policy, tmp_path: Path) -> None:
    assert sent(policy) == "by header x-vllm-priority: high 0, normal 10, low 20"
    other = written(tmp_path, f"engine: {TRTLLM.name}\ncapacity: {{requests: 50}}\n")
    assert sent(other) == "by body field priority: high 1.0, normal 0.5, low 0.0"


@pytest.mark.parametrize(
    ("version", "other", "older"),
    [
        ("0.27.1", "0.28.0", True),
        ("0.28.0", "0.28.0", False),
        ("0.28.0rc1", "0.28.0", False),
        ("0.32.0+cpu", "0.28.0", False),
        ("0.9", "0.28.0", True),
        ("1.4.0rc1", "0.28.0", False),
        ("dev", "0.28.0", False),
        (None, "0.28.0", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str | None, other: str, older: bool) -> None:
    assert is_before(version, other) is older
