"""The control of `sidecar replay`, before an engine, and a sidecar with limits before that."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy.tenant_keys import hash_line
from tests.support.commands import command
from tests.support.in_process import emulated_engine, ran, served_sidecar

POLICY = """
engine: vllm
capacity: {requests: 8, tokens: 100k}
tiers:
  high: {reserve: 25%}
  batch: {reserve: 10%, limit: 50%, queue: {max_requests: 20, max_wait: 10s}}
default_tier: batch
anonymous: high
sources: [header, key]
tenants: tenants/*.yaml
"""
TENANT = """
tenant: %s
keys: ["%s"]
tier: %s
"""
KEYS = {tier: f"sk-{tier}-of-the-control-test" for tier in ("high", "batch")}


@dataclass
class Lab:
    """Addresses of the engine, and of the sidecar before it."""

    engine: str
    sidecar: str

    def replay(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`sidecar replay` of 120 requests at once."""
        return ran("replay", "burst:120:20:8", *arguments)


@contextmanager
def lab(folder: Path, policy: str = POLICY) -> Iterator[Lab]:
    """An emulated vLLM with eight places, and a sidecar in which batch has a limit and a queue bound."""
    (folder / "tenants").mkdir()
    (folder / "policy.yaml").write_text(policy)
    for tier, key in KEYS.items():
        (folder / "tenants" / f"{tier}.yaml").write_text(TENANT % (tier, hash_line(key), tier))
    emulated = ("--engine", "vllm", "--step-ms", "4", "--max-num-seqs", "8")
    with emulated_engine(*emulated) as engine, served_sidecar(folder, engine) as (sidecar, _):
        yield Lab(engine, sidecar)


ASKING = {
    "key": [argument for tier, key in KEYS.items() for argument in ("--key", f"{tier}={key}")],
    "tier": [],
}


def found_in(path: Path) -> Any:
    return json.loads(path.read_bytes())


@pytest.mark.parametrize(
    "by", [pytest.param("key", marks=pytest.mark.long), pytest.param("tier", marks=pytest.mark.soak)]
)
def test_the_control_serves_every_request_that_the_other_run_serves(by: str, tmp_path: Path) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    with lab(tmp_path) as it:
        ended = it.replay(
            "--upstream", it.sidecar, "--control-upstream", it.engine, "--by", by, *ASKING[by],
            "--mix", "high=100,batch=20", "--json", str(figures), "--report", str(page),
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = found_in(figures)
    assert [(run["name"], run["failed"]) for run in found["runs"]] == [("replay", 0), ("control", 0)]
    assert found["comparison"]["control_under_admission"] == 0
    counts = [(tier["requests"], tier["failed_in_control_alone"]) for tier in found["comparison"]["tiers"].values()]
    assert counts == [(100, 0), (20, 0)]
    told = "Failed of 120 requests: 0 in the replay alone, 0 in the control alone, 0 in both."
    assert told in ended.stdout
    assert told in page.read_text()
    assert f"control: all requests alike, at {it.engine} without admission control" in ended.stdout
    assert "sk-" not in ended.stdout + ended.stderr + page.read_text()


@pytest.mark.parametrize(
    "by", [pytest.param("tier", marks=pytest.mark.long), pytest.param("key", marks=pytest.mark.soak)]
)
def test_a_run_that_refuses_many_does_not_look_fast(by: str, tmp_path: Path) -> None:
    """Batch's 60 do not fit its bound of 20. The refused are in no percentile of the answered."""
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    with lab(tmp_path) as it:
        ended = it.replay(
            "--upstream", it.sidecar, "--control-upstream", it.engine, "--by", by, *ASKING[by],
            "--mix", "high=60,batch=60", "--json", str(figures), "--report", str(page),
        )  # fmt: skip
    assert ended.returncode == 1
    found = found_in(figures)
    replay, control = found["runs"]
    compared = found["comparison"]["tiers"]["batch"]
    failed = replay["tiers"]["batch"]["failed"]
    assert failed > 30
    assert (control["failed"], compared["failed_in_replay_alone"], compared["failed_in_control_alone"]) == (
        0,
        failed,
        0,
    )
    assert replay["tiers"]["batch"]["answered"] == 60 - failed
    assert replay["tiers"]["batch"]["ttft_s"]["p99"] is not None
    assert compared["replay_ttft_s"]["p99"] is compared["replay_ttft_s"]["p95"] is None
    assert compared["control_ttft_s"]["p99"] == control["tiers"]["batch"]["ttft_s"]["p99"]
    basis = f"Percentiles are of the {120 - failed} of 120 requests that were answered, and leave out the failed."
    sentence = "The replay failed more requests than the control, and had less to serve"
    for said in (ended.stdout, page.read_text()):
        assert said.count(basis) == 1
        assert f"Failed of 120 requests: {failed} in the replay alone, 0 in the control alone, 0 in both." in said
        assert sentence in said
        assert "never" in said
    assert f"{failed} of 120 in the replay (HTTP 503: queue_full: " in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].endswith("), 0 of 120 in the control")


@pytest.mark.long
@pytest.mark.parametrize(("by", "policy"), [
    ("key", POLICY.replace("anonymous: high", "anonymous: deny")),
    ("tier", POLICY),
])  # fmt: skip
def test_no_control_is_played_through_a_sidecar_that_enforces(by: str, policy: str, tmp_path: Path) -> None:
    with lab(tmp_path, policy) as it:
        for asked in (["--control"], ["--control-upstream", it.engine, "--control-upstream", it.sidecar]):
            mix = ("--mix", "high=100,batch=20")
            ended = it.replay("--upstream", it.sidecar, "--by", by, *ASKING[by], *mix, *asked)
            assert (ended.returncode, ended.stdout) == (2, "")
            [line] = ended.stderr.splitlines()
            option = asked[0]
            assert line.startswith(f"sidecar replay: {option}: {it.sidecar} enforces admission control: ")
            assert "write --control-upstream URL with the address of the engine itself" in line


@pytest.mark.long
def test_a_sidecar_that_observes_is_a_neutral_control(tmp_path: Path) -> None:
    with lab(tmp_path, f"mode: observe\n{POLICY}") as it:
        ended = it.replay("--upstream", it.sidecar, "--by", "tier", "--mix", "high=20,batch=100", "--control")
    assert ended.returncode == 0, ended.stderr
    assert "Failed of 120 requests: 0 in the replay alone, 0 in the control alone, 0 in both." in ended.stdout
    assert "NOT neutral" not in ended.stdout


@pytest.mark.long
def test_the_engines_own_priority_has_the_same_engine_as_its_control(tmp_path: Path) -> None:
    with lab(tmp_path) as it:
        ended = it.replay("--upstream", it.engine, "--by", "priority", "--mix", "high=60,batch=60", "--control")
    assert ended.returncode == 0, ended.stderr
    assert "\ncontrol: all requests alike\n" in ended.stdout


@pytest.mark.long
def test_a_control_that_cannot_be_played_is_reported_before_anything_is_sent(tmp_path: Path) -> None:
    with lab(tmp_path) as it:
        ended = it.replay("--upstream", it.sidecar, "--control-upstream", "http://127.0.0.1:9")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "http://127.0.0.1:9 cannot be reached" in ended.stderr


@pytest.mark.long
def test_a_control_that_comes_under_admission_while_it_runs_is_reported(tmp_path: Path) -> None:
    """The mode is changed after the check: no check before the run can see that."""
    with (
        lab(tmp_path, f"mode: observe\n{POLICY}") as it,
        command("replay", "burst:400:20:8", "--upstream", it.sidecar, "--mix", "high=400", "--control") as process,
    ):
        process.stdout.readline()  # the plan: the checks are over
        (tmp_path / "policy.yaml").write_text(POLICY)
        said = process.stdout.read()
    assert re.search(r"This control was NOT neutral: \d+ of its requests went through admission control.", said), said
