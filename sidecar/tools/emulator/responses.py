"""Responses of the emulated engines in each API's shape: whole answers and streams."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sidecar.apis import Api
from sidecar.tools.emulator.generation import GeneratedChoice, Generation, token_text

Answer: TypeAlias = dict[str, Any]

EMBEDDING = [0.25, -0.5, 0.75, -1.0]
_ID_PREFIXES = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETIONS: "cmpl-",
    Api.RESPONSES: "resp_",
    Api.MESSAGES: "msg_",
    Api.EMBEDDINGS: "embd-",
}


def identifier(generation: Generation) -> str:
    """The answer's id; what follows the prefix is the request id in the engine's log."""
    return _ID_PREFIXES[generation.ask.api] + generation.request_id


def whole_text(choice: GeneratedChoice) -> bytes:
    """Everything a choice generated so far."""
    return token_text(0, choice.generated)


def usage(generation: Generation) -> Answer:
    """Chat's and completions' `usage`. Prompts count once, whatever `n`."""
    prompt, output = generation.ask.prompt_tokens, generation.output_tokens
    counted = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    details = generation.dialect.prompt_tokens_details(generation.ask.api, generation.cached)
    return counted if details is None else {**counted, "prompt_tokens_details": details}


def chat(generation: Generation, created: int) -> Answer:
    """A `chat.completion`."""
    texts = [{"message": {"role": "assistant", "content": whole_text(c).decode()}} for c in generation.choices]
    return _completion(generation, created, "chat.completion", texts)


def completion(generation: Generation, created: int) -> Answer:
    """A `text_completion`."""
    texts = [{"text": whole_text(choice).decode()} for choice in generation.choices]
    return _completion(generation, created, "text_completion", texts)


def _completion(generation: Generation, created: int, kind: str, texts: list[Answer]) -> Answer:
    """`texts` is what each choice has in this API's own shape."""
    ends = [{"logprobs": None, "finish_reason": "length" if c.is_complete else "abort"} for c in generation.choices]
    return {
        "id": identifier(generation),
        "object": kind,
        "created": created,
        "model": generation.ask.model,
        "choices": [{"index": index, **text, **ends[index]} for index, text in enumerate(texts)],
        "usage": usage(generation),
    }


def message_place(generation: Generation) -> Answer:
    """Where a Responses event's text belongs."""
    return {"item_id": f"msg_{generation.request_id}", "output_index": 0, "content_index": 0}


def output_part(text: bytes) -> Answer:
    """The text part of a Responses message."""
    return {"type": "output_text", "text": text.decode(), "annotations": [], "logprobs": []}


def output_message(generation: Generation, status: str) -> Answer:
    """The one output item of a response."""
    return {
        "id": f"msg_{generation.request_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [output_part(whole_text(generation.choices[0]))],
    }


def response(generation: Generation, created: int, status: str) -> Answer:
    """A `response`; only a completed one has output and usage."""
    completed = status == "completed"
    prompt, output = generation.ask.prompt_tokens, generation.output_tokens
    tokens = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": generation.dialect.responses_cached_tokens(generation.cached)},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
    return {
        "id": identifier(generation),
        "object": "response",
        "created_at": created,
        "model": generation.ask.model,
        "status": status,
        "output": [output_message(generation, status)] if completed else [],
        "usage": tokens if completed else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def message(generation: Generation, created: int = 0) -> Answer:
    """A Messages API `message`, which carries no time."""
    del created
    return {
        "id": identifier(generation),
        "type": "message",
        "role": "assistant",
        "model": generation.ask.model,
        "content": [{"type": "text", "text": whole_text(generation.choices[0]).decode()}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {**message_input(generation), "output_tokens": generation.output_tokens},
    }


def message_input(generation: Generation) -> Answer:
    """The Messages API's prompt tokens: those that came from the cache, or went into it, count apart."""
    prompt = generation.ask.prompt_tokens
    found = generation.dialect.prompt_tokens_details(Api.MESSAGES, generation.cached)
    if found is None:
        return {"input_tokens": prompt}
    read, created = found["cached_tokens"], found["created_cache_tokens"]
    return {
        "input_tokens": prompt - read - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
    }


def embeddings(generation: Generation, created: int) -> Answer:
    """One fixed vector for every input."""
    prompt = generation.ask.prompt_tokens
    return {
        "id": identifier(generation),
        "object": "list",
        "created": created,
        "model": generation.ask.model,
        "data": [{"object": "embedding", "index": c.index, "embedding": EMBEDDING} for c in generation.choices],
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
    }


ANSWERS: Mapping[Api, Callable[[Generation, int], Answer]] = {
    Api.CHAT: chat,
    Api.COMPLETIONS: completion,
    Api.RESPONSES: lambda generation, created: response(generation, created, "completed"),
    Api.MESSAGES: message,
    Api.EMBEDDINGS: embeddings,
}


DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; `name` adds the `event:` line that the newer APIs send."""
    line = b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
    return line if name is None else f"event: {name}\n".encode() + line


class StreamFormat(ABC):
    """The events of one generation. `created` is in seconds since the epoch."""

    def __init__(self, generation: Generation, created: int) -> None:
        self.generation = generation
        self.created = created

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first token, sent together with it."""

    @abstractmethod
    def token(self, index: int, text: bytes, last: bool) -> bytes:
        """A chunk of text of one choice. `text` is JSON-safe; `last` says that the choice is complete."""

    @abstractmethod
    def closing(self) -> bytes:
        """Events after the last token."""

    def cut(self) -> bytes:
        """Events of a stream that the engine ends before its last token."""
        return self.closing()


class ChoiceStream(StreamFormat):
    """Chat and legacy completions: one JSON skeleton around an index, a text and a finish reason."""

    def __init__(self, generation: Generation, created: int, kind: str, before: bytes, after: bytes) -> None:
        super().__init__(generation, created)
        self._envelope = {
            "id": identifier(generation),
            "object": kind,
            "created": created,
            "model": generation.ask.model,
        }
        head = event({**self._envelope, "choices": []}).removesuffix(b"]}\n\n")
        self._heads = [head + b'{"index":%d,' % choice.index + before for choice in generation.choices]
        self._more = after + b',"finish_reason":null}]}\n\n'
        self._last = after + b',"finish_reason":"length"}]}\n\n'
        self._cut = after + b',"finish_reason":"abort"}]}\n\n'

    def token(self, index: int, text: bytes, last: bool) -> bytes:
        return self._heads[index] + text + (self._last if last else self._more)

    def closing(self) -> bytes:
        if not self.generation.ask.include_usage:
            return DONE
        return event({**self._envelope, "choices": [], "usage": usage(self.generation)}) + DONE

    def cut(self) -> bytes:
        """A choice that has begun ends with a reason of its own; one that has not ends without a word, as in vLLM."""
        begun = [c.index for c in self.generation.choices if c.generated and not c.is_complete]
        return b"".join(self._heads[index] + self._cut for index in begun) + self.closing()


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


class ResponsesStream(StreamFormat):
    """The typed events of the Responses API, numbered in sequence."""

    def __init__(self, generation: Generation, created: int) -> None:
        super().__init__(generation, created)
        self._number = -1
        place = message_place(generation)
        delta = {"type": "response.output_text.delta", **place, "logprobs": [], "delta": ""}
        self._delta = event(delta, "response.output_text.delta").removesuffix(b'"}\n\n')

    def opening(self) -> bytes:
        unfinished = response(self.generation, self.created, "in_progress")
        place = message_place(self.generation)
        message = {**output_message(self.generation, "in_progress"), "content": []}
        return (
            self._event("response.created", response=unfinished)
            + self._event("response.in_progress", response=unfinished)
            + self._event("response.output_item.added", output_index=0, item=message)
            + self._event("response.content_part.added", **place, part=output_part(b""))
        )

    def token(self, index: int, text: bytes, last: bool) -> bytes:
        del index, last  # one choice, and its end is in `closing`
        self._number += 1
        return self._delta + text + b'","sequence_number":%d}\n\n' % self._number

    def closing(self) -> bytes:
        place = message_place(self.generation)
        part = output_part(whole_text(self.generation.choices[0]))
        message = output_message(self.generation, "completed")
        return (
            self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=0, item=message)
            + self._event("response.completed", response=response(self.generation, self.created, "completed"))
        )

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **fields}, name)


class MessagesStream(StreamFormat):
    """The events of the Messages API."""

    _delta = event(
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}}, "content_block_delta"
    ).removesuffix(b'"}}\n\n')

    def opening(self) -> bytes:
        usage_so_far = {"input_tokens": self.generation.ask.prompt_tokens, "output_tokens": 0}
        started = {**message(self.generation), "content": [], "stop_reason": None, "usage": usage_so_far}
        block = {"type": "text", "text": ""}
        return event({"type": "message_start", "message": started}, "message_start") + event(
            {"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start"
        )

    def token(self, index: int, text: bytes, last: bool) -> bytes:
        del index, last
        return self._delta + text + b'"}}\n\n'

    def closing(self) -> bytes:
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        tokens = {"output_tokens": self.generation.output_tokens}
        if len(found := message_input(self.generation)) > 1:
            tokens = {**found, **tokens}
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
