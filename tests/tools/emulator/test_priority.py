"""Who is served first, over real HTTP: where each engine reads a priority, and which way round."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.engines import Engine
from sidecar.tools.emulator import Scheduling
from tests.tools.emulator.emulated import DYNAMO, ENGINES, SGLANG, TRTLLM, VLLM, emulated, served_order

pytestmark = pytest.mark.anyio


def tagged(engine: type[Engine], value: float) -> dict[str, Any]:
    """The body field that carries a priority to this engine."""
    return {"nvext": {"agent_hints": {"priority": value}}} if engine is DYNAMO else {"priority": value}


async def order(engine: type[Engine], requests: list[dict[str, Any]], **settings: Any) -> list[float | None]:
    """Queues the requests one after the other behind a full slot and returns the order of their first tokens."""
    async with emulated(engine, **settings) as client:
        busy = await client.occupied()
        tasks = [await client.queued(**request) for request in requests]
        assert [status for status, _ in await client.released(busy, *tasks)] == [200] * len(tasks)
        return served_order(client.engine)


@pytest.mark.parametrize(
    ("engine", "values", "expected"),
    [
        (TRTLLM, [0.2, 1.0, 0.5, 0.9], [1.0, 0.9, 0.5, 0.2]),
        (VLLM, [10, 0, 5, -3], [-3, 0, 5, 10]),
        (SGLANG, [10, 0, 5, -3], [10, 5, 0, -3]),
        (DYNAMO, [10, 0, 5, 30], [30, 10, 5, 0]),
    ],
)
async def test_the_body_orders_the_queue_in_the_engines_direction(
    engine: type[Engine], values: list[float], expected: list[float]
) -> None:
    assert await order(engine, [tagged(engine, value) for value in values]) == expected


@pytest.mark.parametrize("engine", ENGINES)
async def test_under_fcfs_a_priority_is_accepted_and_ignored(engine: type[Engine]) -> None:
    values = [1, 0, 1, 0]
    requests = [tagged(engine, value) for value in values]
    assert await order(engine, requests, scheduling=Scheduling.FCFS) == values


@pytest.mark.parametrize("engine", ENGINES)
async def test_equal_priorities_are_first_come_first_served(engine: type[Engine]) -> None:
    async with emulated(engine) as client:
        busy = await client.occupied()
        tasks = [await client.queued(**tagged(engine, 1)) for _ in range(5)]
        ids = [answer["id"] for _, answer in await client.released(busy, *tasks)]
        assert [f"chatcmpl-{line.request_id}" for line in client.engine.log][1:] == ids


async def test_untagged_is_last_of_all_in_sglang_unless_there_is_a_default() -> None:
    requests: list[dict[str, Any]] = [{}, {"priority": -5}, {"priority": 5}]
    assert await order(SGLANG, requests) == [5, -5, None]
    assert await order(SGLANG, requests, default_priority=0) == [5, 0, -5]


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
async def test_vllms_header_overrides_the_body(api: str) -> None:
    body = {} if api == "messages" else {"priority": 1}
    requests = [{"api": api, "headers": {"X-Vllm-Priority": str(value)}, **body} for value in (7, 2)]
    assert await order(VLLM, requests) == [2, 7]


async def test_vllm_falls_back_to_the_body_for_a_header_it_cannot_parse() -> None:
    requests = [{"priority": value, "headers": {"X-Vllm-Priority": "urgent"}} for value in (9, 1)]
    assert await order(VLLM, requests) == [1, 9]


@pytest.mark.parametrize("engine", [TRTLLM, SGLANG])
@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_responses_and_messages_accept_a_priority_and_drop_it(engine: type[Engine], api: str) -> None:
    requests = [{"api": api, "priority": value} for value in (0, 1)]
    assert await order(engine, requests) == [None, None]


async def test_sglangs_header_needs_its_switch_and_misses_completions() -> None:
    def override(api: str) -> list[dict[str, Any]]:
        return [{"api": api, "headers": {"x-override-priority": str(value)}} for value in (1, 2)]

    assert await order(SGLANG, override("chat")) == [None, None]
    assert await order(SGLANG, override("chat"), header_overrides=True) == [2, 1]
    assert await order(SGLANG, override("messages"), header_overrides=True) == [2, 1]
    assert await order(SGLANG, override("completions"), header_overrides=True) == [None, None]


async def test_dynamos_headers_override_the_body_and_are_ignored_when_unparsable() -> None:
    header = "x-dynamo-request-priority"
    requests = [{**tagged(DYNAMO, 1), "headers": {header: value}} for value in ("10", "90", "soon", "99999999999")]
    assert await order(DYNAMO, requests) == [90, 10, 1, 1]


async def test_dynamos_strict_priority_comes_before_every_head_start() -> None:
    strict = {"nvext": {"agent_hints": {"priority": 1, "strict_priority": 1}}}
    assert await order(DYNAMO, [tagged(DYNAMO, 99), strict]) == [1, 99]


async def test_all_prompts_of_a_completion_queue_at_its_priority() -> None:
    async with emulated(TRTLLM) as client:
        busy = await client.occupied()
        low = await client.queued("completions", prompt=["a", "b"], priority=0.1)
        high = await client.queued("completions", prompt=["a", "b"], n=2, priority=0.9)
        assert client.engine.waiting == 6
        await client.released(busy, low, high)
        assert served_order(client.engine) == [0.9, 0.1]
