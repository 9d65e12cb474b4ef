"""Traits of a request that say something about the length of its answer: reasoning, tools, format and stop."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

EFFORTS = frozenset(("none", "minimal", "low", "medium", "high", "xhigh", "other"))
"""Efforts that are distinguished. Clients may send any word; all that are not known are one, `other`."""
_CHOICES = frozenset(("none", "auto", "required"))
_LOW_BUDGET, _MEDIUM_BUDGET = 2048, 8192
"""Tokens of a thinking budget up to which it counts as low and as medium effort. Anthropic's smallest is 1,024."""
_ABSENT = (b"", b"null")


class Traits(NamedTuple):
    """Traits of one request. `effort` is that of its reasoning: none, minimal, low, medium, high, xhigh or other.

    None where the client does not say. `tool_choice` is none, auto, required or named (one certain tool).
    """

    effort: str | None = None
    tools: bool = False
    tool_choice: str | None = None
    format: bool = False
    stop: bool = False


NO_TRAITS = Traits()


class _Reasoning(msgspec.Struct, gc=False):
    effort: str | None = None


class _Thinking(msgspec.Struct, gc=False):
    type: str | None = None
    budget_tokens: int | None = None


class _TemplateArguments(msgspec.Struct, gc=False):
    enable_thinking: bool | None = None
    thinking: bool | None = None


class _ToolChoice(msgspec.Struct, gc=False):
    type: str | None = None


_string = msgspec.json.Decoder(str).decode
_reasoning = msgspec.json.Decoder(_Reasoning).decode
_thinking = msgspec.json.Decoder(_Thinking).decode
_template_arguments = msgspec.json.Decoder(_TemplateArguments).decode
_tool_choice = msgspec.json.Decoder(_ToolChoice).decode


def read_effort(value: bytes) -> str | None:
    """The effort of a JSON string; None where it is none. An unknown word is `other`: engines add words."""
    try:
        word = _string(value).lower()
    except msgspec.MsgspecError:
        return None
    return word if word in EFFORTS else "other"


def read_reasoning_effort(value: bytes) -> str | None:
    """The effort of the Responses API's object `reasoning`."""
    try:
        word = _reasoning(value).effort
    except msgspec.MsgspecError:
        return None
    if word is None:
        return None
    return word.lower() if word.lower() in EFFORTS else "other"


def read_thinking_effort(value: bytes) -> str | None:
    """The effort of Anthropic's object `thinking`, by its budget of tokens."""
    try:
        thinking = _thinking(value)
    except msgspec.MsgspecError:
        return None
    if thinking.type == "disabled":
        return "none"
    if thinking.type is None:
        return None
    budget = thinking.budget_tokens
    if budget is None:
        return "other"
    return "low" if budget <= _LOW_BUDGET else "medium" if budget <= _MEDIUM_BUDGET else "high"


def read_template_effort(value: bytes) -> str | None:
    """The effort of `chat_template_kwargs`: a switch for thinking, as Qwen's and DeepSeek's templates have one."""
    try:
        arguments = _template_arguments(value)
    except msgspec.MsgspecError:
        return None
    switch = arguments.thinking if arguments.enable_thinking is None else arguments.enable_thinking
    return None if switch is None else "other" if switch else "none"


def read_choice(value: bytes) -> str | None:
    """The tool choice of a JSON string or object. OpenAI's objects name a tool; Anthropic's have a type."""
    if value[:1] == b'"':
        try:
            word = _string(value).lower()
        except msgspec.MsgspecError:
            return None
        return word if word in _CHOICES else None
    try:
        kind = _tool_choice(value).type
    except msgspec.MsgspecError:
        return None
    if kind is None:
        return None
    return "required" if kind == "any" else kind if kind in _CHOICES else "named"


def is_given(value: bytes) -> bool:
    """True if a field says anything: not where it is absent, null or empty."""
    return value not in _ABSENT and value not in (b"[]", b'""', b"{}")
