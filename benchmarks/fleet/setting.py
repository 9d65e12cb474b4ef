"""Setting of a run: the engines, the part of the trace, and how both are made small enough for two cores.

The engines are an uncalibrated step model in the trace's own time and tokens. Every length is multiplied by `scale` and
every time divided by `compression`, for the engines and for the trace alike, so that queues, hits and ratios stay what
they were. Figures are given in the trace's time again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. All but `compression` and `scale` are in the trace's time and tokens.

    `rate` is how much faster than recorded the trace is sent: 1.9 on four engines of this model is where round robin's
    and least requests' queues grow without end, and where a router that finds the prefixes has none. An engine
    prefills at most 15,800 tokens a second, so that the 99th percentile of the trace's prompts takes it 6 s alone.
    """

    trace: Path = TRACE
    first_row: int = 0
    requests: int = 4_000
    rate: float = 1.9
    seed: int = 1
    compression: float = 8.0
    scale: float = 1 / 8
    warm_up: float = 0.2
    """Share of the requests, from the first on, that find empty caches and are in no figure."""

    engines: int = 4
    cache_tokens: int = 4_000_000
    sequences: int = 128
    prefill_tokens_per_step: int = 2_048
    step_s: float = 0.015
    step_s_per_sequence: float = 0.0004
    step_s_per_prefill_token: float = 0.00005
    speeds: Sequence[float] = (1.0,)

    engine: str = "vllm"
    """The engines' dialect: some real routers know another one."""
    unprefilled_tokens: int = 8_000
    """Of the policy: `prefill`."""
    soon_s: float = 5.0
    """A first token within this time is soon."""

    @property
    def engine_tokens(self) -> int:
        """Tokens of an engine's KV cache as it is run."""
        return round(self.cache_tokens * self.scale)

    @property
    def engine_prefill(self) -> int:
        """The policy's `prefill` as it is run."""
        return round(self.unprefilled_tokens * self.scale)

    @property
    def block_tokens(self) -> int:
        """One block of the trace, as it is run; also the engines' block."""
        return round(TRACE_BLOCK_TOKENS * self.scale)

    def flags(self) -> Sequence[str]:
        """Arguments of `sidecar emulate` for one of the engines."""
        ms = 1_000 / self.compression
        found = {
            "--engine": self.engine,
            "--max-num-seqs": self.sequences,
            "--kv-tokens": self.engine_tokens,
            "--block-size": self.block_tokens,
            "--context-tokens": 200_000,
            "--tokens-per-chunk": 64,
            "--prefill-tokens-per-step": round(self.prefill_tokens_per_step * self.scale),
            "--step-ms": self.step_s * ms,
            "--step-ms-per-seq": self.step_s_per_sequence * ms,
            "--step-ms-per-prefill-token": self.step_s_per_prefill_token * ms / self.scale,
        }
        return [str(word) for pair in found.items() for word in pair] + ["--enable-prefix-caching", "--cache-report"]
