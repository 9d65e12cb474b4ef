"""What is used where TensorRT-LLM cannot be imported: no model, only the part of its interface that app.py calls.

`generate_async` takes `priority` as TensorRT-LLM does: a float in [0, 1], higher is served first, 0.5 by default;
anything else is a ValueError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StandInSamplingParams:
    """As `tensorrt_llm.SamplingParams`."""

    max_tokens: int = 32


@dataclass(frozen=True)
class StandInCompletion:
    """As `tensorrt_llm.llmapi.CompletionOutput`: `text` so far, and `text_diff` since the last one."""

    text: str
    text_diff: str


@dataclass(frozen=True)
class StandInOutput:
    """As `tensorrt_llm.llmapi.RequestOutput`."""

    outputs: list[StandInCompletion]


class StandInRequest:
    """What `generate_async` returns: awaited it gives the whole answer, iterated its pieces."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def __await__(self) -> Generator[Any, None, StandInOutput]:
        return self._whole().__await__()

    async def __aiter__(self) -> AsyncIterator[StandInOutput]:
        text = ""
        for word in self._words:
            await asyncio.sleep(0.01)
            text += word
            yield StandInOutput([StandInCompletion(text, word)])

    async def _whole(self) -> StandInOutput:
        return [output async for output in self][-1]


class StandInLLM:
    """As `tensorrt_llm.LLM`. Its answers say which priority they were asked with."""

    def __init__(self, model: str, **engine_arguments: Any) -> None:
        self.model = model
        self.engine_arguments = engine_arguments

    def generate_async(
        self,
        inputs: str,
        sampling_params: StandInSamplingParams | None = None,
        *,
        streaming: bool = False,  # noqa: ARG002  # the caller shows which it wants by awaiting or iterating
        priority: float = 0.5,
    ) -> StandInRequest:
        """Starts a request. Raises ValueError for a priority outside [0, 1]."""
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be in [0.0, 1.0], got {priority}")
        words = f"served at priority {priority:g} : {inputs}".split()
        limit = (sampling_params or StandInSamplingParams()).max_tokens
        return StandInRequest([f"{word} " for word in words[:limit]])
