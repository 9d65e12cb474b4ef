"""How many tokens a request will hold: its prompt and its maximum output, for every sequence it starts.

Prompts are exact where they are token ids. Text is counted by its UTF-8 bytes at 4 bytes a token, the figure that other
gateways use too, corrected per model by what the engine's `usage` reports. With a tokenizer (the extra `tokenizers`) it
is counted for real, sampled where it is long.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

from sidecar.payload import Payload

BYTES_PER_TOKEN = 4.0
LEARNING_RATE = 0.1
"""Weight of the newest observation: about ten requests make a model's ratio its own."""
PLAUSIBLE_BYTES_PER_TOKEN = (1.0, 16.0)
MODELS_REMEMBERED = 64
"""Model names come from clients; only answered requests teach, and the least recently used model is forgotten."""
LONGEST_MODEL_NAME = 256
"""Characters. A longer name teaches nothing: no model has one, and what is remembered must stay small."""
SAMPLED_ABOVE = 32_768
"""Characters up to which a tokenizer reads the whole text: about 30 ms. Longer text is sampled, and extrapolated."""


class TextCounter(Protocol):
    """Counts the tokens of a text, by a tokenizer."""

    async def count(self, text: str) -> int:
        """Tokens in `text`. Does not block the event loop."""


class Estimator:
    """Sizes requests, and learns from what they turned out to be. One per process; not thread-safe."""

    def __init__(self, counter: TextCounter | None = None) -> None:
        self.counter = counter
        self._bytes_per_token: OrderedDict[str | None, float] = OrderedDict()

    def prompt_tokens(self, payload: Payload) -> int:
        """Tokens of all prompts together, by their bytes."""
        if not payload.prompt_bytes:
            return payload.prompt_tokens
        ratio = self._bytes_per_token.get(payload.model, BYTES_PER_TOKEN)
        return payload.prompt_tokens + int(payload.prompt_bytes / ratio) + 1

    async def counted_prompt_tokens(self, payload: Payload, counter: TextCounter) -> int:
        """Tokens of all prompts together, by a tokenizer."""
        return payload.prompt_tokens + (await counter.count(payload.text()) if payload.prompt_bytes else 0)

    def learn(self, payload: Payload, prompt_tokens: int) -> None:
        """Takes in the engine's own count of a prompt that was pure text."""
        if payload.prompt_tokens or not payload.prompt_bytes or prompt_tokens < 1:
            return
        if payload.model is not None and len(payload.model) > LONGEST_MODEL_NAME:
            return
        least, most = PLAUSIBLE_BYTES_PER_TOKEN
        seen = min(most, max(least, payload.prompt_bytes / prompt_tokens))
        ratio = self._bytes_per_token.pop(payload.model, BYTES_PER_TOKEN)
        self._bytes_per_token[payload.model] = ratio + LEARNING_RATE * (seen - ratio)
        if len(self._bytes_per_token) > MODELS_REMEMBERED:
            self._bytes_per_token.popitem(last=False)


def tokens_to_hold(payload: Payload, prompt_tokens: int, default_output_tokens: int) -> int:
    """Prompt and output, for every choice. `prompt_tokens` covers all prompts; each produces its own output."""
    output = default_output_tokens if payload.max_output_tokens is None else payload.max_output_tokens
    return max(1, (prompt_tokens + payload.prompts * output) * payload.choices)


class NoTokenizer(ValueError):
    """The policy's tokenizer cannot be used; the text says why, and what to do."""


class TokenizerCounter:
    """Counts with a `tokenizer.json`. Needs the extra `tokenizers`. Raises NoTokenizer."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise NoTokenizer(
                "the policy names a tokenizer, which needs an extra: pip install 'admission-sidecar[tokenizers]'"
            ) from None
        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing narrower
            raise NoTokenizer(f"{path}: not a tokenizer.json ({error})") from None
        # A file may carry both, for training: they would cap every count, or round it up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    async def count(self, text: str) -> int:
        """Tokens in `text`, in a thread; long text is counted on evenly spaced samples."""
        return await asyncio.to_thread(self._count, text)

    def _count(self, text: str) -> int:
        if len(text) <= SAMPLED_ABOVE:
            return len(self._tokenizer.encode(text, add_special_tokens=True).ids)
        samples, width = 8, SAMPLED_ABOVE // 8
        spacing = (len(text) - width) // (samples - 1)
        pieces = [text[index * spacing : index * spacing + width] for index in range(samples)]
        counted = sum(len(self._tokenizer.encode(piece, add_special_tokens=False).ids) for piece in pieces)
        return round(counted * len(text) / (samples * width))
