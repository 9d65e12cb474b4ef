"""The bodies of a trace's requests. In a conversation a turn's body is written when the turn before is answered."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sidecar.policy.policy import Api
from sidecar.replay.row import Row
from sidecar.replay.words import Words

PATHS = {Api.CHAT: "/v1/chat/completions", Api.COMPLETIONS: "/v1/completions"}
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

    def path(self, row: Row) -> str:
        """Where the request goes; a ready-made payload may be of another kind than the rest."""
        if row.payload is not None:
            return PATHS[Api.CHAT if "messages" in row.payload else Api.COMPLETIONS]
        return PATHS[Api.CHAT if row.messages is not None else self.api]

    def own(self, row: Row) -> Sequence[Message]:
        """The messages that a row adds to its conversation."""
        if row.messages is not None:
            return row.messages
        return [{"role": "user", "content": row.text if row.text is not None else self._made_up(row)}]

    def body(self, row: Row, messages: Sequence[Message], members: Mapping[str, Any]) -> bytes:
        """The whole body. What a row's `extra` says goes before what is usual, and how it asks before that."""
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

    def _made_up(self, row: Row) -> str:
        assert row.input_tokens is not None
        seed = f"{self.seed} {self.salt}"
        blocks = [f"{seed} block {number}" for number in row.hash_ids]
        return self.words.text(row.input_tokens, random.Random(f"{seed} line {row.line}"), blocks, self.block_tokens)


@dataclass(slots=True)
class Conversation:
    """What was said so far, by the trace and by the model."""

    messages: list[Message] = field(default_factory=list)

    def with_turn(self, row: Row, own: Sequence[Message], answer: str) -> Sequence[Message]:
        """The messages of the next turn, given the answer to the last; a row that is complete begins anew."""
        if not row.is_delta:
            self.messages = list(own)
            return own
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        self.messages += own
        return list(self.messages)
