"""The doctor against every emulated engine over real sockets: it must find out by itself what is wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import yaml

from sidecar.app import AdmissionMiddleware
from sidecar.engines import dynamo
from sidecar.policy.compiler import load
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.doctor import burst, probe
from sidecar.tools.doctor.conditions import ConditionState
from sidecar.tools.doctor.examination import Examination, Options, examine
from sidecar.tools.doctor.recommendation import Queueing
from sidecar.tools.doctor.report import headline, report, steps
from sidecar.tools.doctor.survey import CannotLook
from sidecar.tools.emulator.config import Scheduling
from tests.tools.doctor.between import (
    Edit,
    between,
    drops_header,
    drops_member,
    evens_out,
    negates_everything,
    negates_header,
    served,
)
from tests.tools.emulator.emulated import DYNAMO, SGLANG, TRTLLM, VLLM, emulated

pytestmark = pytest.mark.anyio

FCFS = {"scheduling": Scheduling.FCFS}
W, B, U = ConditionState.WORKS, ConditionState.BROKEN, ConditionState.UNKNOWN
VLLM_HEADER, DYNAMO_HEADER = "x-vllm-priority", "x-dynamo-request-priority"


@pytest.fixture(autouse=True)
def _short_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "GOAL_S", 0.25)
    monkeypatch.setattr(burst, "WATCH_EVERY_S", 0.04)


async def examined(url: str, **options: Any) -> Examination:
    options.setdefault("headers", {})
    options.setdefault("allowed_s", 20.0)
    return await examine(Options(url=url, **options), lambda line: None)


SEEN: dict[tuple[str, str], Examination] = {}


async def seen(engine: Any, **settings: Any) -> Examination:
    """An engine of four slots with these settings, examined once for all tests: that takes a second or two."""
    key = engine.name, repr(settings)
    if key not in SEEN:
        async with emulated(engine, slots=4, **settings) as client:
            SEEN[key] = await examined(client.url)
            await client.until(lambda engine: engine.running == engine.waiting == 0)
    return SEEN[key]


def states(found: Examination) -> tuple[ConditionState, ...]:
    """Of field path, scheduler policy, real queueing and direction."""
    return tuple(condition.state for condition in found.conditions)


@pytest.mark.parametrize(
    ("engine", "settings", "expected", "fix"),
    [
        (VLLM, {}, (W, W, W, W), None),
        (VLLM, FCFS, (U, B, W, U), "--scheduling-policy priority"),
        (TRTLLM, {}, (W, W, W, W), None),
        (TRTLLM, FCFS, (W, B, W, U), "scheduler_config: {waiting_queue_policy: priority}"),
        (TRTLLM, {"priority_field": False}, (B, U, U, U), "sidecar trtllm-serve"),
        (SGLANG, {"default_priority": 0}, (W, W, W, W), None),
        (SGLANG, FCFS, (W, B, W, U), "--enable-priority-scheduling --default-priority-value 0"),
        (SGLANG, {"low_values_first": True}, (W, W, W, B), "without --schedule-low-priority-values-first"),
        (DYNAMO, {}, (W, W, W, W), None),
        (DYNAMO, FCFS, (U, B, W, U), "--router-policy-config FILE, a YAML file that holds `{default_policy_family:"),
    ],
    ids=lambda value: getattr(value, "value", None) or str(value)[:30],
)
async def test_an_engine_is_seen_through(
    engine: Any, settings: Any, expected: tuple[ConditionState, ...], fix: str | None
) -> None:
    found = await seen(engine, **settings)
    assert states(found) == expected, report(found)
    assert found.state is (W if fix is None else B)
    assert fix is None or fix in steps(found)[0]


@pytest.mark.parametrize(
    ("engine", "edit", "expected", "fix"),
    [
        (
            VLLM,
            drops_header(VLLM_HEADER),
            (B, W, W, W),
            "pass the header x-vllm-priority unchanged, or write `forward_priority",
        ),
        (DYNAMO, drops_header(DYNAMO_HEADER), (B, W, W, W), "pass the header x-dynamo-request-priority"),
        (VLLM, negates_header(VLLM_HEADER), (W, W, W, B), "itself serves lower numbers first"),
        (VLLM, negates_everything, (W, W, W, B), "itself serves lower numbers first"),
        (SGLANG, drops_member("priority"), (B, W, W, U), "pass the body field priority unchanged"),
        (TRTLLM, drops_member("priority"), (B, U, W, U), "pass the body field priority unchanged"),
        (SGLANG, evens_out, (B, W, W, U), "pass the body field priority unchanged"),
    ],
    ids=[
        "vllm header",
        "dynamo header",
        "vllm negated header",
        "vllm negated",
        "sglang body",
        "trtllm body",
        "sglang replaced",
    ],
)
async def test_a_proxy_in_between_is_found_out(
    engine: Any, edit: Edit, expected: tuple[ConditionState, ...], fix: str
) -> None:
    async with emulated(engine, slots=4) as client, between(client.url, edit=edit) as url:
        found = await examined(url)
    assert states(found) == expected, report(found)
    assert found.state is B
    assert fix in steps(found)[0]


def test_dynamos_advice_has_a_file_that_can_be_copied() -> None:
    held = yaml.safe_load(dynamo.POLICY)
    assert list(held) == ["default_policy_family", "uncached_isl_buckets", "policy_classes"]
    assert held["policy_classes"][0]["prefill_busy_threshold_frac"] == 0
    assert "--router-queue-threshold 0" in DYNAMO.advice.scheduler


async def test_a_dynamo_that_refuses_all_but_what_runs_is_asked_to_switch_its_queue_on() -> None:
    async with emulated(DYNAMO, slots=4, lists_workers=False, max_queued=4, **FCFS) as client:
        found = await examined(client.url)
    assert states(found) == (U, U, U, U), report(found)
    assert "HTTP 529" in found.conditions[2].evidence
    assert "the gauge of the router's queue stayed at 0" in found.conditions[2].evidence
    assert "with --router-mode kv and its queue on" in steps(found)[0]
    assert "less busy" not in "".join(steps(found))


async def test_a_dynamo_with_a_full_queue_is_not_asked_to_switch_it_on() -> None:
    async with emulated(DYNAMO, slots=1, step_s=0.02, max_queued=3) as client:
        found = await examined(client.url)
    assert "HTTP 529" in found.conditions[2].evidence, report(found)
    assert "less busy" in steps(found)[0]


async def test_too_little_load_is_not_called_broken() -> None:
    async with emulated(VLLM, slots=200, **FCFS) as client:
        found = await examined(client.url, most=60)
    assert states(found) == (U, U, U, U), report(found)
    assert found.state is U
    assert "not enough load" in found.conditions[2].evidence
    assert "of 40, 60 requests at once" in found.conditions[2].evidence
    assert "--requests 120" in steps(found)[0]


async def test_bursts_grow_until_requests_wait() -> None:
    async with emulated(VLLM, slots=50) as client:
        found = await examined(client.url)
    assert found.state is W, report(found)
    assert [one.plan.requests for one in found.bursts] == [40, 160, 160]


async def test_the_first_burst_fits_an_engine_that_says_what_it_runs() -> None:
    async with emulated(TRTLLM, slots=20) as client:
        found = await examined(client.url)
    assert found.state is W, report(found)
    assert [one.plan.requests for one in found.bursts] == [56, 56]


async def test_requests_that_come_in_slowly_do_not_pass_for_a_queue() -> None:
    """They take as long to their first token as in a queue, and in the order of arrival, but nothing waits."""
    hidden = ("/metrics", "/prometheus/metrics", "/server_info")
    async with (
        emulated(TRTLLM, slots=500) as client,
        between(client.url, entry_s=0.008, hides=hidden) as url,
    ):
        found = await examined(url, most=80)
    assert found.state is U, report(found)
    assert found.conditions[1].state is U


async def test_without_gauges_longer_answers_tell_a_queue() -> None:
    hidden = ("/metrics", "/prometheus/metrics", "/server_info")
    async with emulated(TRTLLM, slots=4, **FCFS) as client, between(client.url, hides=hidden) as url:
        found = await examined(url)
    assert found.probed.queueing(found.survey) is Queueing.BOUNDED
    assert states(found) == (W, B, W, U), report(found)
    assert found.capacity.yaml == "capacity: {requests: 4}"


@pytest.mark.long
async def test_a_proxy_that_holds_requests_back_is_not_the_engines_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "GOAL_S", 0.5)
    async with emulated(VLLM, slots=50) as client, between(client.url, at_once=4) as url:
        found = await examined(url, most=40)
    assert found.conditions[2].state is B, report(found)
    assert "not inside the engine, whose own gauge showed" in found.conditions[2].evidence


async def test_the_first_batch_is_left_out() -> None:
    async with emulated(VLLM, slots=10) as client:
        found = await examined(client.url)
    mixed = found.probed.mixed[-1]
    assert mixed.plan.requests == 40
    assert mixed.judgment.waited == 30
    assert mixed.judgment.correlation.value > 0.9


@pytest.mark.parametrize(
    ("engine", "settings", "line"),
    [
        (VLLM, {}, "capacity: {from: engine, fraction: 95%, waiting: 2, requests: 6}"),
        (SGLANG, {"default_priority": 0}, "capacity: {from: engine, fraction: 95%, waiting: 2}"),
        (DYNAMO, {}, "capacity: {from: engine, fraction: 95%, waiting: 2}"),
    ],
)
async def test_the_capacity_it_recommends_is_a_policy_that_loads(
    engine: Any, settings: Any, line: str, tmp_path: Any
) -> None:
    found = await seen(engine, **settings)
    assert found.capacity.yaml == line
    path = tmp_path / "policy.yaml"
    path.write_text(f"engine: {engine.name}\n{line}\ntiers: {{high: {{}}, normal: {{}}}}\n")
    assert load(path).engine_capacity is not None


async def test_read_only_sends_no_request() -> None:
    async with emulated(SGLANG, slots=4, **FCFS) as client:
        found = await examined(client.url, reads_only=True)
        assert len(client.engine.log) == 0
    assert states(found) == (U, B, U, U)
    assert found.state is B
    assert "--enable-priority-scheduling" in steps(found)[0]


async def test_read_only_never_says_that_it_works() -> None:
    async with emulated(SGLANG, slots=4, default_priority=0) as client:
        found = await examined(client.url, reads_only=True)
    assert found.conditions[1].state is W
    assert found.state is U
    assert "nothing was sent" in headline(found)


async def test_somebody_elses_requests_are_mentioned() -> None:
    async with emulated(VLLM, slots=1) as client:
        busy = await client.occupied()
        found = await examined(client.url, reads_only=True)
        busy.cancel()
    assert found.survey.others == 1
    assert "1 requests of other clients were there" in report(found)


async def test_an_engine_behind_a_key() -> None:
    async with emulated(VLLM, slots=4) as client, between(client.url, key="sk-1") as url:
        with pytest.raises(CannotLook, match="--key"):
            await examined(url)
        assert (await examined(url, headers={"authorization": "Bearer sk-1"})).state is W


async def test_an_engine_that_nothing_tells_of_has_to_be_named() -> None:
    hidden = ("/v1/models", "/openapi.json", "/metrics", "/version")
    async with emulated(VLLM, slots=4) as client, between(client.url, hides=hidden) as url:
        with pytest.raises(CannotLook, match="--engine"):
            await examined(url)
        with pytest.raises(CannotLook, match="--model"):
            await examined(url, engine=VLLM)
        found = await examined(url, engine=VLLM, model="emulated")
    assert found.state is W, report(found)


async def test_requests_that_are_refused_are_no_verdict() -> None:
    async with emulated(VLLM, slots=4, max_queued=6) as client:
        found = await examined(client.url)
    assert found.state is U, report(found)
    assert "requests were refused: HTTP 503" in found.conditions[2].evidence


POLICY = """\
engine: vllm
capacity: {requests: 4}
tiers: {high: {}, normal: {}, low: {}}
anonymous: ANONYMOUS
sources: [header]
"""


async def through_a_sidecar(tmp_path: Any, anonymous: str) -> Examination:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.replace("ANONYMOUS", anonymous))
    async with emulated(VLLM, slots=8, **FCFS) as client:
        sidecar = AdmissionMiddleware(ReverseProxy(client.url), load(path))
        async with served(sidecar) as url:
            return await examined(url)


async def test_one_of_our_own_sidecars_is_probed_by_tiers(tmp_path: Any) -> None:
    found = await through_a_sidecar(tmp_path, "high")
    assert states(found) == (W, W, W, W), report(found)
    assert headline(found).startswith("WORKS: an admission sidecar at ")
    assert "gives the tiers high, normal, low" in found.conditions[0].evidence
    assert "point --upstream at the engine" in report(found)


async def test_a_key_that_may_not_ask_for_more_is_the_reason(tmp_path: Any) -> None:
    found = await through_a_sidecar(tmp_path, "low")
    assert found.conditions[0].state is B, report(found)
    assert "got low, low, low" in found.conditions[0].evidence
    assert "--key" in steps(found)[0]


async def test_a_probe_that_is_canceled_leaves_no_work() -> None:
    async with emulated(VLLM, slots=2, step_s=0.02) as client:
        task = asyncio.ensure_future(examined(client.url))
        await client.until(lambda engine: engine.waiting > 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.until(lambda engine: engine.running == engine.waiting == 0)
        assert client.engine.aborted > 20


async def test_time_is_bounded() -> None:
    async with emulated(VLLM, slots=1, step_s=0.2) as client:
        began_s = asyncio.get_running_loop().time()
        found = await examined(client.url, allowed_s=4.0)
        took_s = asyncio.get_running_loop().time() - began_s
        await client.until(lambda engine: engine.running == engine.waiting == 0)
    assert took_s < 5.0
    assert found.state is not B, report(found)


async def test_the_recommended_capacity_can_be_copied_in_one_piece() -> None:
    lines = report(await seen(VLLM)).split("\n")
    start = lines.index("capacity for the policy")
    written = yaml.safe_load("\n".join(lines[start + 1 : lines.index("", start)]))
    assert written == {"capacity": {"from": "engine", "fraction": "95%", "waiting": 2, "requests": 6}}
