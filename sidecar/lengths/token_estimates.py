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

from sidecar.extras import how_to_install
from sidecar.payload.decode import Payload

BYTES_PER_TOKEN = 4.0
LEARNING_RATE = 0.1
"""Weight of the newest observation: after about ten requests the ratio is the model's own."""
_LEAST, _MOST = 1.0, 16.0
MODELS_REMEMBERED = 16
"""For each tenant. Model names come from clients, but only answered requests count, and a tenant's least recently used
model is forgotten."""
TENANTS_REMEMBERED = 4096
"""Tenants come from the policy, so no client can add one. With all of their models they take 20 MB at most. Which of
them was used least recently is known from half as many on: before, none is soon forgotten."""
LONGEST_MODEL_NAME = 256
"""Characters. A longer name is not remembered: no model has one, and memory must stay small."""
FEWEST_TENANTS = 3
"""Tenants from which a model has a ratio for newcomers: of fewer, one would decide it."""
_STALE_SHARE = 8
"""The median is computed anew when so many times the turns since the last time are as many as the ratios."""
SAMPLED_ABOVE = 32_768
"""Characters up to which a tokenizer reads the whole text: about 30 ms. Longer text is sampled, and extrapolated."""


class Estimator:
    """Sizes requests, and learns from the engine's counts. One per process; not thread-safe."""

    def __init__(self, counter: TokenizerCounter | None = None) -> None:
        self.counter = counter
        self._turn = 0
        self._learned: OrderedDict[str, dict[str | None, _Ratio]] = OrderedDict()
        self._models: dict[str | None, _ModelRatios] = {}
        self._is_crowded = False

    def bytes_per_token(self, tenant: str, model: str | None) -> float:
        """The ratio of a tenant's text for a model, as learned so far."""
        try:
            return self._models[model].by_tenant[tenant].value
        except KeyError:
            return self._models[model].median(self._turn) if model in self._models else BYTES_PER_TOKEN

    def prompt_tokens(self, payload: Payload, tenant: str) -> int:
        """Tokens of all prompts of a tenant's request together, by their bytes."""
        tokens, text = payload.prompt_tokens, payload.prompt_bytes
        if text:
            tokens += math.floor(text / self.bytes_per_token(tenant, payload.model)) + 1
        if payload.unread_bytes:
            tokens += _unread_tokens(payload, self.bytes_per_token(tenant, payload.model))
        return tokens

    async def counted_prompt_tokens(self, payload: Payload, counter: TokenizerCounter) -> int:
        """Tokens of all prompts together, by a tokenizer."""
        text = await counter.count(payload.text()) if payload.prompt_bytes else 0
        return payload.prompt_tokens + text + _unread_tokens(payload, BYTES_PER_TOKEN)

    def learn(self, payload: Payload, tenant: str, prompt_tokens: int) -> None:
        """Learns from the engine's own count of a prompt, where that was text and was decoded completely."""
        text = payload.prompt_bytes
        if not text or prompt_tokens < 1 or not payload.is_understood:
            return
        seen = text / prompt_tokens
        if seen > _MOST:
            seen = _MOST
        elif seen < _LEAST:
            seen = _LEAST
        try:
            learned = self._models[payload.model].by_tenant[tenant]
        except KeyError:
            self._remember(tenant, payload.model, seen)
            return
        value = learned.value
        learned.value = value + LEARNING_RATE * (seen - value)
        self._turn = learned.turn = self._turn + 1
        if self._is_crowded:
            self._learned.move_to_end(tenant)

    def _remember(self, tenant: str, model: str | None, seen: float) -> None:
        """Notes the first ratio of a tenant and model, and forgets the one that was used least recently."""
        if model is not None and len(model) > LONGEST_MODEL_NAME:
            return
        before = self.bytes_per_token(tenant, model)
        self._turn += 1
        ratio = _Ratio(before + LEARNING_RATE * (seen - before), self._turn)
        learned = self._learned.setdefault(tenant, {})
        self._learned.move_to_end(tenant)
        learned[model] = ratio
        self._models.setdefault(model, _ModelRatios()).by_tenant[tenant] = ratio
        if len(learned) > MODELS_REMEMBERED:
            oldest = min(learned, key=lambda each: learned[each].turn)
            del learned[oldest]
            self._forget(tenant, oldest)
        if len(self._learned) > TENANTS_REMEMBERED:
            forgotten, models = self._learned.popitem(last=False)
            for each in models:
                self._forget(forgotten, each)
        self._is_crowded = len(self._learned) > TENANTS_REMEMBERED // 2

    def _forget(self, tenant: str, model: str | None) -> None:
        ratios = self._models[model].by_tenant
        del ratios[tenant]
        if not ratios:
            del self._models[model]


class _Ratio:
    """The bytes per token of one tenant and model, and the turn at which it was learned last."""

    __slots__ = ("turn", "value")

    def __init__(self, value: float, turn: int) -> None:
        self.value = value
        self.turn = turn


class _ModelRatios:
    """The tenants' ratios for one model, and their lower median: what a tenant without one begins with."""

    __slots__ = ("_median", "_voted_at", "by_tenant")

    def __init__(self) -> None:
        self.by_tenant: dict[str, _Ratio] = {}
        self._median = BYTES_PER_TOKEN
        self._voted_at = 0

    def median(self, turn: int) -> float:
        """The median at a turn of the estimator. It is at most an eighth of the ratios old, by the turns since then."""
        count = len(self.by_tenant)
        if count < FEWEST_TENANTS:
            return BYTES_PER_TOKEN
        if (turn - self._voted_at) * _STALE_SHARE >= count:
            self._median = sorted(ratio.value for ratio in self.by_tenant.values())[(count - 1) // 2]
            self._voted_at = turn
        return self._median


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
            raise NoTokenizer(f"the policy names a tokenizer; {how_to_install('tokenizers')}") from None
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
