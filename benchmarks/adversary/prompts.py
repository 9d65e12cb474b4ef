"""Prompts that travel in other members of the body than the usual ones: what a request with them holds.

Every shape goes through a real `sidecar serve` for every engine; what it holds is read from `/state` while the engine
works on it. A shape that is refused holds nothing, and reaches no engine.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.adversary.engine import Engine, body_of, running
from benchmarks.adversary.report import Line
from benchmarks.adversary.serving import Held, held_by, proxy

PROMPT_TOKENS = 3_000
ENGINES = ("vllm", "sglang", "tensorrt-llm", "dynamo", "none")
IDS = [1_000 + number for number in range(PROMPT_TOKENS)]
TEXT = "word " * (4 * PROMPT_TOKENS // 5)
"""As many bytes as four to a token."""
ENCODED = base64.b64encode(array("i", IDS).tobytes()).decode()
CHOICES, OUTPUT_TOKENS = 8, 50

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
_HELLO = [{"role": "user", "content": "hello"}]
_BASES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": _HELLO, "max_tokens": 16},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 16},
    RESPONSES: {"input": "hello", "max_output_tokens": 16},
    MESSAGES: {"messages": _HELLO, "max_tokens": 16},
}
POLICY = """\
engine: {engine}
capacity: {{tokens: 400k, requests: 160}}
tiers:
  only: {{}}
default_tier: only
anonymous: only
sources: [key]
endpoints:
  /v1/chat/completions: {{}}
  /v1/completions: {{}}
  /v1/responses: {{}}
  /v1/messages: {{}}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """One place for a prompt, and the least that such a request must hold."""

    path: str
    members: Mapping[str, Any]
    tokens: int = PROMPT_TOKENS
    requests: int = 1

    @property
    def name(self) -> str:
        """The members that are not usual, as a reader calls them."""
        return f"{self.path.removeprefix('/v1/')} {', '.join(self.members)}"

    def body(self) -> bytes:
        """The request. Its model is its own: what is learned of one shape must not move the next one's estimate."""
        return body_of({"model": self.name, **_BASES[self.path], **self.members})

    def is_held(self, held: Held) -> bool:
        """Whether what was held is enough, or nothing ran."""
        if held.refused is not None:
            return 400 <= held.refused < 500
        return held.tokens >= self.tokens and held.requests >= self.requests


SHAPES = (
    Shape(CHAT, {"input_ids": IDS}),
    Shape(CHAT, {"prompt_token_ids": IDS}),
    Shape(CHAT, {"prompt_token_ids_b64": ENCODED}),
    Shape(CHAT, {"kv_transfer_params": {"prompt_token_ids": IDS}}),
    Shape(CHAT, {"documents": [{"title": "one", "text": TEXT}]}),
    Shape(CHAT, {"chat_template_kwargs": {"context": TEXT}}),
    Shape(CHAT, {"prompt_embeds": ENCODED}),
    Shape(CHAT, {"input_embeds": [[0.5, 0.25]] * PROMPT_TOKENS}),
    Shape(CHAT, {"a_member_of_tomorrow": TEXT}),
    Shape(CHAT, {"best_of": CHOICES, "max_tokens": OUTPUT_TOKENS}, CHOICES * OUTPUT_TOKENS, CHOICES),
    Shape(COMPLETIONS, {"prompt": IDS}),
    Shape(COMPLETIONS, {"prompt": [IDS[:1500], IDS[1500:]]}, requests=2),
    Shape(COMPLETIONS, {"input_ids": IDS}),
    Shape(COMPLETIONS, {"prompt_token_ids": IDS}),
    Shape(COMPLETIONS, {"prompt_embeds": ENCODED}),
    Shape(COMPLETIONS, {"suffix": TEXT}),
    Shape(RESPONSES, {"previous_input_messages": [{"role": "user", "content": TEXT}]}),
    Shape(RESPONSES, {"previous_response_id": "resp_1"}),
    Shape(RESPONSES, {"prompt": {"id": "pmpt_1", "variables": {"text": TEXT}}}),
    Shape(MESSAGES, {"system": TEXT}),
    Shape(MESSAGES, {"input_ids": IDS}),
    Shape(MESSAGES, {"kv_transfer_params": {"prompt_token_ids": IDS}}),
)


@dataclass(slots=True)
class Found:
    """What one shape held, by the engine."""

    shape: Shape
    held: dict[str, Held] = field(default_factory=dict)

    def line(self) -> Line:
        """The least of all engines."""
        holds = all(self.shape.is_held(held) for held in self.held.values())
        sizes = [held for held in self.held.values() if held.refused is None]
        refused = len(self.held) - len(sizes)
        least = min(sizes, key=lambda held: (held.tokens, held.requests), default=None)
        figure = f"{least.tokens:,} in {least.requests}" if least else "refused"
        figure += f", {refused} engines refuse" if least and refused else ""
        asked = f"{self.shape.tokens:,} in {self.shape.requests}, or refused"
        return Line(f"  {self.shape.name}", figure, asked, holds)


async def rows() -> AsyncIterator[Line]:
    """The least that any shape held for any engine, then a line for every shape."""
    found = [Found(shape) for shape in SHAPES]
    async with running(Engine()) as engine, aiohttp.ClientSession() as client:
        engine.gate = asyncio.Event()
        for name in ENGINES:
            async with proxy(engine.url, POLICY.format(engine=name)) as where:
                for one in found:
                    body = one.shape.body()
                    one.held[name] = await held_by(client, where, engine.gate, one.shape.path, body)
    yield summary(found)
    for one in found:
        yield one.line()


def summary(found: Sequence[Found]) -> Line:
    """The least of the shapes with a prompt of 3,000."""
    lines = [one.line() for one in found]
    sizes = [
        held.tokens
        for one in found
        for held in one.held.values()
        if held.refused is None and one.shape.tokens == PROMPT_TOKENS
    ]
    attack = f"prompt of {PROMPT_TOKENS:,} tokens in {len(found)} shapes, {len(ENGINES)} engines: least held"
    return Line(attack, f"{min(sizes):,}", f"at least {PROMPT_TOKENS:,}", all(one.holds for one in lines))
