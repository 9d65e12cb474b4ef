"""What an engine says about itself: metrics under their real names, and what a probe can read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.engines import Engine, NoEngine
from sidecar.tools.emulator import EmulatorConfig, Scheduling
from tests.tools.emulator.emulated import DYNAMO, ENGINES, SGLANG, TRTLLM, VLLM, emulated

pytestmark = pytest.mark.anyio


def samples(text: str) -> dict[str, float]:
    """Every sample of an exposition, by its name and labels."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def names(text: str) -> set[str]:
    return {name.split("{")[0] for name in samples(text)}


EXPECTED = {
    VLLM: {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:admission_rejections_total",
        "vllm:cache_config_info",
    },
    SGLANG: {
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:max_total_num_tokens",
        "sglang:kv_available_tokens",
        "sglang:num_retracted_reqs",
        "sglang:queue_time_seconds_count",
    },
    DYNAMO: {
        "dynamo_frontend_queued_requests",
        "dynamo_frontend_inflight_requests",
        "dynamo_frontend_disconnected_clients",
        "dynamo_frontend_model_rejection_total",
        "dynamo_frontend_requests_total",
        "dynamo_frontend_router_queue_pending_requests",
    },
    TRTLLM: {
        "trtllm_num_requests_running",
        "trtllm_num_requests_waiting",
        "trtllm_max_num_active_requests",
        "trtllm_kv_cache_utilization",
        "trtllm_request_queue_time_seconds_sum",
        "trtllm_request_error_total",
    },
}


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_metrics_have_the_engines_own_names(engine: type[Engine]) -> None:
    async with emulated(engine) as client:
        await client.post()
        path = "/prometheus/metrics" if engine is TRTLLM else "/metrics"
        status, text = await client.get(path)
    assert status == 200
    assert names(text) >= EXPECTED[engine]


async def test_vllms_gauges_show_what_runs_and_what_waits() -> None:
    async with emulated(VLLM) as client:
        busy, waiting = await client.occupied(), await client.queued()
        _, text = await client.get("/metrics")
        await client.released(busy, waiting)
        _, later = await client.get("/metrics")
    labels = '{engine="0",model_name="emulated"}'
    assert samples(text)[f"vllm:num_requests_running{labels}"] == 1
    assert samples(text)[f"vllm:num_requests_waiting{labels}"] == 1
    assert samples(later)[f"vllm:request_queue_time_seconds_count{labels}"] == 2


async def test_sglangs_queue_has_a_label_per_priority() -> None:
    async with emulated(SGLANG) as client:
        busy, waiting = await client.occupied(), await client.queued(priority=7)
        _, text = await client.get("/metrics")
        await client.released(busy, waiting)
    queue = {name: value for name, value in samples(text).items() if name.startswith("sglang:num_queue_reqs")}
    assert sorted(name.rsplit("priority=", 1)[1] for name in queue) == ['""}', '"7"}']
    assert set(queue.values()) == {1.0}


async def test_trtllms_json_statistics_are_read_destructively() -> None:
    async with emulated(TRTLLM) as client:
        await client.post(max_tokens=5)
        stats: list[dict[str, Any]] = json.loads((await client.get("/metrics"))[1])
        again = json.loads((await client.get("/metrics"))[1])
    assert len(stats) == 5
    assert {"iter", "numActiveRequests", "numQueuedRequests", "kvCacheStats"} <= set(stats[0])
    assert again == []


async def test_trtllms_gauges_freeze_between_finished_requests() -> None:
    async with emulated(TRTLLM) as client:
        busy = await client.occupied()
        _, text = await client.get("/prometheus/metrics")
        busy.cancel()
    assert samples(text)['trtllm_num_requests_running{model_name="emulated",engine_type="pytorch"}'] == 0


async def test_only_sglang_tells_its_scheduling() -> None:
    async with emulated(SGLANG, scheduling=Scheduling.FCFS, max_queued=5) as client:
        info = json.loads((await client.get("/server_info"))[1])
    assert (info["enable_priority_scheduling"], info["max_queued_requests"], info["max_running_requests"]) == (
        False,
        5,
        1,
    )
    async with emulated(TRTLLM) as client:
        info = json.loads((await client.get("/server_info"))[1])
    assert set(info) == {"disaggregated_params", "max_batch_size", "kv_cache_hash_algo", "tokens_per_block"}


async def test_trtllms_schema_tells_that_it_has_the_field() -> None:
    async with emulated(TRTLLM) as client:
        schema = json.loads((await client.get("/openapi.json"))[1])
    assert "priority" in schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_engine_is_healthy_and_names_its_model(engine: type[Engine]) -> None:
    async with emulated(engine, model="llama") as client:
        assert (await client.get("/health"))[0] == 200
        models = json.loads((await client.get("/v1/models"))[1])
    assert [model["id"] for model in models["data"]] == ["llama"]


@pytest.mark.parametrize(
    "wrong", [{"engine": NoEngine}, {"max_queued": -1}, {"output_tokens": 0}, {"tokens_per_chunk": 0}]
)
def test_a_configuration_that_no_engine_has_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"emulate|must"):
        EmulatorConfig(**{"engine": VLLM, **wrong})
