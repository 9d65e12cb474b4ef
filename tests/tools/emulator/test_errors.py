"""What each engine refuses: exact statuses and shapes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidecar.engines import Engine
from sidecar.tools.emulator import StepModel
from tests.tools.emulator.emulated import DYNAMO, ENGINES, SGLANG, TRTLLM, VLLM, emulated

pytestmark = pytest.mark.anyio


def message(engine: type[Engine], body: Any) -> str:
    """The sentence in an engine's error, after its shape was checked to the last key."""
    if engine is TRTLLM and set(body) == {"error"}:
        text = body["error"]
    elif engine is VLLM:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        text = body["error"]["message"]
    elif engine is DYNAMO:
        assert set(body) == {"message", "type", "code"}
        text = body["message"]
    else:
        assert set(body) == {"object", "message", "type", "param", "code"}
        assert body["object"] == "error"
        text = body["message"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority": 1.5}, "less than or equal to 1"),
        ({"priority": -0.1}, "greater than or equal to 0"),
        ({"priority": "high"}, "valid number"),
        ({"tier": "gold"}, "extra_forbidden"),
        ({"nvext": {}}, "extra_forbidden"),
    ],
)
async def test_trtllm_answers_400_with_a_bare_error_string(api: str, fields: dict[str, Any], words: str) -> None:
    async with emulated(TRTLLM) as client:
        status, body = await client.post(api, **fields)
    assert (status, set(body)) == (400, {"error"})
    assert words in body["error"]


async def test_an_older_trtllm_refuses_the_field_that_it_does_not_know() -> None:
    async with emulated(TRTLLM, priority_field=False) as client:
        status, body = await client.post(priority=0.5)
        assert (status, "extra_forbidden" in body["error"]) == (400, True)
        assert (await client.post())[0] == 200
        _, schema = await client.get("/openapi.json")
        assert "priority" not in schema


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_trtllm_accepts_any_field_where_its_models_allow_extras(api: str) -> None:
    async with emulated(TRTLLM) as client:
        assert (await client.post(api, priority=99, tier="gold"))[0] == 200


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
@pytest.mark.parametrize("value", [1.5, "soon", 2**63, -(2**63) - 1, [1]])
async def test_a_body_priority_that_is_no_int64_is_a_400(engine: type[Engine], value: object) -> None:
    async with emulated(engine) as client:
        status, body = await client.post(priority=value)
    assert status == 400
    assert "priority" in message(engine, body)


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
async def test_unknown_fields_are_accepted(engine: type[Engine]) -> None:
    async with emulated(engine) as client:
        assert (await client.post(tier="gold", nvext={"agent_hints": {"priority": "x"}}))[0] == 200


async def test_sglang_refuses_a_bad_override_header_only_when_it_reads_it() -> None:
    async with emulated(SGLANG, header_overrides=True) as client:
        status, body = await client.post(headers={"x-override-priority": "soon"})
    assert (status, message(SGLANG, body)) == (400, "invalid x-override-priority header")
    async with emulated(SGLANG) as client:
        assert (await client.post(headers={"x-override-priority": "soon"}))[0] == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority": 1}, "Unsupported parameter(s): `priority`"),
        ({"nvext": {"priority": 1}}, "unknown field `priority`"),
        ({"nvext": {"agent_hints": {"importance": 1}}}, "unknown field `importance`"),
        ({"nvext": {"agent_hints": {"priority": 1.5}}}, "expected i32"),
        ({"nvext": {"agent_hints": {"priority": 2**31}}}, "expected i32"),
        ({"nvext": {"agent_hints": {"strict_priority": -1}}}, "expected u32"),
        ({"nvext": []}, "expected a map"),
    ],
)
async def test_dynamo_refuses_what_its_types_do_not_hold(fields: dict[str, Any], words: str) -> None:
    async with emulated(DYNAMO) as client:
        status, body = await client.post(**fields)
    assert status == 400
    assert words in message(DYNAMO, body)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_body_that_is_no_json_object_is_a_400(engine: type[Engine]) -> None:
    async with emulated(engine) as client:
        for raw in (b"{", b"", b"[]", b'"text"', b'{"messages": [}', b'{"model": "\xff"}'):
            status, body = await client.post(raw=raw)
            assert status == 400, raw
            assert message(engine, body)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": None}),
    ("chat", {"messages": "hello"}),
    ("chat", {"max_tokens": 0}),
    ("chat", {"max_tokens": "many"}),
    ("chat", {"max_tokens": 10**30}),
    ("chat", {"n": -1}),
    ("chat", {"stream": "yes"}),
    ("chat", {"stream_options": {"include_usage": True}}),
    ("chat", {"stream": True, "stream_options": "usage"}),
    ("chat", {"model": 5}),
    ("completions", {"prompt": []}),
    ("completions", {"prompt": [1, "two"]}),
    ("completions", {"prompt": [[]]}),
    ("responses", {"input": 5}),
    ("embeddings", {"input": None}),
]


@pytest.mark.parametrize("engine", ENGINES)
async def test_wrong_types_are_a_400_and_hold_nothing(engine: type[Engine]) -> None:
    async with emulated(engine) as client:
        for api, fields in WRONG:
            status, body = await client.post(api, **fields)
            assert status == 400, fields
            assert message(engine, body)
            assert (client.engine.running, client.engine.waiting) == (0, 0)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_request_that_can_never_fit_is_a_400(engine: type[Engine]) -> None:
    async with emulated(engine, context_tokens=100) as client:
        status, body = await client.post("completions", prompt=[1] * 99)
        assert (status, "maximum context length is 100" in message(engine, body)) == (400, True)
    async with emulated(engine, steps=StepModel(kv_tokens=50)) as client:
        assert (await client.post(max_tokens=50))[0] == 400


async def test_vllms_messages_api_has_errors_of_its_own_shape() -> None:
    async with emulated(VLLM, max_queued=0) as client:
        status, body = await client.post("messages", max_tokens=None)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        status, body = await client.post("messages")
        assert (status, body["type"], body["error"]["type"]) == (503, "error", "overloaded_error")


async def test_vllm_counts_waiting_and_running_against_its_limit_whatever_the_priority() -> None:
    async with emulated(VLLM, max_queued=2) as client:
        busy, waiting = await client.occupied(), await client.queued(priority=9)
        status, body = await client.post(priority=0)
        assert status == 503
        assert message(VLLM, body)
        assert (await client.post(n=3))[0] == 503
        assert [status for status, _ in await client.released(busy, waiting)] == [200]
        assert client.engine.refused == 2


async def test_sglangs_full_queue_is_a_503_and_inside_a_stream_an_error_event_under_a_200() -> None:
    async with emulated(SGLANG, max_queued=1) as client:
        busy, waiting = await client.occupied(), await client.queued(priority=5)
        status, body = await client.post(priority=5)
        assert (status, message(SGLANG, body)) == (503, "The request queue is full.")
        status, events = await client.events(priority=5)
        assert (status, events[0]["error"]["code"], events[1:]) == (200, 503, ["[DONE]"])
        await client.released(busy, waiting)


async def test_sglangs_full_queue_lets_a_strictly_better_request_throw_out_the_worst() -> None:
    async with emulated(SGLANG, max_queued=2) as client:
        busy = await client.occupied()
        kept, lost = await client.queued(priority=5), await client.queued(priority=1)
        better = asyncio.create_task(client.post(priority=9))
        status, body = await lost
        assert (status, message(SGLANG, body)) == (503, "The request is aborted by a higher priority request.")
        assert [status for status, _ in await client.released(busy, kept, better)] == [200, 200]


async def test_dynamo_is_overloaded_with_529() -> None:
    async with emulated(DYNAMO, max_queued=1) as client:
        busy, waiting = await client.occupied(), await client.queued()
        status, body = await client.post()
        assert (status, body["code"]) == (529, 529)
        assert message(DYNAMO, body)
        await client.released(busy, waiting)


async def test_trtllm_bounds_nothing_but_embeddings() -> None:
    async with emulated(TRTLLM, max_queued=1) as client:
        busy, *waiting = [await client.occupied(), *[await client.queued() for _ in range(3)]]
        assert (await client.post("embeddings"))[0] == 429
        assert [status for status, _ in await client.released(busy, *waiting)] == [200] * 3
