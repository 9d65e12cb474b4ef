"""Tenants' limits through real HTTP: what a client reads, what the engine is sent, and what OpenAI's client does."""

from __future__ import annotations

import asyncio
import json
import re
import time
from types import ModuleType
from typing import Any

import pytest

from sidecar.admission.responses import duration
from sidecar.events import Classified, Refused
from tests.support.middleware import CHAT, COMPLETIONS, App, Guarded, chat, guarding, key, policy

pytestmark = pytest.mark.anyio

USAGE = b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":1,"completion_tokens":%d}}'


def limited(limits: str, more: str = "", **settings: str) -> Any:
    return policy(acme=f"limits: {{{limits}}}\n{more}", **settings)


def ratelimit(headers: dict[str, str]) -> dict[str, str]:
    """The headers about limits, by what follows `x-ratelimit-`."""
    return {name[len("x-ratelimit-") :]: value for name, value in headers.items() if name.startswith("x-ratelimit-")}


async def test_what_is_over_a_limit_is_a_429_that_says_when_it_frees() -> None:
    async with guarding(App(), limited("requests_per_minute: 6")) as sidecar:
        for left in range(5, -1, -1):
            admitted = await sidecar.ask(None, key("acme"))
            assert admitted.status == 200
            assert admitted.headers["x-ratelimit-limit-requests"] == "6"
            assert admitted.headers["x-ratelimit-remaining-requests"] == str(left)
        refused = await sidecar.ask(None, key("acme"))
        assert refused.is_error(429, "tenant_limit", "tenant acme", "6 requests per minute", "fits in ")
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert 8 <= int(refused.headers["retry-after"]) <= 10
        reported = ratelimit(refused.headers)
        assert (reported["limit-requests"], reported["remaining-requests"]) == ("6", "0")
        assert re.fullmatch(r"5\d(\.\d+)?s", reported["reset-requests"])
        assert "limit-tokens" not in reported
        assert sidecar.recorder.stories[-1].one(Refused).code == "tenant_limit"


async def test_a_tenant_without_limits_hears_nothing_of_them() -> None:
    async with guarding(App(), limited("requests_per_minute: 6")) as sidecar:
        assert ratelimit((await sidecar.ask(None, key("nightly"))).headers) == {}
        assert ratelimit((await sidecar.ask()).headers) == {}


async def test_what_a_request_really_used_is_what_it_is_charged() -> None:
    async with guarding(App(answer=USAGE % 20), limited("tokens_per_minute: 6000")) as sidecar:
        first = await sidecar.ask(chat(max_tokens=3000), key("acme"))
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 3000
        second = await sidecar.ask(chat(max_tokens=3000), key("acme"))
        assert int(second.headers["x-ratelimit-remaining-tokens"]) > 2900, "21 of the first one's tokens were used"


async def test_a_body_without_usage_is_charged_its_estimate() -> None:
    async with guarding(App(), limited("tokens_per_minute: 6000")) as sidecar:
        await sidecar.ask(chat(max_tokens=3000), key("acme"))
        refused = await sidecar.ask(chat(max_tokens=3000), key("acme"))
        assert refused.is_error(429, "tenant_limit", "6,000 tokens per minute", "are left")


# -- downgrade


DOWNGRADE = "over_limit: {downgrade: batch}\n"


async def test_what_is_over_the_limit_may_go_in_at_a_lower_tier_and_says_so() -> None:
    app = App()
    over = limited("requests_per_minute: 1", DOWNGRADE, engine="vllm")
    async with guarding(app, over) as sidecar:
        first, second = await sidecar.ask(None, key("acme")), await sidecar.ask(None, key("acme"))
        assert (first.headers["x-admission-tier"], second.headers["x-admission-tier"]) == ("normal", "batch")
        assert "x-admission-downgraded-from" not in first.headers
        assert second.headers["x-admission-downgraded-from"] == "normal"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        priorities = [int(dict(seen.scope["headers"])[b"x-vllm-priority"]) for seen in app.seen]
        assert priorities[0] < priorities[1], "the engine hears the lower tier"
        reported = [story.one(Classified) for story in sidecar.recorder.stories]
        assert [(each.tier, each.downgraded_from) for each in reported] == [("normal", None), ("batch", "normal")]
        assert [seen.scope["admission"].tier for seen in app.seen] == ["normal", "batch"]


async def test_the_lower_tiers_queue_rules_what_was_downgraded() -> None:
    app = App(is_held=True)
    over = limited("requests_per_minute: 1", DOWNGRADE, requests="1", max_requests="1", max_wait="100ms")
    async with guarding(app, over) as sidecar:
        running = asyncio.create_task(sidecar.ask(None, key("acme")))
        await sidecar.until(leases=1)
        waiting = asyncio.create_task(sidecar.ask(None, key("acme")))
        await sidecar.until(waiting=1)
        full = await sidecar.ask(None, key("acme"))
        assert full.is_error(503, "queue_full", "tier batch")
        reported = sidecar.recorder.stories[-1].one(Classified)
        assert (reported.tier, reported.downgraded_from) == ("batch", "normal")
        await asyncio.sleep(0.2)  # normal would have lost its patience by now
        app.release(2)
        assert [(await each).headers["x-admission-tier"] for each in (running, waiting)] == ["normal", "batch"]


# -- output


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": None}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0, "n": 2}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "hi"}, "max_tokens"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": None}, "max_output_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
    ],
)
async def test_who_names_no_maximum_is_given_the_cap(path: str, body: dict[str, Any], field: str) -> None:
    app = App()
    async with guarding(app, limited("max_output_tokens: 77")) as sidecar:
        answered = await sidecar.ask(body, key("acme"), path=path)
        assert answered.headers["x-admission-max-output-tokens"] == "77"
        sent = json.loads(app.seen[0].body)
        maxima = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        assert {name: sent[name] for name in maxima if name in sent} == {field: 77}
        assert {name: value for name, value in sent.items() if name not in maxima} == {
            name: value for name, value in body.items() if name not in maxima
        }
        assert dict(app.seen[0].scope["headers"])[b"content-length"] == str(len(app.seen[0].body)).encode()


@pytest.mark.parametrize(
    ("engine", "cap", "body", "given"),
    [
        ("vllm", 77, {"prompt": "hi"}, None),  # the engine gives it 16
        ("sglang", 16, {"prompt": "hi"}, None),
        ("vllm", 15, {"prompt": "hi"}, 15),
        ("vllm", 77, {"prompt": "hi", "max_tokens": None}, 77),  # as much as there is room for
        ("tensorrt-llm", 77, {"prompt": "hi"}, 77),
        ("dynamo", 77, {"prompt": "hi"}, 77),
    ],
)
async def test_a_cap_makes_no_text_completion_longer(
    engine: str, cap: int, body: dict[str, Any], given: int | None
) -> None:
    app = App()
    async with guarding(app, limited(f"max_output_tokens: {cap}", engine=engine)) as sidecar:
        answered = await sidecar.ask(body, key("acme"), path=COMPLETIONS)
        assert answered.headers.get("x-admission-max-output-tokens") == (None if given is None else str(given))
        assert app.seen[0].json.get("max_tokens") == given


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 78}, ("78 is more than the 77 tokens", "tenant acme", "send 77 or less")),
        ({"max_tokens": 78, "max_completion_tokens": 5}, ("78 is more",)),  # some engine follows the other one
    ],
)
async def test_who_names_more_than_the_cap_is_refused(body: dict[str, Any], words: tuple[str, ...]) -> None:
    async with guarding(App(), limited("max_output_tokens: 77")) as sidecar:
        assert (await sidecar.ask(chat(**body), key("acme"))).is_error(400, "output_too_long", *words)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(max_tokens=77)),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 0}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
async def test_who_stays_below_the_cap_is_passed_on_as_it_came(path: str, body: dict[str, Any]) -> None:
    app = App()
    async with guarding(app, limited("max_output_tokens: 77")) as sidecar:
        raw = json.dumps(body).encode()
        answered = await sidecar.ask(raw, key("acme"), path=path)
        assert app.seen[0].body == raw
        assert "x-admission-max-output-tokens" not in answered.headers


# -- as clients of OpenAI's read it


@pytest.mark.parametrize(
    ("us", "written"),
    [
        (0, b"0s"),
        (1, b"1ms"),
        (100_000, b"100ms"),
        (999_001, b"1s"),
        (1_500_000, b"1.5s"),
        (59_911_000, b"59.911s"),
        (60_000_000, b"1m0s"),
        (360_000_000, b"6m0s"),
        (86_400_000_000, b"24h0m0s"),
    ],
)
def test_times_are_written_as_go_does(us: int, written: bytes) -> None:
    assert duration(us) == written


COMPLETION = json.dumps(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()


def client_of(openai: ModuleType, sidecar: Guarded, retries: int) -> Any:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{sidecar.port}/v1", api_key="sk-acme", max_retries=retries)


@pytest.mark.long
async def test_openais_client_comes_back_on_time_and_gets_in(openai: ModuleType) -> None:
    async with guarding(App(answer=COMPLETION), limited("requests_per_minute: 20, burst: 1s")) as sidecar:
        async with client_of(openai, sidecar, retries=1) as client:
            hello = [{"role": "user", "content": "hi"}]
            began_s = time.monotonic()
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=hello)  # type: ignore[arg-type]
        assert [type(story.end).__name__ for story in sidecar.recorder.stories] == [
            "Settled",
            "Refused",
            "Settled",
        ]
        assert time.monotonic() - began_s >= 2.9
