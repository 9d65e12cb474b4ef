"""The engine of the step model with the time of a step of one large model on four GPUs.

The time is a roofline: the larger of the time to read the weights and the KV cache in use, and the time of its
floating-point operations, plus a constant. It is a model, not a measurement; `Hardware` has its figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.tools.step_model.engine import PlanEnd, PlanStart, StepEngine
from sidecar.tools.step_model.kv_cache import KvCache
from sidecar.tools.step_model.model import MOST, EngineModel
from sidecar.tools.step_model.queue import Job, KeyQueue

BLOCK = 16
"""Tokens of a block: vLLM's default."""
PREFILL_TOKENS = 8192
"""Tokens that one step computes at most: vLLM's default max_num_batched_tokens of its server on an H100."""


@dataclass(frozen=True)
class Hardware:
    """What the time of a step depends on. Bytes, bytes a second, operations a second, seconds.

    The defaults are Qwen3-235B-A22B in FP8 on four H100 SXM: 235 GB of weights, which a batch of a hundred reads whole,
    22 billion active parameters, 94 layers with 4 KV heads of 128 in 16 bits. Data sheet: 3.35 TB/s and 1,979 TFLOP/s
    (FP8, dense) each; 80% and 50% of it are reached. 90% of the memory, less the weights and 2 GB of activations each,
    leave 64 GB: 330,000 tokens, or 660,000 with the KV cache in FP8.
    """

    kv_tokens: int = 330_000
    kv_bytes: int = 2 * 94 * 4 * 128 * 2
    weight_bytes: float = 235e9
    bytes_per_s: float = 0.8 * 4 * 3.35e12
    operations_per_token: float = 2 * 22e9
    operations_per_s: float = 0.5 * 4 * 1979e12
    step_s: float = 0.001

    def step_time_s(self, kv_used: int, tokens: int) -> float:
        """The time of a step that computes so many tokens with so many in the KV cache."""
        read_s = (self.weight_bytes + kv_used * self.kv_bytes) / self.bytes_per_s
        return self.step_s + max(read_s, tokens * self.operations_per_token / self.operations_per_s)


SMALL_KV = Hardware(660_000, kv_bytes=94 * 2 * 4 * 128)
"""The same with the KV cache in FP8: prompts of 12,000 tokens, and up to 126,000, need it."""


class RooflineEngine(StepEngine[Job]):
    """`prefills` says whether it computes prompts itself. Otherwise they come computed, from prefill engines.

    `used_tokens` are those of the running sequences, the newest included. `now_us`, `generated` tokens and
    `used_token_us` (used tokens times microseconds) add up over the run.
    """

    def __init__(self, hardware: Hardware, *, prefills: bool = False) -> None:
        model = EngineModel(
            name="roofline",
            step_us=0,
            kv_tokens=hardware.kv_tokens,
            block_tokens=BLOCK,
            max_sequences=MOST,
            chunk_tokens=PREFILL_TOKENS if prefills else MOST,
        )
        super().__init__(model, KeyQueue(), KvCache(hardware.kv_tokens, BLOCK), jumps=False)
        self.now_us = self.generated = self.used_tokens = self.used_token_us = 0
        self._hardware = hardware
        self._prefills = prefills
        self._came = 0

    @property
    def now_s(self) -> float:
        """The end of the last step."""
        return self.now_us / 1e6

    def add(self, job: Job) -> None:
        """A request arrives."""
        job.place = (), self._came
        self._came += 1
        self.push(job, self.now_us)

    def duration_us(self, start: PlanStart[Job]) -> int:
        """See `StepEngine`."""
        self.used_tokens += start.prefill_tokens - start.lost_tokens
        computed = sum(job.computing for job in self._prefilling if self._prefills or job.preemptions)
        time_s = self._hardware.step_time_s(self.used_tokens, computed + len(self._decoding))
        duration_us = max(1, round(time_s * 1e6))
        self.used_token_us += self.used_tokens * duration_us
        return duration_us

    def step(self) -> PlanEnd[Job]:
        """Computes one step."""
        self.begin(self.now_us)
        self.now_us = self.due_us or self.now_us
        found = self.advance()
        self.generated += len(found.emitted)
        self.used_tokens += len(found.emitted) - sum(job.tokens for job in found.finished)
        return found
