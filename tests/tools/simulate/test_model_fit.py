"""The fit of an engine model: to times that a known model made, with noise, outliers and limits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from sidecar.engines import Vllm
from sidecar.engines.base import Facts, Gauges
from sidecar.engines.discovery import Identity
from sidecar.tools.doctor.speed_probe import BATCHES, PROMPTS, SpeedProbe
from sidecar.tools.doctor.survey import Survey
from sidecar.tools.doctor.target import ExaminedServer
from sidecar.tools.loadgen import Planned, Seen, most_at_once
from sidecar.tools.simulate.model_fit import as_yaml, fit, max_sequences, predicted, report, step_times
from sidecar.tools.step_model.model import EngineModel, load_model, shipped

OUTSIDE_S = 0.003
TRUE = EngineModel(
    name="true",
    step_us=9_000.0,
    step_us_per_sequence=90.0,
    step_us_per_prefill_token=30.0,
    kv_tokens=200_000,
    chunk_tokens=2_048,
)


def seen(prompt: int, output: int, label: int, ttft_s: float = 0.0, tpot_s: float = 0.0) -> Seen:
    planned = Planned(0.0, "/v1/chat/completions", {}, b"", label=str(label))
    end_s = ttft_s + tpot_s * (output - 1)
    return Seen(planned, 0.0, ttft_s, end_s, 200, None, output, prompt, {}, None, 0)


def made(model: EngineModel, outside_s: float, plan: Sequence[Seen]) -> list[Seen]:
    """What the plan's requests see at an engine like the model, when they are sent at once."""
    times = predicted(model, plan)
    return [
        seen(one.prompt_tokens or 0, one.output_tokens, int(one.planned.label), (ttft_s or 0) + outside_s, tpot_s or 0)
        for one, (ttft_s, tpot_s) in zip(plan, times, strict=True)
    ]


def prompts(model: EngineModel, outside_s: float = OUTSIDE_S) -> list[Seen]:
    return [one for length in PROMPTS * 3 for one in made(model, outside_s, [seen(length, 2, length)])]


def batches(model: EngineModel, outside_s: float = OUTSIDE_S) -> list[list[Seen]]:
    return [made(model, outside_s, [seen(32, 32, size)] * size) for size in BATCHES * 2]


def probe(model: EngineModel, gauges: Gauges) -> SpeedProbe:
    read = Survey(Identity(Vllm, "/version", "true"), Vllm, Facts(), gauges)
    return SpeedProbe(read, ExaminedServer("http://engine", "true", {}), prompts(model), batches(model))


def test_a_known_model_is_found_again() -> None:
    found = step_times(prompts(TRUE), batches(TRUE))
    assert found.step_us == pytest.approx(9_000, rel=0.02)
    assert found.step_us_per_sequence == pytest.approx(90, rel=0.05)
    assert found.step_us_per_prefill_token == pytest.approx(30, rel=0.02)
    assert found.outside_us == pytest.approx(3_000, rel=0.1)
    assert (found.chunk_tokens, found.is_chunk_seen) == (2_048, True)


@pytest.mark.parametrize("name", shipped())
def test_models_that_ship_are_found_again(name: str) -> None:
    model = load_model(name)
    found = step_times(prompts(model), batches(model))
    assert found.step_us == pytest.approx(model.step_us, rel=0.03)
    assert found.step_us_per_prefill_token == pytest.approx(model.step_us_per_prefill_token, rel=0.05)


@pytest.mark.parametrize("chunk", [512, 1_024, 2_048])
def test_the_chunk_is_seen_in_the_times_of_long_prompts(chunk: int) -> None:
    model = EngineModel(name="m", step_us=9_000.0, step_us_per_prefill_token=30.0, kv_tokens=9_999, chunk_tokens=chunk)
    found = step_times(prompts(model), batches(model))
    assert (found.chunk_tokens, found.is_chunk_seen) == (chunk, True)


def test_a_chunk_is_seen_where_steps_with_prompts_are_dearer() -> None:
    dear = [seen(length, 2, length, 0.005 + -(-length // 512) * 0.017 + length * 2e-5) for length in PROMPTS * 3]
    found = step_times(dear, batches(EngineModel(name="m", step_us=6_000.0, kv_tokens=200_000)))
    assert (found.chunk_tokens, found.is_chunk_seen) == (512, True)


def test_no_chunk_is_claimed_where_every_prompt_took_one_step() -> None:
    model = EngineModel(name="m", step_us=9_000.0, step_us_per_prefill_token=30.0, kv_tokens=9_999, chunk_tokens=8_192)
    found = step_times(prompts(model), batches(model))
    assert (found.chunk_tokens, found.is_chunk_seen) == (4_096, False)
    assert found.step_us_per_prefill_token == pytest.approx(30, rel=0.02)


def test_the_default_chunk_stays_where_a_step_costs_too_little_to_see_it() -> None:
    model = EngineModel(name="m", step_us=5.0, step_us_per_prefill_token=30.0, kv_tokens=9_999, chunk_tokens=512)
    noise = random.Random(1)
    noisy = [
        seen(one.prompt_tokens or 0, 2, int(one.planned.label), (one.ttft_s or 0) + noise.uniform(0, 0.002))
        for one in prompts(model)
    ]
    found = step_times(noisy, batches(model))
    assert (found.chunk_tokens, found.is_chunk_seen) == (2_048, False)


def test_one_measurement_in_five_may_be_wrong_by_any_amount() -> None:
    lone, sent = prompts(TRUE), batches(TRUE)
    wrong = random.Random(2)
    for index in wrong.sample(range(len(lone)), len(lone) // 5):
        lone[index] = seen(lone[index].prompt_tokens or 0, 2, int(lone[index].planned.label), 9.0)
    sent[1] = [seen(32, 32, 4, 0.02, 1.5)] * 4
    found = step_times(lone, sent)
    assert found.step_us == pytest.approx(9_000, rel=0.1)
    assert found.step_us_per_prefill_token == pytest.approx(30, rel=0.15)


def test_of_an_engine_with_costly_attention_prompts_of_the_middle_lengths_are_right() -> None:
    bent = [seen(length, 2, length, 0.009 + length * 5e-5 + length**2 * 1e-8) for length in PROMPTS * 3]
    flat = EngineModel(name="m", step_us=9_000.0, kv_tokens=200_000)
    found = step_times(bent, batches(flat, 0.0))
    assert found.outside_us == 0
    for one in bent:
        if 400 < (one.prompt_tokens or 0) < 2_048:
            predicted_us = found.step_us + found.step_us_per_prefill_token * (one.prompt_tokens or 0)
            assert predicted_us == pytest.approx((one.ttft_s or 0) * 1e6, rel=0.15)


def test_no_coefficient_is_negative() -> None:
    shrinking = [seen(length, 2, length, 1 - length / 10_000) for length in PROMPTS]
    faster = [[seen(32, 32, size, 0.01, 0.05 / size)] * size for size in BATCHES]
    found = step_times(shrinking, faster)
    assert min(found[:4]) >= 0


def test_a_batch_of_one_size_gives_a_step_and_no_time_per_sequence() -> None:
    found = step_times(prompts(TRUE), batches(TRUE)[:1])
    assert found.step_us == pytest.approx(9_090, rel=0.01)
    assert found.step_us_per_sequence == 0


def test_cached_tokens_cost_nothing() -> None:
    cached = [
        Seen(one.planned, 0.0, one.first_token_s, one.end_s, 200, None, 2, one.prompt_tokens + 500, {}, None, 0, 500)
        for one in prompts(TRUE)
        if one.prompt_tokens is not None
    ]
    assert step_times(cached, batches(TRUE)) == step_times(prompts(TRUE), batches(TRUE))


def test_sizes_are_the_engines_own_then_what_ran_at_once_then_a_stated_default() -> None:
    assert max_sequences(Gauges(max_running=48), batches(TRUE)) == (48, "the engine says so")
    narrow = EngineModel(name="m", step_us=9_000.0, kv_tokens=200_000, max_sequences=8)
    assert most_at_once(batches(narrow)[3]) == 8
    assert max_sequences(Gauges(), batches(narrow)) == (8, "as many of 64 ran at once")
    assert max_sequences(Gauges(), batches(TRUE))[0] == 256
    assert "a default" in max_sequences(Gauges(), batches(TRUE))[1]


def test_the_file_is_a_model_with_its_origin_and_the_reasons_for_its_sizes(tmp_path: Path) -> None:
    sent = probe(TRUE, Gauges(kv_tokens=200_000))
    fitted = fit(sent)
    path = tmp_path / "engine.yaml"
    path.write_text(as_yaml(fitted, sent, "2026-11-23"))
    assert load_model(str(path)) == fitted.model
    assert yaml.safe_load(path.read_text())["name"] == "true"
    assert "kv_tokens: 200000  # the engine says so\n" in path.read_text()
    assert "max_sequences: 256  # a default" in path.read_text()
    assert fitted.ttft_outside.p50 < 0.01 < fitted.ttft.p50
    assert fitted.tpot.p90 < 0.02
    said = report(fitted, sent)
    assert "each prompt token in it      0.030 ms" in said
    assert f"how well it predicts the {sent.requests} requests of the probe" in said


def test_a_kv_cache_of_unknown_size_is_a_stated_default() -> None:
    fitted = fit(probe(TRUE, Gauges(max_running=10)))
    assert fitted.model.kv_tokens == 20_480
    assert fitted.reasons["kv_tokens"] == "not reported: 2,048 a sequence"


@pytest.mark.parametrize("name", ['a"b\nstep_us: 1', "mistral: {x}", "# none", "é"])
def test_a_models_name_cannot_change_the_file(name: str, tmp_path: Path) -> None:
    sent = probe(TRUE, Gauges())
    sent.target = ExaminedServer("http://engine", name, {})
    path = tmp_path / "engine.yaml"
    path.write_text(as_yaml(fit(sent), sent, "2026-11-23"), encoding="utf-8")
    assert load_model(str(path)).name == name
