"""One HTTP request inside the engine: its sequences, and the delivery of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.tools.emulator.dialects.base import CachedPrompt, Dialect, EngineRefusal
from sidecar.tools.emulator.prompt_blocks import PromptChain
from sidecar.tools.emulator.request import EngineRequest
from sidecar.tools.step_model.kv_cache import BlockHash
from sidecar.tools.step_model.queue import Job, Rank

_WORDS = " the quick brown fox jumps over a lazy dog while seven engines wait for tokens and none starves in the queue"
WORDS = tuple(f" {word}".encode() for word in _WORDS.split())
"""The text of every answer, in turn."""


def token_text(first: int, count: int) -> bytes:
    """The text of tokens `first` to `first + count - 1`, counted from 0. Needs no JSON escaping."""
    return b"".join(WORDS[number % len(WORDS)] for number in range(first, first + count))


@dataclass(frozen=True, slots=True)
class ServedGeneration:
    """A line of the engine's log, for tests and experiments. Times are the event loop's, in seconds.

    `admitted_s` is when its first sequence got a slot, `first_token_s` when its first token was ready; None for a
    request that ended before.
    """

    request_id: str
    priority: float | None
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float
    aborted: bool


class GeneratedChoice(Job):
    """One choice of one prompt. `sent` of its `generated` tokens were already written to the client.

    `chain` is the prompt's, where the engine caches prefixes. `expected_hit` is what a waiting prompt would find in the
    cache.
    """

    __slots__ = ("chain", "expected_hit", "generated", "generation", "index", "sent")

    def __init__(
        self, generation: Generation, index: int, prompt_tokens: int, output_tokens: int, chain: PromptChain | None
    ) -> None:
        super().__init__(prompt_tokens, output_tokens, chain.hashes if chain else ())
        self.generation = generation
        self.index = index
        self.chain = chain
        self.expected_hit = 0
        self.generated = self.sent = 0

    @property
    def is_complete(self) -> bool:
        """True if every token was generated."""
        return self.generated == self.output

    @property
    def unprefilled_tokens(self) -> int:
        """Prompt tokens that are neither computed nor cached; while the choice waits, as far as is known."""
        hit = self.expected_hit if self.holding is None else 0
        return self.prefill_tokens - hit - self.prefilled + self.computing

    def preempt(self) -> int:
        """See `Job`. What it would find when it is admitted again is not looked up before."""
        self.expected_hit = 0
        return super().preempt()

    @property
    def found_tokens(self) -> int:
        """Tokens that were found in the prefix cache when it was admitted; 0 while it waits."""
        return 0 if self.holding is None else self.holding.cached_tokens

    @property
    def publishable_tokens(self) -> int:
        """Prompt tokens in full blocks that are in the cache now, because of this choice or of others."""
        if self.chain is None:
            return 0
        return min(self.prefilled // self.chain.block_tokens, len(self.blocks)) * self.chain.block_tokens

    def computed_blocks(self) -> Sequence[BlockHash]:
        """See `Job`: the output's text continues the prompt's, as the client's next turn will."""
        if self.chain is None or not self.emitted:
            return self.blocks
        return self.chain.with_output(token_text(0, self.emitted))

    def due(self) -> int:
        """How many tokens the stream's next chunk has; 0 while it is not full. The first token travels alone.

        Its time is the measured one.
        """
        pending = self.generated - self.sent
        if pending and not self.sent:
            return 1
        if pending >= self.generation.tokens_per_chunk:
            return self.generation.tokens_per_chunk
        return pending if self.is_complete else 0


class Generation:
    """All choices of one request. The engine produces, one task waits for the product.

    `over` once nothing more will come; `refusal` says why where the engine threw the request out. `is_cut` where a
    stopping engine ended it as if it were complete. `is_deserted` once no client reads it.
    """

    __slots__ = (
        "_waiter", "admitted_s", "arrival_s", "ask", "choices", "dialect", "first_token_s", "fresh", "is_cut",
        "is_deserted", "over", "rank", "refusal", "remaining", "request_id", "tokens_per_chunk",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        ask: EngineRequest,
        rank: Rank,
        dialect: Dialect,
        chains: Sequence[PromptChain] = (),
        *,
        output_tokens: int,
        arrival_s: float,
        tokens_per_chunk: int,
    ) -> None:
        self.request_id = request_id
        self.ask = ask
        self.rank = rank
        self.dialect = dialect
        self.arrival_s = arrival_s
        self.tokens_per_chunk = tokens_per_chunk
        known = [*chains, *[None] * (len(ask.prompts) - len(chains))]
        prompts = [prompt for prompt in zip(ask.prompts, known, strict=True) for _ in range(ask.choices)]
        self.choices = [
            GeneratedChoice(self, index, prompt, output_tokens, chain) for index, (prompt, chain) in enumerate(prompts)
        ]
        self.remaining = len(self.choices)
        self.fresh: list[GeneratedChoice] = []
        self.first_token_s: float | None = None
        self.admitted_s: float | None = None
        self.over = self.is_cut = self.is_deserted = False
        self.refusal: EngineRefusal | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.generated for choice in self.choices)

    @property
    def cached(self) -> Sequence[CachedPrompt]:
        """Tokens that each prompt found in the prefix cache, and left there. Of several choices the first one
        counts.
        """
        return [
            CachedPrompt(first.cached_tokens, max(first.publishable_tokens - first.cached_tokens, 0))
            for first in self.choices[:: self.ask.choices]
        ]

    def emit(self, choice: GeneratedChoice) -> None:
        """Called for every token: wakes a stream when a chunk is due. Others wake at their end."""
        if self.ask.stream and not self.is_deserted and choice.due():
            self.fresh.append(choice)
            self._wake()

    def end(self, refusal: EngineRefusal | None = None) -> None:
        """Nothing more will come."""
        self.over = True
        self.refusal = refusal
        self._wake()

    def cut(self) -> None:
        """The engine stops: what there is becomes the whole answer."""
        self.is_cut = True
        self.end()

    def desert(self) -> None:
        """No client reads it any more; the engine may go on."""
        self.is_deserted = True
        self.fresh = []
        self._wake()

    async def ready(self) -> None:
        """Waits until there is something to write, or nothing will be written any more."""
        if not self.fresh and not self.over and not self.is_deserted:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def take(self) -> list[GeneratedChoice]:
        """Waits for choices with a chunk to write; an empty list says that it is over."""
        await self.ready()
        fresh, self.fresh = self.fresh, []
        return fresh

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
