"""What an engine says about itself: models, health, its arguments, its schema. Only what a client can probe."""

from __future__ import annotations

from typing import Any

from sidecar.emulator.config import EmulatorConfig, Scheduling
from sidecar.emulator.dialect import INT64_MAX, INT64_MIN, Dialect
from sidecar.policy.policy import EngineName

VERSIONS = {
    EngineName.TENSORRT_LLM: "1.4.0rc1",
    EngineName.VLLM: "0.33.0",
    EngineName.SGLANG: "0.5.23",
    EngineName.DYNAMO: "1.6.1",
}
"""The versions whose contracts are emulated."""


def models(config: EmulatorConfig, dialect: Dialect, created: int) -> dict[str, Any]:
    """`/v1/models`: the one model. Any other name is served all the same."""
    card: dict[str, Any] = {"id": config.model, "object": "model", "created": created, "owned_by": dialect.owned_by}
    if config.engine in (EngineName.VLLM, EngineName.SGLANG):
        card["max_model_len"] = config.context_tokens
    return {"object": "list", "data": [card]}


def server_info(config: EmulatorConfig) -> dict[str, Any] | None:
    """`/server_info`; None where the engine has none. TensorRT-LLM's does not tell its queue's policy."""
    if config.engine is EngineName.TENSORRT_LLM:
        return {
            "disaggregated_params": None,
            "max_batch_size": config.steps.max_num_seqs,
            "kv_cache_hash_algo": "default",
            "tokens_per_block": 32,
        }
    if config.engine is not EngineName.SGLANG:
        return None
    return {
        "model_path": config.model,
        "served_model_name": config.model,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": config.scheduling is Scheduling.PRIORITY,
        "schedule_low_priority_values_first": False,
        "default_priority_value": config.default_priority,
        "priority_scheduling_preemption_threshold": 10,
        "disable_priority_preemption": True,  # what is emulated: nothing that runs is preempted
        "max_queued_requests": config.max_queued,
        "max_running_requests": config.steps.max_num_seqs,
        "version": VERSIONS[config.engine],
        "internal_states": [{"effective_max_running_requests_per_dp": config.steps.max_num_seqs}],
    }


def openapi(config: EmulatorConfig) -> dict[str, Any] | None:
    """`/openapi.json` as far as a probe reads it: has the chat request a priority? None for Dynamo's frontend."""
    if config.engine is EngineName.DYNAMO:
        return None
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


def _priority_schema(engine: EngineName) -> dict[str, Any]:
    if engine is EngineName.TENSORRT_LLM:
        number = {"type": "number", "minimum": 0.0, "maximum": 1.0}
        return {"anyOf": [number, {"type": "null"}], "title": "Priority"}
    if engine is EngineName.VLLM:
        return {"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MAX, "default": 0, "title": "Priority"}
    return {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Priority"}
