"""Predictions against an emulated engine with a prefix cache, over a socket: its own count agrees, by every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.admission.usage import UsageReader
from sidecar.apis import Api
from sidecar.fleet.affinity import PROMPT_CACHE_KEY, AffinityPredictor
from sidecar.lengths.token_estimates import Estimator
from sidecar.payload.decode import decode
from tests.tools.emulator.emulated import PATHS, VLLM, Client, emulated

pytestmark = pytest.mark.anyio

SYSTEM = "You answer in one word. " * 100
ROUNDING = 144
"""Tokens by which they may differ: a block of ours, and one of the engine's."""


def fields_of(api: Api, turns: list[tuple[str, str]]) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in turns]
    if api is Api.COMPLETIONS:
        return {"prompt": SYSTEM + "".join(content for _, content in turns)}
    if api is Api.RESPONSES:
        return {"instructions": SYSTEM, "input": messages}
    if api is Api.MESSAGES:
        return {"system": SYSTEM, "messages": messages}
    return {"messages": [{"role": "system", "content": SYSTEM}, *messages]}


class Pool:
    """One engine, predicted."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.affinity = AffinityPredictor(session=(PROMPT_CACHE_KEY,))
        self.affinity.set_engines({"a#1": 100_000})
        self.estimator = Estimator()

    async def ask(self, api: Api, turns: list[tuple[str, str]], **fields: Any) -> tuple[int, int | None]:
        """The predicted and the reported tokens of one request."""
        most = "max_output_tokens" if api is Api.RESPONSES else "max_tokens"
        body = json.dumps({"model": "m", most: 8, **fields_of(api, turns), **fields}).encode()
        prompt_tokens = self.estimator.prompt_tokens(decode(api, body), "t")
        prediction = self.affinity.predict("t", api, body, {}, prompt_tokens)
        self.affinity.sent(prediction, "a#1")
        usage = UsageReader()
        headers = {"content-type": "application/json"}
        async with self.client.session.post(self.client.url + PATHS[api.value], data=body, headers=headers) as answer:
            assert answer.status == 200
            async for chunk in answer.content.iter_any():
                usage.feed(chunk)
        usage.read()
        self.affinity.ended(
            prediction,
            prompt_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens or 0,
        )
        return prediction.tokens_at("a#1"), usage.cached_tokens


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES])
async def test_the_engine_finds_what_was_predicted_turn_by_turn(api: Api) -> None:
    async with emulated(VLLM, slots=4, prefix_cache=True, cache_report=True) as client:
        pool = Pool(client)
        turns: list[tuple[str, str]] = []
        seen = []
        for number in range(4):
            turns.append(("user", f"question {number} " * 60))
            seen.append(await pool.ask(api, turns))
            turns.append(("assistant", f"answer {number} " * 8))
        assert seen[0] == (0, 0)
        for predicted, cached in seen[1:]:
            assert cached is not None
            assert abs(predicted - cached) <= ROUNDING
        assert seen[3][0] > seen[2][0] > seen[1][0] > 500
        table = pool.affinity.tables["a#1"]
        assert table.measured_tokens == sum(cached or 0 for _, cached in seen)


async def test_another_salt_finds_nothing_in_the_prediction_nor_in_the_engine() -> None:
    async with emulated(VLLM, slots=4, prefix_cache=True, cache_report=True) as client:
        pool = Pool(client)
        turns = [("user", "question " * 60)]
        await pool.ask(Api.CHAT, turns, cache_salt="ann")
        assert await pool.ask(Api.CHAT, turns, cache_salt="bob") == (0, 0)
        predicted, cached = await pool.ask(Api.CHAT, turns, cache_salt="ann")
        assert cached is not None
        assert predicted > 500
        assert abs(predicted - cached) <= ROUNDING


async def test_an_engine_with_its_report_off_teaches_nothing() -> None:
    async with emulated(VLLM, slots=4, prefix_cache=True) as client:
        pool = Pool(client)
        for _ in range(3):
            _, cached = await pool.ask(Api.CHAT, [("user", "question " * 60)])
            assert cached is None
        assert pool.affinity.tables["a#1"].predicted_tokens == 0
