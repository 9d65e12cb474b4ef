"""Weights of tokens: what a request counts for in limits and budgets, whatever its engine says of its usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sidecar.policy.cost import RequestCost, TokenCost
from sidecar.pools import Pool
from sidecar.tenants.tenant_usage import TenantUsage
from sidecar.tenants.usage_records import Recorded, Sums, UsageCharge, UsageFigures, UsageKey
from tests.support.each import each
from tests.support.late import anthropic, openai
from tests.support.middleware import App, Caller, Guarded, TestedMiddleware, answer, guarding, policy, start, whole_body
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
KEY = [(b"authorization", b"Bearer sk-acme")]
COST = "cost: {input: 2, cached: 0.25, output: 4}\n"
LIMIT = 10_000
PROMPT = "word " * 40
ESTIMATED = 59
"""Its tokens by the bytes of the message."""
CHAT_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


class Kept:
    """The records of use, as a store would get them."""

    def __init__(self) -> None:
        self.figures: list[UsageFigures] = []
        self.charges: list[UsageCharge] = []

    async def add(self, _: int, entries: Any, charges: Any, __: str, accounts: Sequence[str]) -> Recorded:
        self.figures += [figures for _, figures in entries]
        self.charges += charges
        return Recorded(1_780_000_000.0, dict.fromkeys(accounts, Sums(0, 0)))

    async def use_on(self, _: str) -> Mapping[UsageKey, UsageFigures]:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Engine(App):
    """Answers with a body of its own, whole or as a stream; when it is `open`."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._body = body
        self.open, self.is_asked = asyncio.Event(), asyncio.Event()
        self.open.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        await whole_body(receive)
        self.is_asked.set()
        await self.open.wait()
        if self._body.startswith(b"{"):
            await answer(send, self._body)
        else:
            await start(send, content_type=b"text/event-stream")
            await send({"type": "http.response.body", "body": self._body})


class Metered:
    """A sidecar whose clock stands still, and the one tenant's limit and use."""

    def __init__(self, engine: Engine, weights: str = COST, **settings: str) -> None:
        self.policy = policy(weights, engine="vllm", acme=f"limits: {{tokens_per_minute: {LIMIT}}}\n", **settings)
        self.kept, self.engine = Kept(), engine
        self.pool = Pool(self.policy, lambda: 1_000_000)
        self.sidecar = TestedMiddleware(
            engine, policy=self.policy, pool=self.pool,
            usage=TenantUsage(self.kept, self.policy),
        )  # fmt: skip

    def asks(self, api: str, **fields: Any) -> Caller:
        prompt = "input" if api in ("responses", "embeddings") else "messages"
        most = {} if api == "embeddings" else {"max_output_tokens" if api == "responses" else "max_tokens": 500}
        said = [{"role": "user", "content": PROMPT}] if prompt == "messages" else PROMPT
        body = json.dumps({"model": "m", prompt: said, **most, **fields}).encode()
        return Caller(self.sidecar, body, path=f"/v1/{api}", headers=KEY)

    async def counted(self) -> tuple[int, int]:
        """What counted in the limit, and in budgets."""
        left = await self.pool.allowance("acme", self.policy.named["acme"].limits)
        assert left is not None
        assert left.tokens is not None
        usage = self.sidecar.usage
        assert usage is not None
        await usage.flush()
        return LIMIT - left.tokens.left, sum(tokens for _, account, tokens in self.kept.charges if account == "acme")


def whole(usage: Any) -> bytes:
    return json.dumps({"id": "1", "choices": [], "usage": usage}).encode()


def details(**more: Any) -> dict[str, Any]:
    return {**CHAT_USAGE, "prompt_tokens_details": more}


def events(*members: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(member).encode() + b"\n\n" for member in members)


FORGED = {"usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 90}}}
"""What a client wrote into a schema that the answer repeats."""
MESSAGE = {"input_tokens": 20, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 20, "output_tokens": 1}
ANSWERS: dict[str, tuple[str, bytes, int]] = {
    "chat": ("chat/completions", whole(details(cached_tokens=60)), 40 * 2 + 15 + 40),
    "chat that says nothing of its cache": ("chat/completions", whole(CHAT_USAGE), 240),
    "responses": (
        "responses",
        whole({"input_tokens": 100, "output_tokens": 10, "input_tokens_details": {"cached_tokens": 60}}),
        135,
    ),
    "messages": ("messages", whole({**MESSAGE, "output_tokens": 10}), 135),
    "embeddings": ("embeddings", whole({"prompt_tokens": 100, "total_tokens": 100}), 200),
    "a stream of chat": (
        "chat/completions",
        events(
            {"usage": None}, {"usage": {**CHAT_USAGE, "completion_tokens": 9}}, {"usage": details(cached_tokens=60)}
        ),
        135,
    ),
    "a stream of messages": (
        "messages",
        events(
            {"type": "message_start", "message": {"usage": MESSAGE}},
            {"type": "message_delta", "usage": {"output_tokens": 10}},
        ),
        135,
    ),
    "a forged cache hit": ("chat/completions", events({"tools": [FORGED]}, {"usage": CHAT_USAGE}), 240),
    "more cached than the prompt": ("chat/completions", whole(details(cached_tokens=10**6)), 25 + 40),
    "less cached than nothing": ("chat/completions", whole(details(cached_tokens=-60)), 240),
    "a prompt that none has": ("chat/completions", whole({**CHAT_USAGE, "prompt_tokens": 2**60}), ESTIMATED * 2 + 40),
}


@each("name", ANSWERS)
async def test_limits_and_budgets_count_the_usage_by_its_weights(name: str) -> None:
    api, body, counted = ANSWERS[name]
    metered = Metered(Engine(body))
    caller = metered.asks(api, stream=not body.startswith(b"{"))
    await caller.run()
    assert caller.status == 200
    assert await metered.counted() == (counted, counted)


async def test_records_of_use_keep_plain_tokens_and_without_a_cost_all_is_as_it_was() -> None:
    for weights in ("", "cost: {}\n", "cost: {input: 1, output: 1.000}\n"):
        metered = Metered(Engine(whole(details(cached_tokens=60))), weights)
        await metered.asks("chat/completions").run()
        assert await metered.counted() == (110, 110), weights
        assert metered.kept.figures == [UsageFigures(1, 100, 10)]
    metered = Metered(Engine(whole(details(cached_tokens=60))))
    await metered.asks("chat/completions").run()
    await metered.counted()
    assert metered.kept.figures == [UsageFigures(1, 100, 10)]


async def test_the_estimate_counts_by_its_weights_and_stands_where_the_engine_never_says_better() -> None:
    metered = Metered(Engine(b'{"id":"1","choices":[]}'))
    await metered.asks("chat/completions").run()
    in_limit, in_budget = await metered.counted()
    assert in_limit == in_budget
    assert 500 * 4 + 40 * 2 <= in_limit <= 500 * 4 + 80 * 2
    refused = metered.asks("chat/completions", max_tokens=2400)
    await refused.run()
    assert refused.status == 429
    assert "is over its limit of 10,000 tokens per minute" in refused.json["error"]["message"]
    assert "(prompt and maximum output, weighted)" in refused.json["error"]["message"]
    never = metered.asks("chat/completions", max_tokens=2600)
    await never.run()
    assert "lets 10,000 through at once" in never.json["error"]["message"]
    assert b"retry-after" not in dict(never.sent[0]["headers"])


async def test_a_request_is_counted_by_the_weights_of_the_policy_under_which_it_came() -> None:
    metered = Metered(Engine(whole(details(cached_tokens=60))))
    metered.engine.open.clear()
    running = metered.asks("chat/completions").begin()
    await asyncio.wait_for(metered.engine.is_asked.wait(), 60)
    metered.sidecar.change_policy(
        policy("cost: {output: 1000}\n", engine="vllm", acme=f"limits: {{tokens_per_minute: {LIMIT}}}\n")
    )
    metered.engine.open.set()
    await running
    assert await metered.counted() == (135, 135)
    refused = metered.asks("chat/completions")
    await refused.run()
    assert refused.status == 429, "each token of an answer counts for 1,000 now"


async def test_observing_counts_as_enforcing() -> None:
    metered = Metered(Engine(whole(details(cached_tokens=60))), COST + "mode: observe\n")
    await metered.asks("chat/completions").run()
    await until(lambda: len(metered.sidecar.shadows) == 0)
    assert await metered.counted() == (135, 135)


def test_weights_of_all_sizes_count_exactly() -> None:
    free, dear = TokenCost(0, 0, 0), TokenCost(1_000_000, 1_000_000, 1_000_000)
    assert (free.of(2**40, 7, 2**40), dear.of(2**40, 7, 2**40)) == (0, 2**41 * 1000)
    assert TokenCost(1, 1, 1).of(1, 0, 0) == 1, "rounded up"
    assert RequestCost(free, 10).in_turns(100) == 1, "so that tenants take turns"
    assert RequestCost(TokenCost(2000, 250, 4000), 10).of(25) == 10 * 2 + 15 * 4


@pytest.mark.long
async def test_the_clients_of_openai_and_anthropic_read_the_usage_that_is_counted() -> None:
    chat = {"object": "chat.completion", "created": 1, "model": "m", "choices": [], "id": "1"}
    message = {"type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": "end_turn"}
    limited = policy(COST, engine="vllm", acme="limits: {tokens_per_minute: 3000}\n")
    asked: Any = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": PROMPT}]}

    async def counts(sidecar: Guarded, at_most: int) -> None:
        """Some of it drains meanwhile; the estimate would for 40 s."""
        left = await sidecar.pool.allowance("acme", limited.named["acme"].limits)
        assert left is not None
        assert left.tokens is not None
        assert left.tokens.left >= 3000 - at_most

    body = json.dumps({**chat, "usage": details(cached_tokens=60)}).encode()
    async with guarding(Engine(body), limited) as sidecar:
        url = f"http://127.0.0.1:{sidecar.port}"
        async with openai.AsyncOpenAI(api_key="sk-acme", base_url=f"{url}/v1", max_retries=0) as client:
            usage = (await client.chat.completions.create(**asked)).usage
        cached = usage.prompt_tokens_details.cached_tokens
        await counts(sidecar, (usage.prompt_tokens - cached) * 2 + cached // 4 + usage.completion_tokens * 4)
    body = json.dumps({**message, "id": "1", "usage": {**MESSAGE, "output_tokens": 10}}).encode()
    async with guarding(Engine(body), limited) as sidecar:
        url = f"http://127.0.0.1:{sidecar.port}"
        async with anthropic.AsyncAnthropic(api_key="sk-acme", base_url=url, max_retries=0) as client:
            usage = (await client.messages.create(**asked)).usage
        uncached = usage.input_tokens + usage.cache_creation_input_tokens
        await counts(sidecar, uncached * 2 + usage.cache_read_input_tokens // 4 + usage.output_tokens * 4)
