"""Prompts of an exact length, made of words that are one token each for the tokenizer that counts.

Tokenizers split text at spaces before anything else, so a word costs the same in every text. A few dozen common words
are tried; those that are one token are the vocabulary. A text of n such words is n tokens. This is checked once on a
mixed text, so no prompt has to be counted. Without a tokenizer, or without such words, a token is assumed to be four
bytes, the figure that gateways use.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sidecar.apis import Api
from sidecar.lengths.token_estimates import TokenizerCounter
from sidecar.tools.replay.server import PATHS, AskedServer
from sidecar.tools.replay.trace import TraceRow

_USUAL = """
    the of and to in that is was for on are as with they at be this from have or by one had not but what all were when
    we there can an your which their said if do will each about how up out them then she many some so these would other
    into has more her two like him see time could no make than first been its who now people my made over did down only
    way find use may water long little very after words called just where most know user token queue request load work
    model prompt header slot budget page cache turn lunch noon care order
"""
CANDIDATES = tuple(_USUAL.split())
ENOUGH_WORDS, FEWEST_WORDS = 24, 8
"""Eight words make 16 tokens in 2.8e14 ways: no two prompts share a block of a prefix cache by chance."""
_REPEATED = 32
_CHECKED_TOKENS = 256

Count = Callable[[str], Awaitable[int | None]]
"""Tokens of a text, None where they cannot be counted."""


@dataclass(frozen=True, slots=True)
class Words:
    """`singles` are the words of one token each, empty where tokens are taken to be four bytes.

    `around` is what the server adds to every prompt: special tokens, a chat template. `source` says who counted.
    """

    singles: tuple[str, ...] = ()
    around: int = 0
    source: str = "4 bytes a token (no tokenizer at hand)"

    @property
    def is_exact(self) -> bool:
        """True if prompts have the very number of tokens that was asked for."""
        return bool(self.singles)

    def text(self, tokens: int, rng: random.Random, blocks: Sequence[str] = (), block: int = 0) -> str:
        """A prompt that is `tokens` long with all that comes around it, and begins with what `blocks` stand for.

        Each of `blocks` gives the same `block` tokens in every text; what they do not fill is random.
        """
        own = max(1, tokens - self.around)
        words: list[str] = []
        for name in blocks:
            words += self._random(block, random.Random(name))
        words = (words + self._random(max(0, own - len(words)), rng))[:own]
        if self.is_exact:
            # The first word follows no space, and may cost more than the others: always the same, it is in `around`.
            return " ".join([self.singles[0], *words[1:]])
        return "".join(words)

    def _random(self, count: int, rng: random.Random) -> list[str]:
        return rng.choices(self.singles or _FOUR_BYTES, k=count)


_FOUR_BYTES = tuple(f"{word:<4}" for word in CANDIDATES if len(word) <= 3)


async def learn(count: Count, count_prompt: Count, source: str) -> Words | None:
    """The words of a tokenizer; None where there is none. `count_prompt` counts all that a request would hold."""
    singles: list[str] = []
    for word in CANDIDATES:
        short, long = await count(f" {word}" * _REPEATED), await count(f" {word}" * 2 * _REPEATED)
        if short is None or long is None:
            return None
        if long - short == _REPEATED:
            singles.append(word)
        if len(singles) == ENOUGH_WORDS:
            break
    if len(singles) < FEWEST_WORDS:
        return Words(source="4 bytes a token (this tokenizer has no usual words of one token)")
    words = Words(tuple(singles), 0, source)
    sample = words.text(_CHECKED_TOKENS, random.Random(source))
    longer = words.text(2 * _CHECKED_TOKENS, random.Random(source))
    short, long = await count_prompt(sample), await count_prompt(longer)
    if short is None or long is None or long - short != _CHECKED_TOKENS:
        return Words(source="4 bytes a token (this tokenizer joins words)")
    return Words(words.singles, short - _CHECKED_TOKENS, source)


async def new_words(server: AskedServer, model: str, tokenizer: str | None, *, chat: bool) -> Words:
    """The vocabulary for prompts of exact length. Raises NoTokenizer for a file that was named and cannot be used."""
    if tokenizer is not None:
        counter = TokenizerCounter(tokenizer)

        async def by_file(text: str) -> int | None:
            return await counter.count(text)

        template = "; the engine's chat template comes on top" if chat else ""
        return await learn(by_file, by_file, f"{tokenizer}{template}") or Words()

    async def by_engine(text: str) -> int | None:
        return await server.count({"model": model, "prompt": text})

    async def whole(text: str) -> int | None:
        return await server.count({"model": model, "messages": [{"role": "user", "content": text}]})

    has_template_count = chat and await whole("hello") is not None
    count_prompt: Count = whole if has_template_count else by_engine
    around = "" if has_template_count or not chat else "; its chat template comes on top"
    return await learn(by_engine, count_prompt, f"the engine's own tokenizer{around}") or Words()


Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes requests for one model. `ignore_eos` asks the engine for all the tokens that a row says.

    `block_tokens` is how many tokens one of a row's hash ids stands for. `salt` makes other words of the same lengths:
    a second run must not find its prompts in the engine's prefix cache.
    """

    api: Api
    model: str
    words: Words
    seed: int
    block_tokens: int
    ignore_eos: bool
    salt: str = ""

    def path(self, row: TraceRow) -> str:
        """Where the request goes; a ready-made payload may be of another kind than the rest."""
        if row.payload is not None:
            return PATHS[Api.CHAT if "messages" in row.payload else Api.COMPLETIONS]
        return PATHS[Api.CHAT if row.messages is not None else self.api]

    def own(self, row: TraceRow) -> Sequence[Message]:
        """The messages that a row adds to its conversation."""
        if row.messages is not None:
            return row.messages
        return [{"role": "user", "content": row.text if row.text is not None else self._made_up(row)}]

    def body(self, row: TraceRow, messages: Sequence[Message], members: Mapping[str, Any]) -> bytes:
        """The whole body. A row's `extra` overrides the defaults, and the fields that ask for a tier override both."""
        if row.payload is not None:
            return msgspec.json.encode({**row.payload, **row.extra, **members})
        prompt: dict[str, Any] = {"messages": messages}
        if PATHS[Api.COMPLETIONS] == self.path(row):
            prompt = {"prompt": "".join(str(message["content"]) for message in messages)}
        length: dict[str, Any] = {}
        if row.output_tokens is not None:
            length = {"max_tokens": row.output_tokens, **({"ignore_eos": True} if self.ignore_eos else {})}
        tools = {} if row.tools is None else {"tools": row.tools}
        usual = {"model": self.model, **prompt, **tools, **length}
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({**usual, **streaming, **row.extra, **members})

    def _made_up(self, row: TraceRow) -> str:
        assert row.input_tokens is not None
        seed = f"{self.seed} {self.salt}"
        blocks = [f"{seed} block {number}" for number in row.hash_ids]
        return self.words.text(row.input_tokens, random.Random(f"{seed} line {row.line}"), blocks, self.block_tokens)


@dataclass(slots=True)
class Conversation:
    """The conversation so far, from the trace and the model."""

    messages: list[Message] = field(default_factory=list)

    def with_turn(self, row: TraceRow, own: Sequence[Message], answer: str) -> Sequence[Message]:
        """The messages of the next turn, given the answer to the last; a row that is complete begins anew."""
        if not row.is_delta:
            self.messages = list(own)
            return own
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        self.messages += own
        return list(self.messages)
