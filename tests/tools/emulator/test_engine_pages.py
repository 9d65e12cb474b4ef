"""What an engine says about itself: metrics under their real names, and what a probe can read."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from sidecar.engines import Engine, NoPriorityEngine
from sidecar.tools.emulator import EmulatorConfig, Scheduling
from tests.tools.emulator.emulated import DYNAMO, ENGINES, SGLANG, TRTLLM, VLLM, Client, emulated

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
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:cache_config_info",
    },
    SGLANG: {
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:max_total_num_tokens",
        "sglang:kv_available_tokens",
        "sglang:num_retracted_reqs",
    },
    DYNAMO: {
        "dynamo_frontend_router_queue_pending_requests",
    },
    TRTLLM: {
        "trtllm_num_requests_running",
        "trtllm_num_requests_waiting",
        "trtllm_max_num_active_requests",
        "trtllm_kv_cache_utilization",
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
    labels = '{engine="0",model_name="emulated"}'
    assert samples(text)[f"vllm:num_requests_running{labels}"] == 1
    assert samples(text)[f"vllm:num_requests_waiting{labels}"] == 1


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


@pytest.mark.parametrize(
    "wrong", [{"engine": NoPriorityEngine}, {"max_queued": -1}, {"output_tokens": 0}, {"tokens_per_chunk": 0}]
)
def test_a_configuration_that_no_engine_has_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"emulate|must"):
        EmulatorConfig(**{"engine": VLLM, **wrong})


async def test_the_page_says_how_long_the_steps_were_by_the_model_and_how_much_the_machine_added() -> None:
    async with emulated(VLLM, step_s=0.01) as client:
        await client.post(max_tokens=10)
        quiet = await steps_of(client)
        assert quiet["computed_s"] == pytest.approx(0.1, abs=0.011)
        running = asyncio.create_task(client.post(max_tokens=10))
        await client.until(lambda engine: engine.running == 1)
        time.sleep(0.3)  # noqa: ASYNC251  # the machine is busy: the engine shares this process's only thread
        await running
        busy = await steps_of(client)
    assert busy["lost_s"] - quiet["lost_s"] >= 0.25


async def steps_of(client: Client) -> Any:
    async with client.session.get(f"{client.url}/_emulator") as response:
        return (await response.json())["steps"]


async def test_sglang_answers_what_its_router_asks_of_a_worker() -> None:
    """`discover_metadata` of sglang-router 0.3 and smg 1.13: the new names, and the older ones where those are 404."""
    async with emulated(SGLANG, model="some-model") as client:
        pages = [json.loads((await client.get(path))[1]) for path in ("/model_info", "/get_model_info")]
        infos = [json.loads((await client.get(path))[1]) for path in ("/server_info", "/get_server_info")]
    assert pages[0] == pages[1]
    assert infos[0] == infos[1]
    assert (pages[0]["model_path"], pages[0]["is_generation"]) == ("some-model", True)
    assert infos[0]["served_model_name"] == "some-model"


async def test_sglangs_loads_show_what_waits_and_what_is_held() -> None:
    path = "/v1/loads?include=core,disagg,queues,memory"  # as smg 1.13 asks
    async with emulated(SGLANG) as client:
        before = json.loads((await client.get(path))[1])["loads"][0]
        busy, waiting = await client.occupied(), await client.queued()
        page = json.loads((await client.get(path))[1])
        during = page["loads"][0]
        await client.released(busy, waiting)
        after = json.loads((await client.get(path))[1])["loads"][0]
    assert page["version"]
    assert page["timestamp"]
    assert (during["num_running_reqs"], during["num_waiting_reqs"], during["num_total_reqs"]) == (1, 1, 2)
    assert during["num_waiting_uncached_tokens"] > 0
    assert during["num_total_tokens"] > during["num_used_tokens"] > 0
    assert 0 < during["token_usage"] == round(during["num_used_tokens"] / during["max_total_num_tokens"], 4)
    idle = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens", "token_usage")
    assert [before[key] for key in idle] == [after[key] for key in idle] == [0, 0, 0, 0, 0.0]
