"""Token estimates: how many tokens a request will hold, for its prompt and for the output of every sequence.

Prompts of token ids are exact. Text is estimated from its UTF-8 bytes, at 4 bytes a token, the figure that other
gateways use too, corrected by the engine's reported `usage`. With a tokenizer (the extra `tokenizers`) its tokens are
counted; long text is sampled.

The correction belongs to one tenant and one model, so that no tenant's requests change another tenant's estimates. A
tenant begins at the lower median of the tenants' ratios for the model, where 3 tenants have one, and else at 4 bytes a
token: every tenant has one vote, however much it sends, and the lower ratio means more tokens. Only a prompt that was
decoded completely corrects the figure. Unknown fields count at 4 bytes a token at most, whatever was learned: their
bytes may be denser than text.
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
FEWEST_TENANTS = 3
"""Tenants from which a model has a ratio for newcomers: of fewer, one would decide it."""
_STALE_SHARE = 8
"""The median is computed anew when so many times the changes since the last time are as many as the ratios."""
SAMPLED_ABOVE = 32_768
"""Characters up to which a tokenizer reads the whole text: about 30 ms. Longer text is sampled, and extrapolated."""


class Estimator:
    """Sizes requests, and learns from the engine's counts. One per process; not thread-safe."""

    def __init__(self, counter: TokenizerCounter | None = None) -> None:
        self.counter = counter
        self._learned: OrderedDict[str, OrderedDict[str | None, float]] = OrderedDict()
        self._models: dict[str | None, _ModelRatios] = {}

    def bytes_per_token(self, tenant: str, model: str | None) -> float:
        """The ratio of a tenant's text for a model, as learned so far."""
        learned = self._learned.get(tenant)
        ratio = None if learned is None else learned.get(model)
        if ratio is not None:
            return ratio
        ratios = self._models.get(model)
        return BYTES_PER_TOKEN if ratios is None else ratios.median

    def prompt_tokens(self, payload: Payload, tenant: str) -> int:
        """Tokens of all prompts of a tenant's request together, by their bytes."""
        if not payload.prompt_bytes and not payload.unread_bytes:
            return payload.prompt_tokens
        ratio = self.bytes_per_token(tenant, payload.model)
        text = int(payload.prompt_bytes / ratio) + 1 if payload.prompt_bytes else 0
        unread = _unread_tokens(payload, ratio) if payload.unread_bytes else 0
        return payload.prompt_tokens + text + unread

    async def counted_prompt_tokens(self, payload: Payload, counter: TokenizerCounter) -> int:
        """Tokens of all prompts together, by a tokenizer."""
        text = await counter.count(payload.text()) if payload.prompt_bytes else 0
        return payload.prompt_tokens + text + _unread_tokens(payload, BYTES_PER_TOKEN)

    def learn(self, payload: Payload, tenant: str, prompt_tokens: int) -> None:
        """Learns from the engine's own count of a prompt, where that was text and was decoded completely."""
        if not payload.is_understood or not payload.prompt_bytes or prompt_tokens < 1:
            return
        model = payload.model
        if model is not None and len(model) > LONGEST_MODEL_NAME:
            return
        least, most = PLAUSIBLE_BYTES_PER_TOKEN
        seen = payload.prompt_bytes / prompt_tokens
        if not least <= seen <= most:
            seen = least if seen < least else most
        learned = self._learned.get(tenant)
        ratio = None if learned is None else learned.get(model)
        if learned is None or ratio is None:
            ratio = self.bytes_per_token(tenant, model)
            self._remember(tenant, model, ratio + LEARNING_RATE * (seen - ratio))
            return
        learned[model] = ratio = ratio + LEARNING_RATE * (seen - ratio)
        learned.move_to_end(model)
        self._learned.move_to_end(tenant)
        self._models[model].put(tenant, ratio)

    def _remember(self, tenant: str, model: str | None, ratio: float) -> None:
        """Notes the first ratio of a tenant and model, and forgets the one that was used least recently."""
        learned = self._learned.setdefault(tenant, OrderedDict())
        self._learned.move_to_end(tenant)
        learned[model] = ratio
        self._models.setdefault(model, _ModelRatios()).put(tenant, ratio)
        if len(learned) > MODELS_REMEMBERED:
            self._forget(tenant, learned.popitem(last=False)[0])
        if len(self._learned) > TENANTS_REMEMBERED:
            forgotten, models = self._learned.popitem(last=False)
            for each in models:
                self._forget(forgotten, each)

    def _forget(self, tenant: str, model: str | None) -> None:
        ratios = self._models[model]
        ratios.put(tenant, None)
        if not ratios.by_tenant:
            del self._models[model]


class _ModelRatios:
    """The tenants' ratios for one model, and their lower median: what a tenant without one begins with."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, float] = {}
        self.median = BYTES_PER_TOKEN
        self._changes = 0

    def put(self, tenant: str, ratio: float | None) -> None:
        """Sets a tenant's ratio; None forgets it."""
        if ratio is None:
            del self.by_tenant[tenant]
        else:
            self.by_tenant[tenant] = ratio
        self._changes += 1
        count = len(self.by_tenant)
        if count < FEWEST_TENANTS:
            self.median = BYTES_PER_TOKEN
        elif self._changes * _STALE_SHARE >= count:
            self.median = sorted(self.by_tenant.values())[(count - 1) // 2]
            self._changes = 0


def _unread_tokens(payload: Payload, ratio: float) -> int:
    return math.ceil(payload.unread_bytes / min(ratio, BYTES_PER_TOKEN))


def tokens_to_hold(payload: Payload, prompt_tokens: int, default_output_tokens: int) -> int:
    """Prompt and output, for every choice. `prompt_tokens` covers all prompts; each produces its own output."""
    output = default_output_tokens if payload.max_output_tokens is None else payload.max_output_tokens
    return (prompt_tokens + payload.prompts * output) * payload.choices or 1


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
