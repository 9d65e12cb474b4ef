"""What a request holds is what the engine will do for it: wherever its prompt travels, and for all that it starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from sidecar.events import Classified
from tests.support.each import each
from tests.support.middleware import CHAT, COMPLETIONS, App, Caller, Guarded, chat, guarding, key, policy

pytestmark = pytest.mark.anyio

RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
IDS = list(range(3000))
COUNTED = b'{"usage":{"prompt_tokens":%d,"completion_tokens":5}}'


def held(guarded: Guarded) -> int:
    """What the last request held."""
    return guarded.recorder.stories[-1].one(Classified).tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": IDS},
        {"prompt_token_ids": IDS},
        {"kv_transfer_params": {"prompt_token_ids": IDS}},
        {"the_next_one": [0] * 3000},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_pre_tokenized_prompt_of_3000_holds_3000_and_more(fields: dict[str, Any]) -> None:
    async with guarding(App(), policy()) as guarded:
        assert (await guarded.ask(chat(max_tokens=1, **fields))).status == 200
    assert 3000 <= held(guarded) <= 6000


async def test_best_of_in_a_chat_holds_every_sequence() -> None:
    async with guarding(App(), policy(requests="10")) as guarded:
        assert (await guarded.ask(chat(max_tokens=50, best_of=8))).status == 200
    story = guarded.recorder.stories[-1].one(Classified)
    assert story.requests == 8
    assert story.tokens >= 8 * 50


async def test_a_thousand_hostile_requests_move_the_estimate_of_another_tenant_by_less_than_5_percent() -> None:
    text = chat(messages=[{"role": "user", "content": "a" * 2000}])
    guarded = Guarded(App(answer=COUNTED % 510), policy())
    for _ in range(5):
        await asked(guarded, text, "acme")
    before = held(guarded)
    guarded.sidecar.use_app(App(answer=COUNTED % 2000))
    for number in range(250):
        for more in ({}, {"input_ids": IDS}, {"documents": [{"text": "x"}]}, {"next_release": number}):
            await asked(guarded, {**text, **more}, "nightly")
    assert guarded.sidecar.estimator.bytes_per_token("nightly", "m") < 2  # what they teach stays with their tenant
    guarded.sidecar.use_app(App(answer=COUNTED % 510))
    await asked(guarded, text, "acme")
    assert before / 1.05 <= held(guarded) <= before * 1.05


async def asked(guarded: Guarded, body: dict[str, Any], tenant: str) -> None:
    """A request without a server, as a thousand of them need none."""
    headers = [(b"authorization", key(tenant).partition(": ")[2].encode())]
    await Caller(guarded.sidecar, json.dumps(body).encode(), headers=headers).run()


# choices

TOO_MANY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(n=9)),
    (CHAT, chat(best_of=9)),
    (COMPLETIONS, {"prompt": ["a"] * 3, "n": 9}),
]


@each(("path", "body"), TOO_MANY)
async def test_more_choices_than_the_policy_allows_are_a_400_that_says_how_many_are(
    path: str, body: dict[str, Any]
) -> None:
    app = App()
    async with guarding(app, policy(requests="100")) as guarded:
        refused = await guarded.ask(body, path=path)
        assert refused.is_error(400, "too_many_choices", "9 choices", "8 are allowed", "smaller n or best_of")
        await guarded.nothing_left()
    assert app.seen == []


async def test_choices_that_start_together_are_refused_where_the_tier_admits_fewer() -> None:
    async with guarding(App(), policy(requests="4")) as guarded:
        refused = await guarded.ask({"prompt": ["a"] * 2, "n": 5}, path=COMPLETIONS)
    assert refused.is_error(400, "request_too_large", "would start 5 sequences", "normal allows 4", "n or best_of")


# lists of prompts and inputs

LISTS: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, chat(n=8), 8),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 4}, 8),
    (COMPLETIONS, {"prompt": ["a"] * 2000, "max_tokens": 1}, 10),
    (COMPLETIONS, {"prompt": [[1]] * 3, "best_of": 4}, 10),
    (COMPLETIONS, {"prompt": "a", "input_ids": [[1]] * 11}, 10),
    (EMBEDDINGS, {"input": "a"}, 1),
    (EMBEDDINGS, {"input": [1, 2, 3]}, 1),
    (EMBEDDINGS, {"input": ["a"] * 10}, 10),
    (EMBEDDINGS, {"input": "a", "input_ids": [[1]] * 9}, 9),
    (EMBEDDINGS, {"input": [[1]] * 2048}, 10),
]


@each(("path", "body", "sequences"), LISTS)
async def test_a_list_holds_a_sequence_for_each_item_and_no_more_than_its_tier_admits(
    path: str, body: dict[str, Any], sequences: int
) -> None:
    app = App(is_held=True)
    async with guarding(app, policy(requests="10")) as guarded:
        asked = asyncio.create_task(guarded.ask(body, path=path))
        await guarded.until(leases=1)
        tiers: Any = guarded.pool.state()["tiers"]
        assert sum(tier["held"]["requests"] for tier in tiers) == sequences
        app.release()
        assert (await asked).status == 200
        await guarded.nothing_left()
    assert guarded.recorder.stories[-1].one(Classified).requests == sequences


async def test_a_list_is_refused_for_the_tokens_of_all_its_items() -> None:
    async with guarding(App(), policy(requests="10")) as guarded:
        refused = await guarded.ask({"prompt": [[1]] * 20, "max_tokens": 5999}, path=COMPLETIONS)
    assert refused.is_error(400, "request_too_large", "would hold 120000 tokens", "normal allows 100000")


async def test_a_list_falls_to_a_lower_tier_that_admits_fewer_than_it_has_items() -> None:
    limited = "limits: {requests_per_minute: 1}\nover_limit: {downgrade: batch}\n"
    async with guarding(App(), policy(requests="10", max_requests="9}, limit: 50%} #", acme=limited)) as guarded:
        for _ in range(2):
            assert (await guarded.ask({"input": ["a"] * 20}, key("acme"), path=EMBEDDINGS)).status == 200
    found = [story.one(Classified) for story in guarded.recorder.stories]
    assert [(each.tier, each.requests) for each in found] == [("normal", 5), ("batch", 5)]


# what cannot be sized

CONTINUED = {"input": "Go on", "previous_response_id": "resp_1", "max_output_tokens": 5}


@pytest.mark.parametrize(("priority", "most"), [("normal", 100_000), ("high", 32_000)])
async def test_a_prompt_that_cannot_be_sized_holds_the_most_that_its_tier_allows(priority: str, most: int) -> None:
    holding = policy("unsized: hold\n")
    tiers = tuple(replace(tier, max_request_tokens=32_000 if tier.name == "high" else None) for tier in holding.tiers)
    async with guarding(App(), replace(holding, tiers=tiers)) as guarded:
        body = {**CONTINUED, "priority": priority}
        assert (await guarded.ask(body, key("acme"), path=RESPONSES)).status == 200
    assert held(guarded) == most


async def test_a_prompt_that_cannot_be_sized_holds_its_estimate_where_tokens_are_unbounded() -> None:
    holding = policy("unsized: hold\n")
    async with guarding(App(), replace(holding, rules=holding.rules_for(None, 4))) as guarded:
        assert (await guarded.ask(CONTINUED, path=RESPONSES)).status == 200
    assert held(guarded) < 100


# the keys are reloaded, and observed alike


async def test_a_policy_that_replaces_another_bounds_the_next_request() -> None:
    async with guarding(App(), policy(requests="100")) as guarded:
        assert (await guarded.ask(chat(n=3))).status == 200
        guarded.sidecar.change_policy(policy("max_choices: 2\nunsized: hold\n", requests="100"))
        assert (await guarded.ask(chat(n=3))).is_error(400, "too_many_choices", "2 are allowed")
        assert (await guarded.ask(CONTINUED, path=RESPONSES)).status == 200
        guarded.sidecar.change_policy(policy("max_choices: 3\n", requests="100"))
        assert (await guarded.ask(chat(n=3))).status == 200
        refused = await guarded.ask(CONTINUED, path=RESPONSES)
        assert refused.is_error(400, "unsized_prompt", "previous_response_id", "unsized: hold")
