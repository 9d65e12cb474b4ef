"""Whole answers, for requests that do not stream, in each API's own shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sidecar.emulator.generation import Choice, Generation
from sidecar.emulator.text import token_text
from sidecar.policy.policy import Api

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


def whole_text(choice: Choice) -> bytes:
    """Everything a choice generated so far."""
    return token_text(0, choice.emitted)


def usage(generation: Generation) -> Answer:
    """Chat's and completions' `usage`. Prompts count once, whatever `n`."""
    prompt, output = generation.ask.prompt_tokens, generation.output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def chat(generation: Generation, created: int) -> Answer:
    """A `chat.completion`."""
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": whole_text(choice).decode()},
            "logprobs": None,
            "finish_reason": "length",
        }
        for choice in generation.choices
    ]
    return _completion(generation, created, "chat.completion", choices)


def completion(generation: Generation, created: int) -> Answer:
    """A `text_completion`."""
    choices = [
        {
            "index": choice.index,
            "text": whole_text(choice).decode(),
            "logprobs": None,
            "finish_reason": "length",
        }
        for choice in generation.choices
    ]
    return _completion(generation, created, "text_completion", choices)


def _completion(generation: Generation, created: int, kind: str, choices: list[Answer]) -> Answer:
    return {
        "id": identifier(generation),
        "object": kind,
        "created": created,
        "model": generation.ask.model,
        "choices": choices,
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
        "input_tokens_details": {"cached_tokens": 0},
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
        "usage": {"input_tokens": generation.ask.prompt_tokens, "output_tokens": generation.output_tokens},
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
