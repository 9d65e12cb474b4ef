"""`sidecar doctor --engine-model`: a real emulator process with known coefficients, and servers that show no speed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.cli import main
from sidecar.policy.compiler import load
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.doctor import speed_probe
from sidecar.tools.doctor.examination import Options
from sidecar.tools.doctor.speed_probe import SpeedProbe, measure
from sidecar.tools.doctor.survey import CannotLook
from sidecar.tools.doctor.target import ExaminedServer
from sidecar.tools.emulator import StepModel
from sidecar.tools.emulator.faults import read_fault
from sidecar.tools.loadgen import Seen, play
from sidecar.tools.simulate.model_fit import fit, predicted
from sidecar.tools.step_model.model import EngineModel, load_model
from tests.support.commands import address, command
from tests.support.http import fetch
from tests.support.in_process import complaint, emulated_engine, ran
from tests.support.serving import serving
from tests.tools.doctor.between import Edit, between, drops_member
from tests.tools.emulator.emulated import VLLM, emulated

STEP_MS, SEQUENCE_MS, PREFILL_MS = 20.0, 0.5, 0.05
KNOWN = (
    *("--engine", "vllm", "--step-ms", str(STEP_MS), "--step-ms-per-seq", str(SEQUENCE_MS)),
    *("--step-ms-per-prefill-token", str(PREFILL_MS), "--prefill-tokens-per-step", "1024"),
    *("--max-num-seqs", "24", "--kv-tokens", "120000", "--enable-prefix-caching"),
)
TOLERANCE = 0.2
"""Of the median time to first token and per token of a load that the fit did not see, beside other tests' load."""


@pytest.mark.long
@pytest.mark.alone
def test_the_model_of_an_engine_with_known_coefficients_predicts_another_load(tmp_path: Path) -> None:
    file, figures = tmp_path / "engine.yaml", tmp_path / "figures.json"
    with command("emulate", "--port", "0", *KNOWN) as engine:  # a process of its own: what it measures is real time
        url = address(engine)
        ended = ran("doctor", "--upstream", url, "--engine-model", str(file), "--json", str(figures))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        seen = asyncio.run(_other_load(url))
    assert (
        "will send at most 197 streamed requests, at most 64 at once, with about 39,782 tokens of pro" in ended.stderr
    )
    assert "how well it predicts the 194 requests of the probe" in ended.stdout
    assert f"written to {file}: sidecar simulate TRACE POLICY --engine-model {file}, sidecar init" in ended.stdout
    assert re.search(
        r"^slo for an interactive tier\n  slo: \{ttft: \w+, tpot: \w+, hold: 97%\}\n  # ", ended.stdout, re.MULTILINE
    )
    model = load_model(str(file))
    assert model.step_us == pytest.approx(STEP_MS * 1e3, rel=0.1)
    assert model.step_us_per_sequence == pytest.approx(SEQUENCE_MS * 1e3, rel=0.3)
    assert model.step_us_per_prefill_token == pytest.approx(PREFILL_MS * 1e3, rel=0.15)
    assert (model.kv_tokens, model.max_sequences, model.chunk_tokens) == (120_000, 24, 1_024)
    found = json.loads(figures.read_text())
    assert found["errors"]["ttft_outside"]["p50"] < 0.1
    assert found["errors"]["tpot"]["p50"] < 0.1
    ttft, tpot = _error(load_model(str(file)), seen)
    assert ttft < TOLERANCE
    assert tpot < TOLERANCE
    slow = msgspec.structs.replace(load_model(str(file)), step_us=2 * STEP_MS * 1e3)
    assert min(_error(slow, seen)) > TOLERANCE


async def _other_load(url: str) -> Sequence[Seen]:
    """Sixty requests of other lengths within four seconds: more than run at once."""
    target, chance = ExaminedServer(url, "emulated", {}), random.Random(7)
    planned = []
    for number in range(60):
        usage: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
        text = "word " * chance.randint(50, 1_000)
        one = target.request(f"other.{number}", chance.randint(20, 60), usage, text=text)
        planned.append(type(one)(chance.uniform(0, 4), one.path, one.headers, one.body))
    return await play([url], planned, timeout_s=60)


def _error(model: EngineModel, seen: Sequence[Seen]) -> tuple[float, float]:
    """The relative errors of the predicted medians."""
    times = predicted(model, seen)
    medians = [statistics.median(one for one in column if one is not None) for column in zip(*times, strict=True)]
    ttft_s = statistics.median(one.ttft_s or 0.0 for one in seen)
    tpot_s = statistics.median(one.tpot_s or 0.0 for one in seen)
    return abs(medians[0] / ttft_s - 1), abs(medians[1] / tpot_s - 1)


@pytest.mark.long
def test_what_it_measured_once_is_in_no_prefix_cache_the_next_time(tmp_path: Path) -> None:
    arguments = ("--engine-model", str(tmp_path / "engine.yaml"), "--requests", "8")
    with emulated_engine("--engine", "vllm", "--max-num-seqs", "8", "--step-ms", "2", "--enable-prefix-caching") as url:

        def hits() -> float:
            return fetch(f"{url}/metrics").total("vllm:prefix_cache_hits_total")

        for _ in range(2):
            ended = ran("doctor", "--upstream", url, *arguments)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        assert hits() == 0
        for _ in range(2):  # the control: what comes again is in it
            fetch(f"{url}/v1/completions", {"model": "emulated", "max_tokens": 1, "prompt": "word " * 500})
        assert hits() > 0


@pytest.mark.long
def test_simulate_takes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, trace, policy = tmp_path / "engine.yaml", tmp_path / "trace.jsonl", tmp_path / "policy.yaml"
    rows = [{"timestamp": 100 * n, "input_length": 200, "output_length": 20} for n in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    policy.write_text(
        "engine: vllm\ncapacity: {tokens: 4000}\ntiers: {high: {}}\ndefault_tier: high\nanonymous: high\n"
    )
    with emulated_engine("--engine", "sglang", "--max-num-seqs", "8", "--step-ms", "2") as url:
        ended = ran("doctor", "--upstream", url, "--engine-model", str(file), "--requests", "8")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    arguments = ["--policy", str(policy), "--engine-model", str(file), "--seeds", "1"]
    assert main(["simulate", str(trace), *arguments]) == 0, capsys.readouterr().err
    assert "emulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "policies/"], "--engine-model is of one engine: give --upstream URL"),
        (["--upstream", "http://e", "--read-only"], "--read-only does not go with --engine-model"),
        (["--upstream", "http://e", "--policy", "policies/"], "--policy does not go with --engine-model"),
        (["--upstream", "http://e", "--json", "engine.yaml"], "write to the same file: give two"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: list[str], said: str) -> None:
    assert said in complaint("doctor", "--engine-model", "engine.yaml", *arguments, code=2)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("no/such/folder.yaml", "cannot write no/such/folder.yaml: No such file or directory"),
        ("llama-3.1-8b-h100", "llama-3.1-8b-h100 is the name of a model that ships"),
    ],
)
def test_a_file_that_cannot_be_used_is_found_out_before_anything_is_sent(file: str, said: str) -> None:
    assert said in complaint("doctor", "--upstream", "http://127.0.0.1:9", "--engine-model", file, code=2)


def test_a_probe_that_fails_leaves_no_file_and_keeps_one_that_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("name: old\n")
    for file in (old, new):
        assert main(["doctor", "--upstream", "http://127.0.0.1:9", "--engine-model", str(file)]) == 2
    assert "cannot reach http://127.0.0.1:9" in capsys.readouterr().err
    assert old.read_text() == "name: old\n"
    assert not new.exists()


async def measured(url: str, **options: Any) -> SpeedProbe:
    options.setdefault("allowed_s", 20.0)
    return await measure(Options(url=url, headers={}, **options), lambda line: None)


def _whole(headers: dict[bytes, bytes], body: dict[str, Any]) -> None:
    del headers
    body["stream"] = False
    body.pop("stream_options", None)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_whole, "the answer does not stream"),
        (drops_member("stream_options"), "the stream has no usage, so its tokens cannot be counted"),
    ],
    ids=["no stream", "no usage"],
)
async def test_an_engine_that_shows_no_speed_is_said_to(edit: Edit, said: str) -> None:
    async with emulated(VLLM, slots=4) as client, between(client.url, edit=edit) as url:
        with pytest.raises(CannotLook, match=said):
            await measured(url)


@pytest.mark.anyio
async def test_an_engine_that_refuses_is_said_to() -> None:
    async with emulated(VLLM, slots=4, faults=(read_fault("refuse,status=401"),)) as client:
        with pytest.raises(CannotLook, match=r"HTTP 401.*give a key"):
            await measured(client.url)


@pytest.mark.anyio
async def test_an_engine_that_refuses_most_batches_gave_too_few_measurements() -> None:
    async with emulated(VLLM, slots=1, max_queued=1) as client:
        with pytest.raises(CannotLook, match=r"batches of 1 sizes .* 2 are needed; a request was not answered: HTTP 5"):
            await measured(client.url)


@pytest.mark.anyio
async def test_a_probe_without_time_gave_too_few_measurements() -> None:
    steps = StepModel(max_sequences=4, step_us=20_000, step_us_per_prefill_token=2_000)
    async with emulated(VLLM, steps=steps) as client:
        with pytest.raises(CannotLook, match=r"prompts of \d lengths .* 3 are needed; allow more time with --timeout"):
            await measured(client.url, allowed_s=4.0)


@pytest.mark.anyio
async def test_a_stream_that_comes_all_at_once_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_probe, "AT_ONCE_S", 1.0)
    async with emulated(VLLM, slots=4) as client:
        with pytest.raises(CannotLook, match="32 tokens of an answer came all at once"):
            await measured(client.url)


@pytest.mark.anyio
async def test_a_sidecar_is_not_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("engine: vllm\ncapacity: {requests: 4}\ntiers: {high: {}}\ndefault_tier: high\nanonymous: high\n")
    async with emulated(VLLM, slots=4) as client:
        app = AdmissionMiddleware(ReverseProxy(client.url), policy=load(path))
        async with serving(app) as served:
            with pytest.raises(CannotLook, match=r"is an admission sidecar.*give the address of its engine"):
                await measured(served.url)


@pytest.mark.anyio
async def test_prompts_are_no_longer_than_the_model_takes() -> None:
    async with emulated(VLLM, slots=4, context_tokens=600) as client:
        probe = await measured(client.url, most=4)
    assert not probe.failed
    assert max(one.prompt_tokens or 0 for one in probe.lone) < 600
    assert fit(probe).model.max_sequences == 256
    assert probe.sizes == [1, 4]
