"""One HTTP request inside the engine: its sequences, and the delivery of their tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sidecar.tools.emulator.dialects.base import EngineRefusal
from sidecar.tools.emulator.request import EngineRequest
from sidecar.tools.emulator.scheduler import Rank, Sequence


@dataclass(frozen=True, slots=True)
class Served:
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


class Choice(Sequence):
    """One choice of one prompt. `sent` counts the tokens that were already written to the client."""

    __slots__ = ("generation", "index", "sent")

    def __init__(self, generation: Generation, index: int, prompt_tokens: int, output_tokens: int) -> None:
        super().__init__(prompt_tokens, output_tokens)
        self.generation = generation
        self.index = index
        self.sent = 0

    def due(self) -> int:
        """How many tokens the stream's next chunk has; 0 while it is not full. The first token travels alone.

        Its time is the measured one.
        """
        pending = self.emitted - self.sent
        if pending and not self.sent:
            return 1
        if pending >= self.generation.tokens_per_chunk:
            return self.generation.tokens_per_chunk
        return pending if self.emitted == self.output_tokens else 0


class Generation:
    """All choices of one request. The engine produces, one task waits for the product.

    `over` once nothing more will come; `refusal` says why where the engine threw the request out. `is_deserted` once no
    client reads it.
    """

    __slots__ = (
        "_waiter", "admitted_s", "arrival_s", "ask", "choices", "first_token_s", "fresh", "is_deserted", "over", "rank",
        "refusal", "remaining", "request_id", "tokens_per_chunk",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        ask: EngineRequest,
        rank: Rank,
        *,
        output_tokens: int,
        arrival_s: float,
        tokens_per_chunk: int,
    ) -> None:
        self.request_id = request_id
        self.ask = ask
        self.rank = rank
        self.arrival_s = arrival_s
        self.tokens_per_chunk = tokens_per_chunk
        prompts = [prompt for prompt in ask.prompts for _ in range(ask.choices)]
        self.choices = [Choice(self, index, prompt, output_tokens) for index, prompt in enumerate(prompts)]
        self.remaining = len(self.choices)
        self.fresh: list[Choice] = []
        self.first_token_s: float | None = None
        self.admitted_s: float | None = None
        self.over = self.is_deserted = False
        self.refusal: EngineRefusal | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.emitted for choice in self.choices)

    def emit(self, choice: Choice) -> None:
        """Called for every token: wakes a stream when a chunk is due. Others wake at their end."""
        if self.ask.stream and not self.is_deserted and choice.due():
            self.fresh.append(choice)
            self._wake()

    def end(self, refusal: EngineRefusal | None = None) -> None:
        """Nothing more will come."""
        self.over = True
        self.refusal = refusal
        self._wake()

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

    async def take(self) -> list[Choice]:
        """Waits for choices with a chunk to write; an empty list says that it is over."""
        await self.ready()
        fresh, self.fresh = self.fresh, []
        return fresh

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
