"""Token estimates: how many tokens a request will hold, for its prompt and for the output of every sequence.

Prompts of token ids are exact. Text is estimated from its UTF-8 bytes, at 4 bytes a token, the figure that other
gateways use too, corrected by the engine's reported `usage`. With a tokenizer (the extra `tokenizers`) its tokens are
counted; long text is sampled.

The correction belongs to one tenant and one model, so that no tenant's requests change another tenant's estimates. A
tenant begins at 4 bytes a token. Only a prompt that was decoded completely corrects the figure. Unknown fields count at
4 bytes a token at most, whatever was learned: their bytes may be denser than text.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict

from sidecar.payload.decode import Payload

BYTES_PER_TOKEN = 4.0
LEARNING_RATE = 0.1
"""Weight of the newest observation: after about ten requests the ratio is the model's own."""
PLAUSIBLE_BYTES_PER_TOKEN = (1.0, 16.0)
MODELS_REMEMBERED = 16
"""For each tenant. Model names come from clients, but only answered requests count, and a tenant's least recently used
model is forgotten."""
TENANTS_REMEMBERED = 4096
"""Tenants come from the policy, so no client can add one. With all of their models they take 20 MB at most."""
LONGEST_MODEL_NAME = 256
"""Characters. A longer name is not remembered: no model has one, and memory must stay small."""
SAMPLED_ABOVE = 32_768
"""Characters up to which a tokenizer reads the whole text: about 30 ms. Longer text is sampled, and extrapolated."""


class Estimator:
    """Sizes requests, and learns from the engine's counts. One per process; not thread-safe."""

    def __init__(self, counter: TokenizerCounter | None = None) -> None:
        self.counter = counter
        self._learned: OrderedDict[str, OrderedDict[str | None, float]] = OrderedDict()

    def bytes_per_token(self, tenant: str, model: str | None) -> float:
        """The ratio of a tenant's text for a model, as learned so far."""
        learned = self._learned.get(tenant)
        return BYTES_PER_TOKEN if learned is None else learned.get(model, BYTES_PER_TOKEN)

    def prompt_tokens(self, payload: Payload, tenant: str) -> int:
        """Tokens of all prompts of a tenant's request together, by their bytes."""
        if not payload.prompt_bytes and not payload.unread_bytes:
            return payload.prompt_tokens
        ratio = self.bytes_per_token(tenant, payload.model)
        text = int(payload.prompt_bytes / ratio) + 1 if payload.prompt_bytes else 0
        return payload.prompt_tokens + text + _unread_tokens(payload, ratio)

    async def counted_prompt_tokens(self, payload: Payload, counter: TokenizerCounter) -> int:
        """Tokens of all prompts together, by a tokenizer."""
        text = await counter.count(payload.text()) if payload.prompt_bytes else 0
        return payload.prompt_tokens + text + _unread_tokens(payload, BYTES_PER_TOKEN)

    def learn(self, payload: Payload, tenant: str, prompt_tokens: int) -> None:
        """Learns from the engine's own count of a prompt, where that was text and was decoded completely."""
        if not payload.is_understood or not payload.prompt_bytes or prompt_tokens < 1:
            return
        if payload.model is not None and len(payload.model) > LONGEST_MODEL_NAME:
            return
        least, most = PLAUSIBLE_BYTES_PER_TOKEN
        seen = min(most, max(least, payload.prompt_bytes / prompt_tokens))
        learned = self._learned.setdefault(tenant, OrderedDict())
        self._learned.move_to_end(tenant)
        ratio = learned.pop(payload.model, BYTES_PER_TOKEN)
        learned[payload.model] = ratio + LEARNING_RATE * (seen - ratio)
        if len(learned) > MODELS_REMEMBERED:
            learned.popitem(last=False)
        if len(self._learned) > TENANTS_REMEMBERED:
            self._learned.popitem(last=False)


def _unread_tokens(payload: Payload, ratio: float) -> int:
    return math.ceil(payload.unread_bytes / min(ratio, BYTES_PER_TOKEN))


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
