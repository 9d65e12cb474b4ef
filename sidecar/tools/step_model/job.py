"""One request in an engine: its prompt, its output, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from sidecar.tools.step_model.kv_cache import BlockHash, Holding

Key: TypeAlias = tuple[float, ...]


class Job:
    """One request, which engines change. An `output` of 0 is a pooling request: done with its prompt, without a token.

    `blocks` has the hashes of the prompt's full blocks, where the engine caches prefixes; `cached_tokens` of it were
    found when the request first ran. `place` is its place in the engine's order, which it keeps. `prefilled` tokens are
    computed or found, of which `computing` are in the step that runs. After `preemptions` its first `recomputed` output
    tokens are computed like a prompt.

    `stretches` are the engine's steps, as ranges, at whose ends it got a token; `started_us` is when it first ran.
    `base`, `emitted` and `epoch` are the engine's: see `StepEngine.length`.
    """

    __slots__ = (
        "base", "blocks", "cached_tokens", "computing", "emitted", "epoch", "holding", "is_decoding", "output", "place",
        "preemptions", "prefilled", "prompt", "recomputed", "started_us", "stretches",
    )  # fmt: skip

    def __init__(self, prompt: int, output: int, blocks: Sequence[BlockHash] = ()) -> None:
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.place: tuple[Key, int] = ((), 0)
        self.emitted = self.base = self.epoch = self.prefilled = self.computing = self.recomputed = self.preemptions = 0
        self.cached_tokens = 0
        self.is_decoding = False
        self.holding: Holding | None = None
        self.started_us: int | None = None
        self.stretches: list[tuple[int, int]] = []

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt + self.output

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute before the next output token: the prompt, and after a preemption the output so far."""
        return self.prompt + self.recomputed

    def computed_blocks(self) -> Sequence[BlockHash]:
        """The hashes of the full blocks of the prompt, and of the output where it is known."""
        return self.blocks

    def preempt(self) -> int:
        """Everything that was computed is lost. Returns how many tokens more are to be computed than before."""
        before = self.prefill_tokens - self.prefilled
        self.preemptions += 1
        self.recomputed, self.prefilled, self.computing = self.emitted, 0, 0
        return self.prefill_tokens - before


J = TypeVar("J", bound=Job)
