"""Configuration of the emulator: the engine, its switches, its speed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from sidecar.engines import Dynamo, Engine, NoPriorityEngine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator.faults import Fault
from sidecar.tools.step_model.kv_cache import KvCache
from sidecar.tools.step_model.model import MOST, EngineModel

BLOCK_TOKENS: Mapping[type[Engine], int] = {TensorRtLlm: 32, Vllm: 16, Sglang: 1, Dynamo: 16}
"""Each engine's default: `tokens_per_block`, `CacheConfig.DEFAULT_BLOCK_SIZE`, `page_size`; Dynamo's is its vLLM's."""


class Scheduling(str, Enum):
    """The engine's waiting queue: by priority (a switch that every engine has off by default) or first come."""

    PRIORITY = "priority"
    FCFS = "fcfs"


class StepModel(EngineModel, frozen=True, kw_only=True):
    """An engine model with the defaults of a small one on one GPU: 20 ms a step, 8 sequences, KV never the limit."""

    name: str = "emulated"
    step_us: float = 20_000.0
    kv_tokens: int = MOST
    block_tokens: int = 1
    max_sequences: int = 8
    chunk_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorConfig:
    """One emulated engine. Raises ValueError for a combination that no engine has.

    `steps` says how fast and how wide it is; its blocks are those of `block_tokens` here. `speed` 0.25 makes every step
    four times as long.

    `max_queued` bounds the queue as that engine would (None: unbounded): vLLM counts waiting and running sequences,
    SGLang and Dynamo the waiting ones, TensorRT-LLM refuses embeddings only. `output_tokens` is what a request without
    a maximum of its own produces. `tokens_per_chunk` coalesces a stream; its first token still travels alone.
    `priority_field` False is a TensorRT-LLM from before the field, which refuses it. `header_overrides` is SGLang's
    SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES, `default_priority` its --default-priority-value, `low_values_first` its
    --schedule-low-priority-values-first. `lists_workers` False is a Dynamo from 1.7 on, whose /health lists no workers:
    its /metrics has the state of each. `abort_latency_s` is how long the engine computes on after its client's
    disconnect. `response_store` keeps background responses: vLLM's VLLM_ENABLE_RESPONSES_API_STORE, SGLang's
    --enable-response-store.

    `preempts` takes KV when it is written, and preempts a running sequence when there is none, as vLLM and SGLang do,
    and TensorRT-LLM with `capacity_scheduler_policy: MAX_UTILIZATION`. Without it prompt and output are reserved at
    once.

    `prefix_cache` keeps the token blocks of prompts and outputs in the KV cache, in blocks of `block_tokens` (None: the
    engine's own size). Real engines have it on by default. Here it is off by default, because experiments send the same
    text again and again, as no one's users do. `cache_report` says in `usage` what was found: vLLM's
    --enable-prompt-tokens-details, SGLang's --enable-cache-report, both off by default. `shutdown_timeout_s` is how
    long requests may run after SIGTERM (None: as long as this engine lets them by default, see `server.py`). `name`
    tells several engines apart. `faults` are set from the start.
    """

    engine: type[Engine]
    scheduling: Scheduling = Scheduling.PRIORITY
    steps: EngineModel = field(default_factory=StepModel)
    speed: float = 1.0
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
    preempts: bool = False
    prefix_cache: bool = False
    block_tokens: int | None = None
    cache_report: bool = False
    shutdown_timeout_s: float | None = None
    name: str = "engine"
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.engine is NoPriorityEngine:
            raise ValueError("choose an engine to emulate: tensorrt-llm, vllm, sglang or dynamo")
        if self.max_queued is not None and self.max_queued < 0:
            raise ValueError("max_queued must not be negative; None is unbounded")
        if self.abort_latency_s < 0:
            raise ValueError("abort_latency_s must not be negative; 0 aborts at once")
        if min(self.output_tokens, self.context_tokens, self.tokens_per_chunk) < 1:
            raise ValueError("output_tokens, context_tokens and tokens_per_chunk must be at least 1")
        if self.shutdown_timeout_s is not None and self.shutdown_timeout_s < 0:
            raise ValueError("shutdown_timeout_s must not be negative; 0 ends what runs at once")
        if self.cache_report and self.engine not in (Vllm, Sglang):
            raise ValueError(f"{self.engine.title} always reports cached tokens; it has no switch for it")
        if not 0 < self.speed < math.inf:
            raise ValueError("speed must be above 0; 1 is as the step times say")
        if self.preempts and not self.has_kv_limit:
            raise ValueError("preempts needs kv_tokens: an unbounded KV cache is never full")
        self._check_blocks()

    def _check_blocks(self) -> None:
        if self.block_tokens is not None and not self.prefix_cache:
            raise ValueError("block_tokens is the size of the prefix cache's blocks: it needs prefix_cache")
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError("block_tokens must be at least 1")
        if self.kv_capacity_tokens < 1:
            raise ValueError(f"kv_tokens must be at least one block of {self.block_size} tokens")

    @property
    def has_kv_limit(self) -> bool:
        """True if the KV cache has a size of its own."""
        return self.steps.kv_tokens < MOST

    @property
    def block_size(self) -> int:
        """Tokens of a KV block, as the engine's pages report it; 1 without a prefix cache."""
        if not self.prefix_cache:
            return 1
        return self.block_tokens or BLOCK_TOKENS[self.engine]

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of the KV cache, in whole blocks; unbounded KV counts as room for every slot's whole context."""
        unbounded = self.steps.max_sequences * self.context_tokens
        tokens = self.steps.kv_tokens if self.has_kv_limit else unbounded
        return tokens // self.block_size * self.block_size

    def kv_cache(self) -> KvCache:
        """A new, empty KV cache."""
        return KvCache(self.kv_capacity_tokens, self.block_size, caches_prefixes=self.prefix_cache)
