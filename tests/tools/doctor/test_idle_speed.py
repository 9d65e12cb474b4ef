"""The `slo` that the doctor proposes: twice what an idle engine does, as a policy takes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import yaml

from sidecar.policy.compiler import load
from sidecar.tools.doctor import burst, probe
from sidecar.tools.doctor.examination import Options, examine
from sidecar.tools.doctor.probe import IdleSpeed, measured, predicted, promise, recommended_slo
from sidecar.tools.doctor.report import figures, report
from sidecar.tools.loadgen import Planned, Seen
from sidecar.tools.step_model.model import EngineModel
from tests.support.each import each
from tests.tools.emulator.emulated import VLLM, emulated


def seen(ttft_s: float | None, tpot_s: float = 0.01, prompt_tokens: int | None = 1007) -> Seen:
    """An answer of 11 tokens."""
    first_s = None if ttft_s is None else 1 + ttft_s
    end_s = 1 + (ttft_s or 0) + 10 * tpot_s
    planned = Planned(0.0, "/v1/chat/completions", {}, b"{}")
    return Seen(planned, 1.0, first_s, end_s, 200, None, 11, prompt_tokens, {}, None, 0)


@each(
    ("speed", "said"),
    [
        (IdleSpeed(0.0583, 0.0069, 1007), "ttft: 120ms, tpot: 14ms, hold: 97%"),
        (IdleSpeed(0.05, 0.005, 1000), "ttft: 100ms, tpot: 10ms, hold: 97%"),
        (IdleSpeed(0.63, 0.1234, 1000), "ttft: 1.3s, tpot: 250ms, hold: 97%"),
        (IdleSpeed(0.0002, 0.0001, 1000), "ttft: 1ms, tpot: 1ms, hold: 97%"),
        (IdleSpeed(75, 2, 1000), "ttft: 150s, tpot: 4s, hold: 97%"),
    ],
)
def test_it_is_twice_what_was_measured_rounded_up_and_a_policy_takes_it(
    speed: IdleSpeed, said: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert promise(speed) == said
    found = recommended_slo(speed)
    assert f"{speed.prompt_tokens:,} tokens" in found.reason
    file = tmp_path_factory.mktemp("policy") / "policy.yaml"
    tiers = f"tiers: {{high: {{{found.yaml}}}, normal: {{}}}}"
    file.write_text(f"engine: vllm\ncapacity: {{requests: 8}}\nanonymous: high\n{tiers}\n")
    slo = load(file).tiers[0].slo
    assert slo.ttft_s >= 2 * speed.ttft_s


@each(
    ("alone", "speed"),
    [
        ([seen(0.05), seen(0.9, 0.02), seen(0.06, 0.011)], IdleSpeed(0.06, 0.011, 1007)),
        ([seen(0.05, prompt_tokens=None), seen(None, prompt_tokens=None)], IdleSpeed(0.05, 0.01, 1000)),
        ([seen(0.05, 0.0), seen(0.05, 0.000001)], None),
        ([seen(None)], None),
        ([], None),
    ],
)
def test_answers_that_show_no_speed_propose_nothing(alone: Sequence[Seen], speed: IdleSpeed | None) -> None:
    found = measured(alone)
    assert (found is None) == (speed is None)
    assert found is None or tuple(found) == pytest.approx(tuple(speed or ()))


def test_a_model_of_an_engine_predicts_it_by_its_steps() -> None:
    model = EngineModel(
        name="m",
        step_us=5_000,
        step_us_per_sequence=100,
        step_us_per_prefill_token=20,
        kv_tokens=9999,
        chunk_tokens=512,
    )
    expected = IdleSpeed(0.003 + 2 * 0.0051 + 0.02, 0.0051, 1000)
    assert tuple(predicted(model, outside_us=3_000)) == pytest.approx(tuple(expected))


@pytest.mark.anyio
async def test_an_idle_engine_is_measured_and_the_line_is_ready_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "GOAL_S", 0.25)
    monkeypatch.setattr(burst, "WATCH_EVERY_S", 0.04)
    async with emulated(VLLM, slots=4) as client:
        found = await examine(Options(url=client.url, headers={}, allowed_s=20.0), lambda line: None)
    text = report(found)
    assert f"slo for an interactive tier\n  {found.slo.yaml}\n  # twice what the idle engine takes: " in text
    assert set(yaml.safe_load(found.slo.yaml)["slo"]) == {"ttft", "tpot", "hold"}
    assert figures(found)["slo"] == found.slo
