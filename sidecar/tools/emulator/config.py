"""Configuration of the emulator: the engine, its switches, its speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sidecar.engines import Engine, NoEngine
from sidecar.tools.emulator.scheduler import StepModel


class Scheduling(str, Enum):
    """The engine's waiting queue: by priority (a switch that every engine has off by default) or first come."""

    PRIORITY = "priority"
    FCFS = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorConfig:
    """One emulated engine. Raises ValueError for a combination that no engine has.

    `max_queued` bounds the queue as that engine would (None: unbounded): vLLM counts waiting and running sequences,
    SGLang and Dynamo the waiting ones, TensorRT-LLM refuses embeddings only. `output_tokens` is what a request without
    a maximum of its own produces. `tokens_per_chunk` coalesces a stream; its first token still travels alone.
    `priority_field` False is a TensorRT-LLM from before the field, which refuses it. `header_overrides` is SGLang's
    SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES, `default_priority` its --default-priority-value, `low_values_first` its
    --schedule-low-priority-values-first. `lists_workers` False is a Dynamo from 1.7 on, whose /health lists no workers:
    its /metrics has the state of each. `abort_latency_s` is how long the engine computes on after its client's
    disconnect. `response_store` keeps background responses: vLLM's VLLM_ENABLE_RESPONSES_API_STORE, SGLang's
    --enable-response-store.
    """

    engine: type[Engine]
    scheduling: Scheduling = Scheduling.PRIORITY
    steps: StepModel = field(default_factory=StepModel)
    max_queued: int | None = None
    output_tokens: int = 64
    context_tokens: int = 131_072
    tokens_per_chunk: int = 1
    model: str = "emulated"
    priority_field: bool = True
    header_overrides: bool = False
    default_priority: int | None = None
    low_values_first: bool = False
    lists_workers: bool = True
    abort_latency_s: float = 0.0
    response_store: bool = False

    def __post_init__(self) -> None:
        if self.engine is NoEngine:
            raise ValueError("choose an engine to emulate: tensorrt-llm, vllm, sglang or dynamo")
        if self.max_queued is not None and self.max_queued < 0:
            raise ValueError("max_queued must not be negative; None is unbounded")
        if self.abort_latency_s < 0:
            raise ValueError("abort_latency_s must not be negative; 0 aborts at once")
        if min(self.output_tokens, self.context_tokens, self.tokens_per_chunk) < 1:
            raise ValueError("output_tokens, context_tokens and tokens_per_chunk must be at least 1")

    @property
    def kv_capacity_tokens(self) -> int:
        """Denominator of the KV metrics; unbounded KV counts as room for every slot's whole context."""
        return self.steps.kv_tokens or self.steps.max_num_seqs * self.context_tokens
