"""Server-sent events in each API's own shape, formatted once per stream: a token costs one concatenation, no JSON.

A stream is `opening`, then `token` for every chunk of text, then `closing`; each returns whole events.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from sidecar.emulator import answers
from sidecar.emulator.generation import Generation
from sidecar.policy.policy import Api

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; `name` adds the `event:` line that the newer APIs send."""
    line = b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
    return line if name is None else f"event: {name}\n".encode() + line


class Stream(ABC):
    """The events of one generation. `created` is in seconds since the epoch."""

    def __init__(self, generation: Generation, created: int) -> None:
        self.generation = generation
        self.created = created

    @abstractmethod
    def opening(self) -> bytes:
        """What comes before the first token, and travels with it."""

    @abstractmethod
    def token(self, index: int, text: bytes, last: bool) -> bytes:
        """A chunk of text of one choice. `text` is JSON-safe; `last` says that the choice is complete."""

    @abstractmethod
    def closing(self) -> bytes:
        """What comes after the last token."""


class ChoiceStream(Stream):
    """Chat and legacy completions: one JSON skeleton around an index, a text and a finish reason."""

    def __init__(self, generation: Generation, created: int, kind: str, before: bytes, after: bytes) -> None:
        super().__init__(generation, created)
        self._envelope = {
            "id": answers.identifier(generation),
            "object": kind,
            "created": created,
            "model": generation.ask.model,
        }
        head = event({**self._envelope, "choices": []}).removesuffix(b"]}\n\n")
        self._heads = [head + b'{"index":%d,' % choice.index + before for choice in generation.choices]
        self._more = after + b',"finish_reason":null}]}\n\n'
        self._last = after + b',"finish_reason":"length"}]}\n\n'

    def token(self, index: int, text: bytes, last: bool) -> bytes:
        return self._heads[index] + text + (self._last if last else self._more)

    def closing(self) -> bytes:
        if not self.generation.ask.include_usage:
            return DONE
        return event({**self._envelope, "choices": [], "usage": answers.usage(self.generation)}) + DONE


class ChatStream(ChoiceStream):
    """`chat.completion.chunk`: a chunk with the role for every choice, then one per token."""

    def __init__(self, generation: Generation, created: int) -> None:
        super().__init__(generation, created, "chat.completion.chunk", b'"delta":{"content":"', b'"}')

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            event({**self._envelope, "choices": [{"index": choice.index, "delta": delta, "finish_reason": None}]})
            for choice in self.generation.choices
        )


class CompletionStream(ChoiceStream):
    """`text_completion` chunks, nothing before the first."""

    def __init__(self, generation: Generation, created: int) -> None:
        super().__init__(generation, created, "text_completion", b'"text":"', b'","logprobs":null')

    def opening(self) -> bytes:
        return b""


class ResponsesStream(Stream):
    """The typed events of the Responses API, numbered in sequence."""

    def __init__(self, generation: Generation, created: int) -> None:
        super().__init__(generation, created)
        self._number = -1
        place = answers.message_place(generation)
        delta = {"type": "response.output_text.delta", **place, "logprobs": [], "delta": ""}
        self._delta = event(delta, "response.output_text.delta").removesuffix(b'"}\n\n')

    def opening(self) -> bytes:
        unfinished = answers.response(self.generation, self.created, "in_progress")
        place = answers.message_place(self.generation)
        message = {**answers.output_message(self.generation, "in_progress"), "content": []}
        return (
            self._event("response.created", response=unfinished)
            + self._event("response.in_progress", response=unfinished)
            + self._event("response.output_item.added", output_index=0, item=message)
            + self._event("response.content_part.added", **place, part=answers.output_part(b""))
        )

    def token(self, index: int, text: bytes, last: bool) -> bytes:
        del index, last  # one choice, and its end is in `closing`
        self._number += 1
        return self._delta + text + b'","sequence_number":%d}\n\n' % self._number

    def closing(self) -> bytes:
        place = answers.message_place(self.generation)
        part = answers.output_part(answers.whole_text(self.generation.choices[0]))
        message = answers.output_message(self.generation, "completed")
        return (
            self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=0, item=message)
            + self._event("response.completed", response=answers.response(self.generation, self.created, "completed"))
        )

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)


class MessagesStream(Stream):
    """The events of the Messages API."""

    _delta = event(
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}}, "content_block_delta"
    ).removesuffix(b'"}}\n\n')

    def opening(self) -> bytes:
        message = {**answers.message(self.generation), "content": [], "stop_reason": None}
        block = {"type": "text", "text": ""}
        return event({"type": "message_start", "message": message}, "message_start") + event(
            {"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start"
        )

    def token(self, index: int, text: bytes, last: bool) -> bytes:
        del index, last
        return self._delta + text + b'"}}\n\n'

    def closing(self) -> bytes:
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        tokens = {"output_tokens": self.generation.output_tokens}
        return (
            event({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + event({"type": "message_delta", "delta": delta, "usage": tokens}, "message_delta")
            + event({"type": "message_stop"}, "message_stop")
        )


STREAMS: Mapping[Api, type[ChatStream | CompletionStream | ResponsesStream | MessagesStream]] = {
    Api.CHAT: ChatStream,
    Api.COMPLETIONS: CompletionStream,
    Api.RESPONSES: ResponsesStream,
    Api.MESSAGES: MessagesStream,
}
