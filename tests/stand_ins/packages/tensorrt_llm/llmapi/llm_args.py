"""From tensorrt_llm/llmapi/llm_args.py: what the server reads of `LLM.args`, and what the example sets.

Field names, values and that extra keys are forbidden, as in the versions after pull requests 12362 and 15329.
"""

from enum import Enum

from pydantic import BaseModel, ConfigDict, Field


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WaitingQueuePolicy(str, Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class CapacitySchedulerPolicy(str, Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float = Field(default=0.9, ge=0, le=1)


class SchedulerConfig(StrictBaseModel):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    waiting_queue_policy: WaitingQueuePolicy = WaitingQueuePolicy.FCFS


class TorchLlmArgs(StrictBaseModel):
    model: str
    backend: str = "pytorch"
    tensor_parallel_size: int = 1
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    enable_chunked_prefill: bool = False
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    num_serve_frontends: int = 1
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    return_perf_metrics: bool = False
    enable_iter_perf_stats: bool = False
    # Of the stand-in: how long a token takes.
    stand_in_step_s: float = 0.002
