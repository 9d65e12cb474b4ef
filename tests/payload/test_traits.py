"""Traits of requests: what every API's fields say about the length of an answer."""

from __future__ import annotations

import json

from sidecar.apis import Api
from sidecar.payload.decode import decode
from sidecar.payload.traits import NO_TRAITS, Traits
from tests.support.each import each

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def traits_of(api: Api, **fields: object) -> Traits:
    own = {"input": "hello"} if api is Api.RESPONSES else {"messages": MESSAGES}
    return decode(api, json.dumps({"model": "m", **own, **fields}).encode()).traits


@each(
    ("api", "fields", "effort"),
    [
        (Api.CHAT, {"reasoning_effort": "high"}, "high"),
        (Api.CHAT, {"reasoning_effort": "HIGH"}, "high"),
        (Api.CHAT, {"reasoning_effort": "turbo"}, "other"),
        (Api.CHAT, {"reasoning_effort": 3}, None),
        (Api.CHAT, {"reasoning_effort": None}, None),
        (Api.RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, "low"),
        (Api.RESPONSES, {"reasoning": {"effort": None}}, None),
        (Api.RESPONSES, {"reasoning": "low"}, None),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 4096}}, "medium"),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 32000}}, "high"),
        (Api.MESSAGES, {"thinking": {"type": "adaptive"}}, "other"),
        (Api.MESSAGES, {"thinking": {"type": "disabled"}}, "none"),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 10**40}}, "high"),
        (Api.CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "other"),
        (Api.CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "none"),
        (Api.CHAT, {"chat_template_kwargs": {"thinking": False, "more": [1]}}, "none"),
        (Api.CHAT, {"chat_template_kwargs": "enable_thinking"}, None),
        (Api.CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, "low"),
    ],
)
def test_the_effort_is_read_wherever_an_api_says_it(api: Api, fields: dict[str, object], effort: str | None) -> None:
    assert traits_of(api, **fields).effort == effort


@each(
    ("fields", "tools", "choice"),
    [
        ({}, False, None),
        ({"tools": []}, False, None),
        ({"tools": [TOOL]}, True, None),
        ({"tools": [TOOL], "tool_choice": "required"}, True, "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True, "named"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, True, "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, True, "none"),
        ({"tools": [TOOL], "tool_choice": "whatever"}, True, None),
        ({"tools": [TOOL], "tool_choice": 7}, True, None),
    ],
)
def test_tools_and_their_choice_are_read(fields: dict[str, object], tools: bool, choice: str | None) -> None:
    found = traits_of(Api.CHAT, **fields)
    assert (found.tools, found.tool_choice) == (tools, choice)


def test_a_format_and_a_stop_are_read() -> None:
    assert traits_of(Api.CHAT, response_format={"type": "json_object"}).format
    assert traits_of(Api.RESPONSES, text={"format": {"type": "json_schema"}}).format
    assert traits_of(Api.CHAT, stop=["\n"]).stop
    assert traits_of(Api.CHAT, stop="x").stop
    assert traits_of(Api.MESSAGES, stop_sequences=["\n"]).stop
    for nothing in (None, [], ""):
        assert traits_of(Api.CHAT, stop=nothing) is NO_TRAITS


def test_a_plain_request_has_no_traits_and_unknown_fields_change_none() -> None:
    assert traits_of(Api.CHAT) is NO_TRAITS
    assert traits_of(Api.CHAT, temperature=0.5, user="u") is NO_TRAITS
    assert traits_of(Api.CHAT, field_of_tomorrow=[1, 2], reasoning_effort="low").effort == "low"
