"""What is read from an engine: of every emulated engine, of pages as the real ones write them, and of nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from sidecar.admission.engine_pages import MOST_BYTES, EnginePages
from sidecar.engines import Engine
from sidecar.engines.base import Facts, Gauges
from sidecar.engines.discovery import identify
from sidecar.engines.pages import Metrics, NoAnswer, Page, Unread
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from sidecar.tools.emulator.config import Scheduling
from tests.support.each import each
from tests.support.examples import examples
from tests.tools.emulator.emulated import DYNAMO, ENGINES, SGLANG, TRTLLM, VLLM

pytestmark = pytest.mark.anyio

OLD_PARSER = version("prometheus-client").startswith("0.18")


class Written:
    """Pages as they are written here; any other is a 404. Remembers what was asked for."""

    def __init__(self, pages: dict[str, str], host: object | None = None) -> None:
        self.pages = pages
        self.host = host
        self.asked: list[str] = []
        self.away: Page | Unread | None = None

    async def get(self, path: str) -> Page:
        self.asked.append(path)
        if isinstance(self.away, Unread):
            raise self.away
        if self.away is not None:
            return self.away
        return Page(200, self.pages[path]) if path in self.pages else Page(404, '{"detail": "Not Found"}')


def emulated(engine: type[Engine], **settings: Any) -> Emulator:
    steps = StepModel(max_sequences=6, kv_tokens=5000, chunk_tokens=512)
    return Emulator(EmulatorConfig(engine=engine, steps=steps, model="m", **settings))


@each("engine", ENGINES)
async def test_an_engine_says_who_it_is_and_how_much_it_holds(engine: type[Engine]) -> None:
    pages = EnginePages(emulated(engine).app)
    identity = await identify(pages)
    assert (identity.engine, identity.where, identity.model) == (engine, "/v1/models", "m")
    gauges = await engine.gauges(pages)
    assert gauges.kv_tokens == 5000
    assert gauges.max_running == (None if engine is VLLM else 6), "vLLM tells that to its own process alone"
    assert gauges.waiting == 0
    facts = await engine.facts(pages)
    assert facts.version is not None
    assert facts.has_field is (None if engine is DYNAMO else True)


@each("engine", ENGINES)
async def test_a_proxy_that_renames_the_models_hides_no_engine(engine: type[Engine]) -> None:
    inner = EnginePages(emulated(engine).app)

    class Renaming:
        host = None

        def __init__(self) -> None:
            self.asked: list[str] = []

        async def get(self, path: str) -> Page:
            self.asked.append(path)
            if path == "/v1/models":
                return Page(200, json.dumps({"data": [{"id": "m", "owned_by": "my-gateway"}]}))
            return await inner.get(path)

    pages = Renaming()
    assert (await identify(pages)).engine is engine
    if engine is TRTLLM:
        assert "/metrics" not in pages.asked, "reading it takes its figures away from the collector"


@pytest.mark.parametrize(("scheduling", "by_priority"), [(Scheduling.PRIORITY, True), (Scheduling.FCFS, False)])
async def test_sglang_says_whether_its_queue_is_ordered(scheduling: Scheduling, by_priority: bool) -> None:
    facts = await SGLANG.facts(EnginePages(emulated(SGLANG, scheduling=scheduling, default_priority=3).app))
    assert (facts.by_priority, facts.is_inverted, facts.default_priority) == (by_priority, False, 3)
    assert facts.source("by_priority") == "/server_info"


async def test_tensorrt_llm_before_the_field_says_that_it_has_none() -> None:
    assert (await TRTLLM.facts(EnginePages(emulated(TRTLLM, priority_field=False).app))).has_field is False


async def test_tensorrt_llms_destructive_page_is_never_read() -> None:
    pages = Written({"/v1/models": '{"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}'})
    assert (await identify(pages)).engine is TRTLLM
    await TRTLLM.facts(pages)
    await TRTLLM.gauges(pages)
    assert "/metrics" not in pages.asked


# -- pages as the real engines write them

# vLLM 0.32.0 on CPU, two data-parallel ranks put together from two single ones.
VLLM_METRICS = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 4.0
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 5.0
vllm:num_preemptions_total{engine="1",model_name="tiny"} 2.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7606e+09
vllm:cache_config_info{_block_size_resolved="True",block_size="128",engine="0",kv_cache_size_tokens="524288",\
num_gpu_blocks="4096",kv_cache_dtype_skip_layers="[]"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="1000"} 1.0
"""


async def test_vllms_ranks_are_added_up() -> None:
    gauges = await VLLM.gauges(Written({"/metrics": VLLM_METRICS}))
    assert gauges == Gauges(kv_tokens=524288 + 16000, running=2, waiting=7, unfinished=9, preemptions=7)


async def test_a_size_that_one_rank_does_not_know_yet_is_not_known() -> None:
    starting = VLLM_METRICS.replace('num_gpu_blocks="1000"', 'num_gpu_blocks="0"')
    assert (await VLLM.gauges(Written({"/metrics": starting}))).kv_tokens is None


async def test_vllm_in_development_mode_tells_its_configuration() -> None:
    info = {"vllm_config": {"scheduler_config": {"policy": "priority", "max_num_seqs": 256}}}
    pages = Written({"/metrics": VLLM_METRICS, "/server_info?config_format=json": json.dumps(info)})
    assert (await VLLM.gauges(pages)).max_running == 256
    assert (await VLLM.facts(pages)).by_priority is True


async def test_vllm_in_the_same_process_tells_its_configuration() -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(policy="fcfs", max_num_seqs=256),
        parallel_config=SimpleNamespace(data_parallel_size=2),
    )
    pages = Written({"/metrics": VLLM_METRICS}, host=SimpleNamespace(state=SimpleNamespace(vllm_config=config)))
    assert (await VLLM.gauges(pages)).max_running == 512
    facts = await VLLM.facts(pages)
    assert (facts.by_priority, facts.source("by_priority")) == (False, "the server's own configuration")


# Dynamo 1.6.1's frontend with its mock engine.
DYNAMO_METRICS = """\
dynamo_frontend_model_kv_cache_block_size{model="tiny"} 16
dynamo_frontend_model_max_num_seqs{model="tiny"} 4
dynamo_frontend_model_total_kv_blocks{model="tiny"} 1024
dynamo_frontend_router_queue_pending_requests{model="tiny",policy_class="default",worker_type="decode"} 7
"""


async def test_dynamos_workers_are_multiplied() -> None:
    generate, other = {"endpoint": "generate"}, {"endpoint": "worker_kv_query_source"}
    health = {"status": "healthy", "instances": [generate, other, generate]}
    gauges = await DYNAMO.gauges(Written({"/metrics": DYNAMO_METRICS, "/health": json.dumps(health)}))
    assert gauges == Gauges(kv_tokens=2 * 16384, max_running=8, waiting=7)


# Dynamo 1.7's frontend: the labels are those of its worker metrics, the values of a group with five workers.
DYNAMO_WORKERS = "".join(
    f'dynamo_frontend_router_worker_state{{model="tiny",target_namespace="dynamo",target_component="backend",'
    f'target_endpoint="generate",worker_type="{kind}",router_worker_id="{number}",state="{state}",'
    f'reason="{reason}"}} 1\n'
    for number, kind, state, reason in (
        (7587895461, "decode", "available", "none"),
        (7587895462, "decode", "available", "none"),
        (7587895463, "decode", "pending", "initializing"),
        (7587895464, "decode", "excluded", "unavailable"),
        (7587895465, "prefill", "available", "none"),
    )
)
DYNAMO_17_HEALTH = {"/health": '{"status": "healthy", "stage": "ready"}'}


async def test_dynamos_available_workers_are_multiplied_where_health_lists_none() -> None:
    pages = Written({"/metrics": DYNAMO_METRICS + DYNAMO_WORKERS, **DYNAMO_17_HEALTH})
    assert await DYNAMO.gauges(pages) == Gauges(kv_tokens=2 * 16384, max_running=8, waiting=7)


async def test_a_dynamo_whose_workers_all_start_does_not_say_how_much_it_holds() -> None:
    """A pool keeps the size that it had."""
    starting = DYNAMO_WORKERS.replace('"available"', '"pending"')
    found = await DYNAMO.gauges(Written({"/metrics": DYNAMO_METRICS + starting, **DYNAMO_17_HEALTH}))
    assert (found.kv_tokens, found.max_running) == (None, None)


async def test_a_newer_dynamo_is_emulated_too() -> None:
    pages = EnginePages(emulated(DYNAMO, lists_workers=False).app)
    assert "instances" not in json.loads((await pages.get("/health")).text)
    assert "dynamo_frontend_router_worker_state" in (await pages.get("/metrics")).text
    assert (await DYNAMO.gauges(pages)).max_running == 6
    assert (await DYNAMO.facts(pages)).version == "1.7.0"


async def test_what_is_asked_once_is_asked_again_when_the_engine_was_away() -> None:
    written = Written({"/server_info": '{"max_batch_size": 8}'})
    pages = TRTLLM.followed(written)
    for _ in range(3):
        assert (await TRTLLM.gauges(pages)).max_running == 8
    assert written.asked.count("/server_info") == 1
    assert written.asked.count("/prometheus/metrics") == 3

    written.away = Page(502, "bad gateway")
    assert (await TRTLLM.gauges(pages)).max_running is None
    written.away, written.pages = None, {"/server_info": '{"max_batch_size": 16}'}
    assert (await TRTLLM.gauges(pages)).max_running == 16

    written.away = NoAnswer("GET /prometheus/metrics was not answered")
    with pytest.raises(Unread):
        await TRTLLM.gauges(pages)
    written.away, written.pages = None, {}  # an older build has no such page
    for _ in range(3):
        assert (await TRTLLM.gauges(pages)).max_running is None
    assert written.asked.count("/server_info") == 4


@each("engine", [engine for engine in ENGINES if engine is not TRTLLM])
def test_pages_that_change_are_asked_every_time(engine: type[Engine]) -> None:
    pages = Written({})
    assert engine.followed(pages) is pages


async def test_sglangs_ranks_are_added_up() -> None:
    rank = {"effective_max_running_requests_per_dp": 128, "memory_usage": {"token_capacity": 20480}}
    loads = [{"num_running_reqs": 3, "num_waiting_reqs": 2}, {"num_running_reqs": 7, "num_waiting_reqs": 5}]
    info = {"version": "0.5.23", "enable_priority_scheduling": True, "internal_states": [rank, rank]}
    pages = Written({"/server_info": json.dumps(info), "/v1/loads": json.dumps({"loads": loads})})
    assert await SGLANG.gauges(pages) == Gauges(kv_tokens=40960, max_running=256, running=10, waiting=7, unfinished=19)


# SGLang's, by `srt/observability/metrics_collector.py`: two data-parallel ranks of two tensor-parallel ones each, with
# --enable-metrics-for-all-schedulers. The gauge, of one batch, differs from the counter by a word in its name.
SGLANG_METRICS = "".join(
    f'sglang:num_retracted_{name}{{dp_rank="{dp}",engine_type="unified",model_name="tiny",moe_ep_rank="0",'
    f'pp_rank="0",tp_rank="{tp}"}} {value}\n'
    for name, dp, tp, value in (
        ("requests_total", 0, 0, 48.0),
        ("requests_total", 0, 1, 48.0),
        ("requests_total", 1, 2, 3.0),
        ("requests_total", 1, 3, 3.0),
        ("reqs", 0, 0, 1.0),
        ("input_tokens_total", 0, 0, 9000.0),
    )
)


@each(
    ("page", "counted"),
    [
        (SGLANG_METRICS, 51),
        (SGLANG_METRICS.replace('dp_rank="0",', "").replace('dp_rank="1",', ""), 48),
        ("sglang:num_retracted_reqs 1.0\n", None),
        (
            "sglang:num_retracted_requests_total 1e308\n" + 'sglang:num_retracted_requests_total{dp_rank="1"} 1e308\n',
            None,
        ),
        ("sglang:num_retracted_requests_total -1\n", None),
        ("", None),
    ],
)
async def test_sglang_counts_what_it_retracted_once_for_each_data_parallel_rank(page: str, counted: int | None) -> None:
    pages = Written({"/server_info": "{}", "/v1/loads": "{}", "/metrics": page})
    assert (await SGLANG.gauges(pages)).preemptions == counted


async def test_a_metrics_page_that_is_not_answered_costs_sglang_no_size() -> None:
    class Slow(Written):
        async def get(self, path: str) -> Page:
            if path == "/metrics":
                raise NoAnswer("GET /metrics was not answered")
            return await super().get(path)

    rank = {"effective_max_running_requests_per_dp": 128, "memory_usage": {"token_capacity": 20480}}
    gauges = await SGLANG.gauges(Slow({"/server_info": json.dumps({"internal_states": [rank]}), "/v1/loads": "{}"}))
    assert (gauges.kv_tokens, gauges.preemptions) == (20480, None)


async def test_tensorrt_llms_gauge_of_paused_requests_is_no_counter() -> None:
    """It is of one iteration, and stands still between finished requests: the same pause would be counted again."""
    pages = Written({"/prometheus/metrics": 'trtllm_num_paused_requests{model_name="m"} 3.0\n'})
    assert (await TRTLLM.gauges(pages)).preemptions is None


@each("engine", ENGINES)
async def test_only_an_engine_that_says_so_counts_preemptions(engine: type[Engine]) -> None:
    gauges = await engine.gauges(EnginePages(emulated(engine).app))
    assert gauges.preemptions == (0 if engine.counts_preemptions else None)
    assert engine.counts_preemptions is (engine in (VLLM, SGLANG))


# -- bad pages

_NESTED = "[" * 100_000
_PATHS = (
    "/v1/models",
    "/version",
    "/openapi.json",
    "/metrics",
    "/prometheus/metrics",
    "/server_info",
    "/server_info?config_format=json",
    "/v1/loads",
    "/health",
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["data", "id", "owned_by", "version", "components", "schemas", "loads", "instances", "internal_states"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
_METRICS_LINES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("vllm:cache_config_info", "vllm:num_requests_waiting", "vllm:num_preemptions_total"),
                *("sglang:num_retracted_requests_total", "trtllm_kv_cache_max_blocks"),
            ]
        ),
        st.sampled_from(["", '{block_size="x"}', '{num_gpu_blocks="9' + "9" * 5000 + '"}', '{a="\\"', "{", "}"]),
        st.sampled_from(["NaN", "+Inf", "-1", "1e400", "x", "", "3"]),
    ).map(lambda parts: f"{parts[0]}{parts[1]} {parts[2]}")
).map("\n".join)


@each("engine", ENGINES)
@settings(max_examples=examples(50))
@given(text=st.text() | _JSON.map(json.dumps) | _METRICS_LINES | st.just(_NESTED))
def test_no_page_is_bad_enough_to_break_a_reader(engine: type[Engine], text: str) -> None:
    pages = Written(dict.fromkeys(_PATHS, text))

    async def read() -> None:
        with contextlib.suppress(Unread):
            await identify(pages)
        with contextlib.suppress(Unread):
            await engine.facts(pages)
        with contextlib.suppress(Unread):
            found = await engine.gauges(pages)
            assert found.kv_tokens is None or found.kv_tokens > 0
            assert found.waiting is None or found.waiting >= 0
            assert found.preemptions is None or found.preemptions >= 0

    asyncio.run(read())


def test_a_label_with_everything_in_it_is_read_as_it_was_written() -> None:
    metrics = Metrics('x{a="say \\"hi\\"\\n, {b=\\"c\\"}",d="\\\\"} 2 1700000000\nx 3\n# x 9\nx{a="1"} NaN\n')
    assert [(dict(sample.labels), sample.value) for sample in metrics.samples("x")] == [
        ({"a": 'say "hi"\n, {b="c"}', "d": "\\"}, 2.0),
        ({}, 3.0),
    ]
    assert metrics.count("x") == 5
    assert metrics.count("y") is None


@pytest.mark.skipif(OLD_PARSER, reason="it reads these lines somehow")
def test_one_bad_line_does_not_hide_the_others() -> None:
    """prometheus_client ends a page at the first line that it cannot read."""
    text = 'x{a="b\n<html>\nx 1_0\nx{a="1",a="2"} 4\ny 1\nx{b="2"} 5\nx_total 7\n'
    with pytest.raises(ValueError, match=r"could not convert|Invalid"):
        list(text_string_to_metric_families(text))
    metrics = Metrics(text)
    assert [sample.labels for sample in metrics.samples("x")] == [{"b": "2"}]
    assert metrics.count("y") == 1


@each(
    "line",
    [
        'x{a="b"} 1',
        'x{a="' + '\\"' * 2_000 + '"} 1',
        "x{" + ",".join(f'l{number}="x"' for number in range(400)) + "} 1",
        'x{a="' + '\\"' * 300_000 + '"} 1',
        "x" + "{" * 4_000,
    ],
    ids=["short", "escapes", "labels", "one long line", "braces"],
)
def test_no_page_takes_the_event_loop_for_long(line: str) -> None:
    """prometheus_client takes 11 s for the long line alone, and its time grows with the square of its length."""
    page = "\n".join([line] * (MOST_BYTES // (len(line) + 1)))
    began_s = time.process_time()
    Metrics(page).count("x")
    assert time.process_time() - began_s < 3, "about 0.6 s"


# -- through an app


async def test_an_app_that_fails_hangs_or_overflows_is_unread() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no")

    async def hangs(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()

    async def overflows(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})

    async def says_nothing(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    for app, said in (
        (fails, "GET /x failed: RuntimeError: no"),
        (hangs, "GET /x was not answered within 0.05 s"),
        (overflows, "a page has more than"),
        (says_nothing, "GET /x was not answered"),
    ):
        with pytest.raises(Unread, match=said):
            await EnginePages(app).get("/x", within_s=0.05)


async def test_the_engines_key_is_shown() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await EnginePages(app, "sk-engine").get("/server_info?config_format=json")
    assert (b"authorization", b"Bearer sk-engine") in seen[0]["headers"]
    assert (seen[0]["path"], seen[0]["query_string"]) == ("/server_info", b"config_format=json")


def test_facts_know_their_source() -> None:
    assert Facts(where=(("version", "/version"),)).source("by_priority") is None
