"""`sidecar simulate`, through the command: its figures, its determinism, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.admission.policy_snapshot import objective_for
from sidecar.cli import main
from sidecar.policy.compiler import load as load_policy
from sidecar.tools.replay.trace import read_trace
from sidecar.tools.simulate.baselines import ROUTERS, names
from sidecar.tools.simulate.figures import judged, result
from sidecar.tools.simulate.load import Assign, load
from sidecar.tools.simulate.play import ABANDONED, Played, SimulatedEngines, VirtualLoop, play
from sidecar.tools.simulate.product import ProductAdmission
from sidecar.tools.step_model.model import load_model
from sidecar.tools.step_model.queue import KeyQueue
from tests.support.in_process import complaint, output

POLICY = """\
engine: vllm
capacity: {tokens: 4000, requests: 16}
tiers:
  high: {reserve: 20%, preempt_after: 20ms, slo: {ttft: 500ms, tpot: 30ms}, gain: {weight: 4}}
  batch: {reserve: 5%, preemptible: true, slo: {ttft: 2s, tpot: 100ms}, QUEUE}
default_tier: high
anonymous: high
endpoints: {/v1/chat/completions: {}}
"""
MODEL = """\
name: small
step_us: 5000
step_us_per_sequence: 300
step_us_per_prefill_token: 20
kv_tokens: 4000
max_sequences: 16
chunk_tokens: 256
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "policy.yaml").write_text(POLICY.replace("QUEUE", "queue: {max_wait: 3s, max_requests: 40}"))
    (tmp_path / "planned").mkdir()
    (tmp_path / "planned" / "policy.yaml").write_text(POLICY.replace(", QUEUE", "").replace("20%", "60%"))
    (tmp_path / "half").mkdir()
    half = POLICY.replace("slo: {ttft: 2s, tpot: 100ms}, QUEUE", "limit: 90%")
    (tmp_path / "half" / "policy.yaml").write_text(half)
    (tmp_path / "model.yaml").write_text(MODEL)
    gold = {"timestamp": 0, "input_length": 9, "output_length": 2, "priority": "gold"}
    (tmp_path / "gold.jsonl").write_text(json.dumps(gold))
    rows = [
        {"timestamp": 37 * n, "input_length": 200 + n % 7 * 90, "output_length": 20 + n % 11 * 9} for n in range(150)
    ]
    rows += [{"timestamp": 2000, "input_length": 5000, "output_length": 5}]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def simulate(folder: Path, *more: str) -> Any:
    return simulated(folder, *more)[0]


def simulated(folder: Path, *more: str) -> tuple[Any, str]:
    """The figures, and what is printed beside them."""
    target = folder / "figures.json"
    args = (folder / "trace.jsonl", "--policy", folder / "now", "--engine-model", folder / "model.yaml")
    out = output("simulate", *args, "--mix", "high=30,batch=70", "--json", target, *more)
    return json.loads(target.read_text()), out


@pytest.mark.parametrize("engines", [1, 3])
def test_every_request_has_one_end_and_the_same_seed_gives_the_same_figures(folder: Path, engines: int) -> None:
    more = ("--engines", str(engines), "--seeds", "2", "--baselines", "--scale", "2")
    found = simulate(folder, "--policy", str(folder / "planned"), *more)
    assert found == simulate(folder, "--policy", str(folder / "planned"), *more)
    runs = found["runs"]
    assert [one["policy"] for one in runs[::2]] == ["now", "planned", *names(engines)]
    assert [one["seed"] for one in runs] == [1, 2] * (len(names(engines)) + 2)
    for one in runs:
        assert sum(tier["requests"] for tier in one["tiers"].values()) == 151
        assert sum(tier["refused"] for tier in one["tiers"].values()) >= 1, "one is larger than the pool"
        assert 0 < one["utilization"] <= 1
        assert 0 < one["tdg"] <= 1
        assert {"p50", "p99"} <= set(one["tiers"]["high"]["ttft_s"])


def test_rows_with_a_deadline_wait_until_then(folder: Path) -> None:
    path = folder / "now" / "policy.yaml"
    path.write_text(path.read_text().replace("max_wait: 3s, max_requests: 40", "max_wait: 1s, max_deadline: 1h"))
    busy = {"timestamp": 0, "input_length": 3000, "output_length": 900, "tier": "high"}
    late = {"timestamp": 1, "input_length": 3000, "output_length": 9, "tier": "batch"}
    rows = [busy, busy, busy, late, {**late, "deadline": 2000}, {**late, "deadline": 60_000}]
    rows.append({**busy, "timestamp": 2, "deadline": 60_000})
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, run = played(folder, "now")
    assert [one.refusal for one in run.offered] == [
        None, None, None, "queue_timeout", "deadline", None, "invalid_header",
    ]  # fmt: skip


def test_the_seeds_differ(folder: Path) -> None:
    first, second = simulate(folder, "--seeds", "2")["runs"]
    assert first["tiers"] != second["tiers"]


def played(folder: Path, name: str, by: Assign = Assign.REQUEST, patience_us: int | None = None) -> tuple[Any, Played]:
    policy, model = load_policy(folder / name), load_model(str(folder / "model.yaml"))
    offered = load(
        read_trace(str(folder / "trace.jsonl")), ["high", "batch"], {"high": 1, "batch": 2}, by=by, scale=3.0,
        block_tokens=16, seed=7,
    )  # fmt: skip
    loop = VirtualLoop()
    with loop.running():
        stage = SimulatedEngines(model, 2, loop, KeyQueue)
        return policy, play(offered, stage, ProductAdmission(policy, stage), patience_us)


def test_tenants_take_turns_by_the_cost_of_tokens(folder: Path) -> None:
    path, found = folder / "half" / "policy.yaml", []
    for cost in ("", "cost: {}\n", "cost: {input: 0, output: 1000}\n"):
        path.write_text(path.read_text() + cost)
        _, run = played(folder, "half", Assign.TENANT)
        found.append([one.first_us for one in run.offered])
        path.write_text(path.read_text().removesuffix(cost))
    plain, of_ones, by_output = found
    assert plain == of_ones != by_output


@pytest.mark.parametrize("name", ["now", "planned"])
def test_gain_and_objectives_are_those_of_a_literal_computation(folder: Path, name: str) -> None:
    policy, run = played(folder, name)
    objectives = {tier.level: objective_for(tier) for tier in policy.tiers}
    earned = attainable = met = 0
    for one in run.offered:
        objective = objectives[one.tier]
        attainable += objective.weight * one.output
        if one.refusal is not None:
            assert not one.stretches
            continue
        ends_us = run.engines[one.engine or 0].ends_us
        moments = [at for begin, end in one.stretches for at in ends_us[begin:end]]
        assert len(moments) == one.output
        assert moments == sorted(set(moments))
        assert (moments[0], moments[-1]) == (one.first_us, one.end_us)
        due_us = one.at_us + objective.ttft_us
        in_time = sum(at < due_us + number * objective.tpot_us for number, at in enumerate(moments))
        is_met = moments[0] < due_us and moments[-1] - moments[0] <= (one.output - 1) * objective.tpot_us
        assert judged(one, ends_us, objective) == (in_time, is_met)
        earned += objective.weight * in_time
        met += is_met
    measured = {level: objective for level, objective in objectives.items() if objective is not None}
    found = result(run, ["high", "batch"], measured, name="x", order="level", seed=7, scale=3.0)
    assert found.tdg == earned / attainable
    assert found.slo == met / len(run.offered)
    assert 0 < earned < attainable


def test_a_client_that_left_holds_nothing_in_the_pool_or_an_engine(folder: Path) -> None:
    _, run = played(folder, "planned", patience_us=300_000)
    left = [one for one in run.offered if one.refusal == ABANDONED]
    assert {one.engine is None for one in left} == {True, False}, "some in the pool, some in an engine"
    for one in left:
        assert one.first_us is None
        assert 300_000 <= one.end_us - one.at_us <= 350_000, "when its patience ends, or with the step that runs"
        assert not one.stretches
    assert all(engine.cache.held_tokens == 0 and not len(engine) for engine in run.engines)
    late = [one for one in run.offered if one.refusal is None and (one.first_us or 0) - one.at_us > 350_000]
    assert not late


def test_each_tenant_has_one_tier(folder: Path) -> None:
    _, run = played(folder, "planned", Assign.TENANT)
    tiers: dict[str, set[int]] = {}
    for one in run.offered:
        tiers.setdefault(one.tenant, set()).add(one.tier)
    assert len(tiers) > 10
    assert all(len(found) == 1 for found in tiers.values())


def test_a_row_of_hash_ids_shares_its_prefix(folder: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 600, "output_length": 3, "hash_ids": [1, 2 + n % 2]} for n in range(9)
    ]
    (folder / "shared.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(str(folder / "shared.jsonl"))
    first, second, third, *_ = load(trace, ["high"], None, by=Assign.REQUEST, scale=1.0, block_tokens=16, seed=1)
    assert list(first.blocks) == list(third.blocks)
    assert list(first.blocks[:32]) == list(second.blocks[:32])
    assert first.blocks[32] != second.blocks[32]
    assert len(first.blocks) == 600 // 16


def test_the_highest_rates_are_found(folder: Path) -> None:
    rates = simulate(folder, "--find-rate", "--seeds", "1", "--policy", str(folder / "planned"))["rates"]
    assert [(one["policy"], one["target"]) for one in rates] == [
        ("now", 0.9), ("now", 0.99), ("planned", 0.9), ("planned", 0.99),
    ]  # fmt: skip
    scale = rates[2]["scale"]
    assert rates[3]["scale"] <= scale

    def attained(tried: float) -> float:
        found = simulate(folder, "--seeds", "1", "--policy", str(folder / "planned"), "--scale", str(tried))
        return min(float(tier["slo"]) for tier in found["runs"][1]["tiers"].values())

    assert attained(scale) >= 0.9 > attained(scale * 1.5)


def test_a_rate_that_nothing_bounds_is_said_to_be_at_least_that(folder: Path) -> None:
    (folder / "trace.jsonl").write_text(json.dumps({"timestamp": 0, "input_length": 9, "output_length": 2}))
    found, out = simulated(folder, "--find-rate", "--seeds", "1")
    assert [(one["scale"], one["is_bound"]) for one in found["rates"]] == [(1024.0, True)] * 2
    assert "at least 1024.00" in out


@pytest.mark.parametrize("engines", ["1", "2"])
def test_what_no_engine_can_hold_to_its_end_is_refused(folder: Path, engines: str) -> None:
    """The pool admits it: its prompt and the output that the policy expects of it are small enough."""
    rows = [
        {"timestamp": 0, "input_length": 100, "output_length": 5000},
        {"timestamp": 60_000, "input_length": 50, "output_length": 20},
    ]
    text = POLICY.replace("QUEUE", "default_output_tokens: 64").replace("reserve: 20%", "default_output_tokens: 64")
    (folder / "now" / "policy.yaml").write_text(text)
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for one in simulate(folder, "--baselines", "--seeds", "1", "--engines", engines)["runs"]:
        assert sum(tier["refused"] for tier in one["tiers"].values()) == 1
        assert sum(tier["tokens"] for tier in one["tiers"].values()) == 20
        assert all(tier["queue_wait_s"]["max"] < 1 for tier in one["tiers"].values()), "at once"


def test_the_report_names_every_policy_and_loads_nothing(folder: Path) -> None:
    target = folder / "report.html"
    simulate(folder, "--policy", str(folder / "planned"), "--seeds", "1", "--report", str(target))
    page = target.read_text()
    assert "planned against now" in page
    assert "://" not in page
    assert "<script" not in page


def test_tiers_without_objectives_are_measured_by_their_waits(folder: Path) -> None:
    text = POLICY.replace("slo: {ttft: 2s, tpot: 100ms}, QUEUE", "limit: 90%")
    (folder / "now" / "policy.yaml").write_text(text)
    found, out = simulated(folder, "--seeds", "1")
    batch = found["runs"][0]["tiers"]["batch"]
    assert (batch["slo"], batch["tdg"]) == (None, None)
    assert batch["queue_wait_s"]["max"] is not None
    assert "batch without `slo: {ttft, tpot}`" in out


def test_the_baselines_order_the_engines_queue_as_they_say(folder: Path) -> None:
    runs = simulate(folder, "--seeds", "1", "--baselines", "--scale", "2")["runs"]
    found = {one["policy"]: one for one in runs}
    p50 = {name: {tier: found[name]["tiers"][tier]["ttft_s"]["p50"] for tier in ("high", "batch")} for name in names(1)}
    assert p50["engine-fcfs"]["high"] > 0.5 * p50["engine-fcfs"]["batch"], "whatever the tier"
    for name in ("engine-priority", "edf", "vtc"):
        assert p50[name]["high"] < 0.5 * p50[name]["batch"], name
    assert found["density"]["tdg"] > found["engine-fcfs"]["tdg"]
    waits = {name: found[name]["tiers"]["batch"]["ttft_s"]["p50"] for name in ("sjf", "engine-fcfs")}
    assert waits["sjf"] < waits["engine-fcfs"], "most requests are shorter than the longest"


def test_the_routers_send_requests_to_engines_that_are_first_come_first_served(folder: Path) -> None:
    runs = simulate(folder, "--seeds", "1", "--baselines", "--scale", "4", "--engines", "3")["runs"]
    p50 = {one["policy"]: [tier["ttft_s"]["p50"] for tier in one["tiers"].values()] for one in runs}
    for name in ROUTERS:
        high, batch = p50[name]
        assert high > 0.5 * batch, f"{name}: whatever the tier"
    assert p50["round-robin"] != p50["least-requests"]


@pytest.mark.parametrize("engines", ["1", "2"])
def test_clients_without_a_first_token_leave_when_their_patience_ends(folder: Path, engines: str) -> None:
    more = ("--seeds", "1", "--baselines", "--scale", "8", "--engines", engines)
    (found, out), patient = simulated(folder, "--patience", "0.7", *more), simulate(folder, *more)
    assert "clients leave after 0.7 s without a first token" in out
    assert found == simulate(folder, "--patience", "0.7", *more)
    for one, other in zip(found["runs"], patient["runs"], strict=True):
        tiers = one["tiers"].values()
        assert sum(tier["abandoned"] for tier in tiers) > 0, one["policy"]
        assert sum(tier["abandoned"] for tier in other["tiers"].values()) == 0
        assert sum(tier["refused"] for tier in tiers) <= sum(tier["refused"] for tier in other["tiers"].values())
        step_s = 0.05
        assert all(tier["ttft_s"]["max"] <= 0.7 + step_s for tier in tiers), one["policy"]
        assert all(tier["queue_wait_s"]["max"] <= 0.7 + step_s for tier in tiers), one["policy"]
        assert one["tokens_per_s"] > 0


def test_a_rate_needs_an_objective(folder: Path) -> None:
    bare = POLICY.replace("QUEUE", "limit: 90%").replace(", slo: {ttft: 500ms, tpot: 30ms}, gain: {weight: 4}", "")
    bare = bare.replace("slo: {ttft: 2s, tpot: 100ms}, ", "")
    (folder / "now" / "policy.yaml").write_text(bare)
    args = [str(folder / "trace.jsonl"), "--policy", str(folder / "now"), "--find-rate"]
    assert "no tier of now has `slo` with both ttft and tpot" in complaint("simulate", *args, code=2)


BAD = [
    (["missing.csv"], "missing.csv: cannot be read"),
    (["trace.jsonl", "--mix", "gold=1"], "'gold' is no tier of the policy"),
    (["trace.jsonl", "--scale", "0"], "is no factor; write a number that is more than 0"),
    (["trace.jsonl", "--scale", "nan"], "is no factor; write a number that is more than 0"),
    (["trace.jsonl", "--patience", "0"], "is no time in seconds; write a number that is more than 0"),
    (["trace.jsonl", "--patience", "nan"], "is no time in seconds; write a number that is more than 0"),
    (["trace.jsonl", "--engines", "0"], "is no number of engines; write a number from 1 to 256"),
    (["trace.jsonl", "--engine-model", "none.yaml"], "those that ship are"),
    (["trace.jsonl", "--engine-model", "trace.jsonl"], "trace.jsonl: "),
    (["trace.jsonl", "--policy", "nowhere"], "nowhere"),
    (["gold.jsonl"], "'gold' is no tier"),
    (
        ["trace.jsonl", "--policy", "half", "--mix", "batch=1", "--find-rate"],
        "no tier of half has `slo` with both ttft and tpot and gets",
    ),
]


@pytest.mark.parametrize(("args", "said"), BAD)
def test_bad_input_is_said_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    monkeypatch.chdir(folder)
    assert said in complaint("simulate", *args, "--policy", "now", code=2)


def test_the_engine_model_of_the_page_can_be_used(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    (block,) = (block for block in page.split("```yaml\n")[1:] if "step_us:" in block)
    (tmp_path / "model.yaml").write_text(block.split("```")[0])
    assert load_model(str(tmp_path / "model.yaml")).max_sequences == 256


def test_policies_are_arguments_wherever_they_stand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, now, planned = folder / "figures.json", str(folder / "now"), str(folder / "planned")
    rest = ["--engine-model", str(folder / "model.yaml"), "--seeds", "1", "--json", str(target)]
    trace = str(folder / "trace.jsonl")
    monkeypatch.setenv("SIDECAR_POLICY", now)
    for given, expected in (
        ([trace, now, planned, *rest], ["now", "planned"]),
        ([trace, *rest, now, planned], ["now", "planned"]),
        ([*rest, trace, now, "--policy", planned], ["now", "planned"]),
        ([trace, *rest], ["now"]),
    ):
        assert main(["simulate", *given]) == 0
        assert [one["policy"] for one in json.loads(target.read_text())["runs"]] == expected
    monkeypatch.delenv("SIDECAR_POLICY")
    assert main(["simulate", trace, *rest]) == 2


def test_keys_that_no_run_uses_are_named(folder: Path) -> None:
    now = folder / "now" / "policy.yaml"
    now.write_text(now.read_text().replace("batch: {", "batch: {hours: {sat UTC: {limit: 10%}}, "))
    unused = "engine, capacity.tokens, capacity.requests, hours, default_tier, anonymous, endpoints"
    assert f"\nnow: no run uses {unused}\n" in simulated(folder, "--seeds", "1")[1]


def test_a_tier_that_is_held_to_its_slo_has_a_table(folder: Path) -> None:
    held = (folder / "planned" / "policy.yaml").read_text().replace("tpot: 30ms", "tpot: 30ms, hold: 95%")
    (folder / "now" / "policy.yaml").write_text(held)
    page = folder / "report.html"
    found, out = simulated(folder, "--policy", str(folder / "planned"), "--seeds", "2", "--report", str(page))
    first, _, other, _ = found["runs"]
    assert other["guarded"] == {}
    assert list(first["guarded"]) == ["high"]
    high = first["guarded"]["high"]
    assert high["hold"] == 0.95
    assert 0 < high["share_least"] <= high["share_mean"] <= 1
    assert high["tokens_below"] == first["tiers"]["batch"]["tokens"]
    assert 0 <= high["met"] <= 1
    row = next(line for line in out.splitlines() if "95.0%" in line)
    assert row.split()[:3] == ["now", "high", "95.0%"]
    assert row.endswith("of 2")
    assert "Tiers that are held to their SLO" in page.read_text()
    (folder / "now" / "policy.yaml").write_text((folder / "planned" / "policy.yaml").read_text())
    assert "others fill" not in simulated(folder, "--seeds", "1", "--report", str(page))[1] + page.read_text()
