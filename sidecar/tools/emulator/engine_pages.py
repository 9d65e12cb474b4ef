"""Pages of the emulated engine about itself: models, health, arguments, schema, metrics. Only what a client reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator.config import BLOCK_TOKENS, EmulatorConfig, Scheduling
from sidecar.tools.emulator.dialects.base import Dialect
from sidecar.tools.emulator.engine import EmulatedEngine

VERSIONS = {
    TensorRtLlm: "1.4.0rc1",
    Vllm: "0.33.0",
    Sglang: "0.5.23",
    Dynamo: "1.6.1",
}
"""The versions whose contracts are emulated."""


def models(config: EmulatorConfig, dialect: Dialect, created: int) -> dict[str, Any]:
    """`/v1/models`: the one model. Any other name is served all the same."""
    card: dict[str, Any] = {"id": config.model, "object": "model", "created": created, "owned_by": dialect.owned_by}
    if config.engine in (Vllm, Sglang):
        card["max_model_len"] = config.context_tokens
    return {"object": "list", "data": [card]}


def server_info(config: EmulatorConfig) -> dict[str, Any] | None:
    """`/server_info`; None where the engine has none. TensorRT-LLM's does not say its queue's policy."""
    if config.engine is TensorRtLlm:
        return {
            "disaggregated_params": None,
            "max_batch_size": config.steps.max_sequences,
            "kv_cache_hash_algo": "default",
            "tokens_per_block": config.block_size if config.prefix_cache else BLOCK_TOKENS[config.engine],
        }
    if config.engine is not Sglang:
        return None
    return {
        "model_path": config.model,
        "served_model_name": config.model,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": config.scheduling is Scheduling.PRIORITY,
        "schedule_low_priority_values_first": config.low_values_first,
        "default_priority_value": config.default_priority,
        "priority_scheduling_preemption_threshold": 10,
        "disable_priority_preemption": True,  # what is emulated: nothing that runs is preempted
        "max_queued_requests": config.max_queued,
        "max_running_requests": config.steps.max_sequences,
        "disable_radix_cache": not config.prefix_cache,
        "enable_cache_report": config.cache_report,
        "page_size": config.block_size,
        "version": VERSIONS[config.engine],
        "internal_states": [
            {
                "effective_max_running_requests_per_dp": config.steps.max_sequences,
                "memory_usage": {"token_capacity": config.kv_capacity_tokens},
            }
        ],
    }


def sglang_model_info(config: EmulatorConfig) -> dict[str, Any]:
    """SGLang's `/model_info`, with which its router begins to know a worker (`http_server.model_info`)."""
    return {
        "model_path": config.model,
        "tokenizer_path": config.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": None,
        "architectures": None,
    }


def sglang_loads(engine: EmulatedEngine) -> dict[str, Any]:
    """SGLang's `/v1/loads`: one entry per data-parallel rank, of which there is one.

    The fields are those of `LoadSnapshot.to_dict` without its optional sections. Rates are not emulated:
    they stay 0, as `utilization` does there, too.
    """
    config, load, occupancy = engine.config, engine.load, engine.occupancy
    rank = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": occupancy.unprefilled_tokens,
        "num_total_reqs": load.running + load.waiting,
        "num_used_tokens": load.kv_tokens_held,
        "num_total_tokens": load.kv_tokens_held + engine.waiting_prompt_tokens,
        "max_total_num_tokens": config.kv_capacity_tokens,
        "max_running_requests": config.steps.max_sequences,
        "token_usage": round(load.kv_tokens_held / config.kv_capacity_tokens, 4),
        **dict.fromkeys(("gen_throughput", "cache_hit_rate", "utilization"), 0.0),
    }
    return {
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "version": VERSIONS[config.engine],
        "dp_rank_count": 1,
        "loads": [rank],
    }


def dynamo_health(config: EmulatorConfig) -> dict[str, Any]:
    """Dynamo's `/health`: the one worker, by its endpoint; from 1.7 on no worker at all."""
    if not config.lists_workers:
        return {"status": "healthy", "stage": "ready"}
    worker = {"component": "backend", "endpoint": "generate", "namespace": "dynamo", "instance_id": 1}
    return {"status": "healthy", "endpoints": ["dyn://dynamo.backend.generate"], "instances": [worker]}


def openapi(config: EmulatorConfig) -> dict[str, Any]:
    """`/openapi.json` as far as a probe reads it: has the chat request a priority? Dynamo's says its name alone."""
    if config.engine is Dynamo:
        version = VERSIONS[config.engine] if config.lists_workers else "1.7.0"
        info = {"title": "NVIDIA Dynamo OpenAI Frontend", "version": version}
        return {"openapi": "3.1.0", "info": info, "paths": {}, "components": {}}
    properties: dict[str, Any] = {"messages": {"type": "array"}, "model": {"type": "string"}}
    if config.priority_field:
        properties["priority"] = {"title": "Priority"}
    schemas = {
        name: {"type": "object", "properties": properties, "title": name}
        for name in ("ChatCompletionRequest", "CompletionRequest")
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "FastAPI", "version": VERSIONS[config.engine]},
        "paths": {},
        "components": {"schemas": schemas},
    }


def emulator_state(engine: EmulatedEngine) -> dict[str, Any]:
    """`/_emulator`, which no real engine has: what it holds, and the most it ever held, for tests and benchmarks."""
    config, cache, occupancy = engine.config, engine.core.cache, engine.occupancy
    found = {
        "block_tokens": cache.block_tokens,
        "blocks": cache.blocks,
        "cached_blocks": cache.cached_blocks,
        "queried_tokens": cache.queried_tokens,
        "hit_tokens": cache.hit_tokens,
    }
    return {
        "name": config.name,
        "engine": config.engine.name,
        "process": os.getpid(),
        "is_stopping": engine.is_stopping,
        "capacity": {"running": config.steps.max_sequences, "kv_tokens": config.kv_capacity_tokens},
        "now": {
            "requests": occupancy.requests,
            "tokens": occupancy.tokens,
            "unprefilled_tokens": occupancy.unprefilled_tokens,
            "running": engine.running,
            "waiting": engine.waiting,
            "kv_tokens": cache.held_tokens,
        },
        "most": {
            "requests": occupancy.most_requests,
            "tokens": occupancy.most_tokens,
            "unprefilled_tokens": occupancy.most_unprefilled_tokens,
            "running": engine.most_running,
            "kv_tokens": engine.most_kv_tokens_held,
        },
        "counts": {
            "finished": engine.finished,
            "aborted": engine.aborted,
            "refused": engine.refused,
            "preempted": engine.core.preemptions,
        },
        "prefix_cache": found if cache.caches_prefixes else None,
        "steps": {"computed_s": round(engine.computed_s, 3), "lost_s": round(engine.lost_s, 3)},
    }


class Exposition:
    """Prometheus text, written metric by metric. `labels` go on every sample."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def family(self, kind: str, name: str, value: float, **labels: str) -> None:
        """A family of one sample."""
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in {**self._labels, **labels}.items())
        self._lines += [f"# HELP {name} Emulated.", f"# TYPE {name} {kind}", f"{name}{{{pairs}}} {float(value)}"]

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """A gauge."""
        self.family("gauge", name, value, **labels)

    def counter(self, name: str, value: float, **labels: str) -> None:
        """A counter."""
        self.family("counter", name, value, **labels)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def trtllm_text(engine: EmulatedEngine) -> str:
    """`/prometheus/metrics`. The gauges freeze between finished requests, as the real collector's do."""
    load, config = engine.load_at_last_finish, engine.config
    page = Exposition(model_name=config.model, engine_type="pytorch")
    page.gauge("trtllm_num_requests_running", load.running)
    page.gauge("trtllm_num_requests_waiting", load.waiting)
    page.gauge("trtllm_max_num_active_requests", config.steps.max_sequences)
    page.gauge("trtllm_kv_cache_max_blocks", config.kv_capacity_tokens // config.block_size)
    page.gauge("trtllm_kv_cache_tokens_per_block", config.block_size)
    page.gauge("trtllm_num_paused_requests", load.paused)
    page.gauge("trtllm_kv_cache_utilization", load.kv_tokens_held / config.kv_capacity_tokens)
    return str(page)


def vllm_text(engine: EmulatedEngine) -> str:
    """Its `/metrics`."""
    load, config = engine.load, engine.config
    page = Exposition(engine="0", model_name=config.model)
    page.gauge("vllm:num_requests_running", load.running)
    page.gauge("vllm:num_requests_waiting", load.waiting)
    page.gauge("vllm:kv_cache_usage_perc", load.kv_tokens_held / config.kv_capacity_tokens)
    page.counter("vllm:prefix_cache_queries_total", engine.core.cache.queried_tokens)
    page.counter("vllm:prefix_cache_hits_total", engine.core.cache.hit_tokens)
    page.counter("vllm:num_preemptions_total", engine.core.preemptions)
    page.counter("vllm:generation_tokens_total", engine.generated_tokens)
    page.counter("vllm:request_success_total", engine.finished, finished_reason="length")
    blocks = {
        "block_size": str(config.block_size),
        "num_gpu_blocks": str(config.kv_capacity_tokens // config.block_size),
    }
    page.gauge("vllm:cache_config_info", 1, **blocks, enable_prefix_caching=str(config.prefix_cache))
    return str(page)


def sglang_text(engine: EmulatedEngine) -> str:
    """Its `/metrics`."""
    load, config = engine.load, engine.config
    page = Exposition(model_name=config.model, engine_type="unified", tp_rank="0")
    page.gauge("sglang:num_running_reqs", load.running)
    page.gauge("sglang:num_queue_reqs", load.waiting)
    page.gauge("sglang:token_usage", load.kv_tokens_held / config.kv_capacity_tokens)
    page.gauge("sglang:max_total_num_tokens", config.kv_capacity_tokens)
    page.gauge("sglang:kv_available_tokens", config.kv_capacity_tokens - load.kv_tokens_held)
    page.gauge("sglang:num_retracted_reqs", load.paused)
    page.counter("sglang:num_retracted_requests_total", engine.core.preemptions)
    return str(page)


_WORKER = {
    "target_namespace": "dynamo",
    "target_component": "backend",
    "target_endpoint": "generate",
    "worker_type": "decode",
    "router_worker_id": "1",
    "state": "available",
    "reason": "none",
}


def dynamo_text(engine: EmulatedEngine) -> str:
    """The frontend's `/metrics`."""
    load, config = engine.load, engine.config
    page = Exposition(model=config.model)
    page.gauge("dynamo_frontend_model_max_num_seqs", config.steps.max_sequences)
    page.gauge("dynamo_frontend_model_total_kv_blocks", config.kv_capacity_tokens // config.block_size)
    page.gauge("dynamo_frontend_model_kv_cache_block_size", config.block_size)
    if not config.lists_workers:
        page.gauge("dynamo_frontend_router_worker_state", 1, **_WORKER)
    # Without the router's queue requests wait in the workers, which the frontend does not show.
    pending = load.waiting if config.scheduling is Scheduling.PRIORITY else 0
    page.gauge("dynamo_frontend_router_queue_pending_requests", pending, worker_type="decode")
    return str(page)


METRICS_TEXT: Mapping[type[Engine], tuple[str, Callable[[EmulatedEngine], str]]] = {
    TensorRtLlm: ("/prometheus/metrics", trtllm_text),
    Vllm: ("/metrics", vllm_text),
    Sglang: ("/metrics", sglang_text),
    Dynamo: ("/metrics", dynamo_text),
}
"""Where each engine has its Prometheus text, and what writes it."""
