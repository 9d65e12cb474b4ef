"""Pages of the emulated engine about itself: models, health, arguments, schema. Only what a client can read."""

from __future__ import annotations

from typing import Any

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator.config import EmulatorConfig, Scheduling
from sidecar.tools.emulator.dialects.base import INT64_MAX, INT64_MIN, Dialect
from sidecar.tools.emulator.engine import Load

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
            "max_batch_size": config.steps.max_num_seqs,
            "kv_cache_hash_algo": "default",
            "tokens_per_block": 32,
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
        "max_running_requests": config.steps.max_num_seqs,
        "version": VERSIONS[config.engine],
        "internal_states": [
            {
                "effective_max_running_requests_per_dp": config.steps.max_num_seqs,
                "memory_usage": {
                    "weight": 0.0,
                    "kvcache": 0.0,
                    "token_capacity": config.kv_capacity_tokens,
                    "graph": 0.0,
                },
            }
        ],
    }


def sglang_loads(config: EmulatorConfig, load: Load) -> dict[str, Any]:
    """SGLang's `/v1/loads`: one entry per data-parallel rank, of which there is one."""
    rank = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_total_reqs": load.running + load.waiting,
        "num_used_tokens": load.kv_tokens_held,
        "max_total_num_tokens": config.kv_capacity_tokens,
        "max_running_requests": config.steps.max_num_seqs,
    }
    return {"version": VERSIONS[config.engine], "dp_rank_count": 1, "loads": [rank]}


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
        properties["priority"] = _priority_schema(config.engine)
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


def _priority_schema(engine: type[Engine]) -> dict[str, Any]:
    if engine is TensorRtLlm:
        number = {"type": "number", "minimum": 0.0, "maximum": 1.0}
        return {"anyOf": [number, {"type": "null"}], "title": "Priority"}
    if engine is Vllm:
        return {"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MAX, "default": 0, "title": "Priority"}
    return {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Priority"}
