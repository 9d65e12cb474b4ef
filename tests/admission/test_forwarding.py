"""What the app gets is the client's own, byte for byte, but for the priority and what follows from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policy.model import Policy
from tests.support.middleware import CHAT, COMPLETIONS, SMALL, Answer, App, Caller, Guarded, chat, guarding, key, policy
from tests.support.wire import connected, exchange, post

pytestmark = pytest.mark.anyio

ODD = (
    b' \r\n{ "messages" :\t[ {"content":"\\u0068\\u00e9 \xc3\xa9 \\"priority\\": 1"} ] ,"seed":123456789012345678901234'
    b', "x":1e400,"x":-0.0, "x" :1E+2,"max_tokens":7 ,\n"pri\\u006frities": {"priority": "mine"},"a\\/b":"\\/"\n} \r\n '
)
"""White space everywhere, escapes that need not be, numbers no double holds, duplicate keys, an order of its own."""


async def test_an_unchanged_body_is_the_very_same_bytes() -> None:
    app = App()
    guarded = Guarded(app, policy(engine="none"))
    await Caller(guarded.sidecar, ODD).run()
    assert app.seen[0].body is ODD


async def test_an_engine_that_reads_a_header_gets_the_very_same_bytes_too() -> None:
    app = App()
    await Caller(Guarded(app, policy(engine="vllm")).sidecar, ODD).run()
    assert app.seen[0].body is ODD
    assert app.seen[0].all(b"x-vllm-priority") == [b"20"]


async def test_a_body_gains_the_priority_and_nothing_else() -> None:
    app = App()
    async with guarding(app, policy(engine="tensorrt-llm")) as guarded:
        assert (await guarded.ask(ODD)).status == 200
    seen = app.seen[0]
    assert seen.body.replace(b'"priority":0.333,', b"", 1) == ODD
    assert seen.all(b"content-length") == [b"%d" % len(seen.body)]
    assert seen.json["priority"] == 0.333


async def test_the_clients_own_priorities_are_replaced_wherever_they_stand() -> None:
    app = App()
    body = b'{"messages":["hi"],"pr\\u0069ority": "normal" , "n":1}'
    async with guarding(app, policy(engine="sglang")) as guarded:
        answer = await guarded.ask(body)
    assert answer.headers["x-admission-tier"] == "normal"
    assert app.seen[0].body == b'{"priority":2,"messages":["hi"] , "n":1}'


async def test_a_null_does_not_undo_the_priority() -> None:
    app = App()
    async with guarding(app, policy(engine="tensorrt-llm")) as guarded:
        answer = await guarded.ask(b'{"messages":["hi"],"priority":null}', key("nightly"))
    assert answer.headers["x-admission-tier"] == "batch"
    assert app.seen[0].body == b'{"priority":0.0,"messages":["hi"]}'


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_SPACE = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])
_VALUES = st.one_of(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
        max_leaves=6,
    ).map(json.dumps),
    _TEXT.map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(["1e400", "-0", "0.10", "1E5", '"\\/"', '{"priority" : 1}', '[{"priority":"high"}, "}"]']),
)
_KEYS = st.one_of(_TEXT, st.sampled_from(["temperature", "stop", "priorit", "Priority"])).map(json.dumps)
_MESSAGES = st.just(('"messages"', '["hi"]'))
_RESERVED = {"priority", "nvext", "messages", "tools", "max_tokens", "max_completion_tokens", "n", "model", "stream"}
_MEMBERS = st.lists(st.tuples(_KEYS, _VALUES), max_size=6).map(
    lambda members: [member for member in members if json.loads(member[0]) not in _RESERVED]
)
_OURS = st.lists(
    st.tuples(st.sampled_from(['"priority"', '"pr\\u0069ority"']), st.sampled_from(['"high"', "0.5", "null", "1"])),
    max_size=1,  # of two, none: see test_bad_input
)


@st.composite
def bodies(draw: st.DrawFn, priorities: bool) -> tuple[bytes, list[tuple[str, str]]]:
    """A body, and its members that are no priority, as written."""
    kept = [draw(_MESSAGES), *draw(_MEMBERS)]
    members = draw(st.permutations([*kept, *(draw(_OURS) if priorities else [])]))
    written = [
        draw(_SPACE) + name + draw(_SPACE) + ":" + draw(_SPACE) + value + draw(_SPACE) for name, value in members
    ]
    return (draw(_SPACE) + "{" + ",".join(written) + "}" + draw(_SPACE)).encode(), [
        member for member in members if member in kept
    ]


def forwarded(body: bytes, with_policy: Policy, path: str = CHAT) -> bytes:
    app = App()
    caller = Caller(Guarded(app, with_policy).sidecar, body, path=path)
    asyncio.run(caller.run())
    assert caller.status == 200, caller.json
    return app.seen[0].body


SGLANG = policy(engine="sglang")


@given(bodies(priorities=False))
def test_taking_the_priority_out_again_gives_any_body_back(made: tuple[bytes, Any]) -> None:
    body, _ = made
    assert forwarded(body, SGLANG).replace(b'"priority":2,', b"", 1) == body


@given(bodies(priorities=True))
def test_every_other_member_stays_as_it_was_written(made: tuple[bytes, list[tuple[str, str]]]) -> None:
    body, kept = made
    text = forwarded(body, SGLANG).decode()
    pairs = json.loads(text, object_pairs_hook=list)
    assert [name for name, _ in pairs].count("priority") == 1
    assert [name for name, _ in pairs[1:]] == [json.loads(name) for name, _ in kept]
    place = 0
    for _, value in kept:  # as written, and in the same order
        place = text.index(value, place) + len(value)


async def test_a_chunked_upload_arrives_whole() -> None:
    app = App()

    async def pieces() -> AsyncIterator[bytes]:
        for index in range(0, len(SMALL), 7):
            yield SMALL[index : index + 7]
            await asyncio.sleep(0)

    async with (
        guarding(app, policy(engine="sglang")) as guarded,
        aiohttp.ClientSession(f"http://127.0.0.1:{guarded.port}") as session,
        session.post(CHAT, data=pieces()) as answer,
    ):
        assert answer.status == 200
    assert app.seen[0].json == {**chat(), "priority": app.seen[0].json["priority"]}
    assert app.seen[0].all(b"content-length") == []


async def test_a_body_in_many_packets_arrives_whole() -> None:
    app = App()
    async with guarding(app) as guarded, connected(guarded.port) as (reader, writer):
        request = post(CHAT, ODD)
        for index in range(0, len(request), 40):
            writer.write(request[index : index + 40])
            await asyncio.sleep(0.001)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
    assert app.seen[0].body == ODD


async def test_the_app_sees_the_clients_other_headers_unchanged_and_in_order() -> None:
    app = App()
    async with guarding(app, policy("forward_key: true\n", engine="sglang")) as guarded:
        sent = ("x-a: 1", "x-b: 2", "x-request-id: own", "x-a: 3", "x-override-priority: 9", key("acme"))
        await guarded.ask(chat(priority="batch"), *sent)
    names = [(name, value) for name, value in app.seen[0].scope["headers"] if name.startswith(b"x-")]
    assert names[:-1] == [(b"x-a", b"1"), (b"x-b", b"2"), (b"x-a", b"3")]
    assert names[-1] == (b"x-request-id", b"own")
    assert app.seen[0].all(b"authorization") == [b"Bearer sk-acme"]


ENGINES_OWN = [
    ("tensorrt-llm", {"priority": 0.9}, (), "priority"),
    ("vllm", {"priority": -5}, (), "priority"),
    ("vllm", {}, ("x-vllm-priority: -5",), "x-vllm-priority"),
    ("sglang", {}, ("x-override-priority: 99",), "x-override-priority"),
    ("sglang", {}, ("x-override-anything: 99",), "x-override-anything"),
    ("dynamo", {"nvext": {"agent_hints": {"priority": 9, "osl": 4}}}, (), "nvext.agent_hints.priority"),
    ("dynamo", {"nvext": {"agent_hints": {"strict_priority": 9}}}, (), "nvext.agent_hints.strict_priority"),
    ("dynamo", {}, ("x-dynamo-request-priority: 9",), "x-dynamo-request-priority"),
    ("dynamo", {}, ("x-dynamo-meta-policy-class: vip",), "x-dynamo-meta-policy-class"),
    ("none", {}, ("x-tenant-id: vip",), "x-tenant-id"),
]


@pytest.mark.parametrize(("engine", "members", "headers", "statement"), ENGINES_OWN)
async def test_an_engines_own_priority_from_a_client_does_not_count_and_does_not_pass(
    engine: str, members: dict[str, Any], headers: tuple[str, ...], statement: str
) -> None:
    app = App()
    with_policy = policy("sources: [header, endpoint, key]\n", engine=engine)
    async with guarding(app, with_policy) as guarded:
        answer = await guarded.ask(chat(**members), *headers)
        plain = await guarded.ask(chat())
    assert (answer.status, plain.status) == (200, 200)
    assert answer.headers["x-admission-tier"] == "normal"
    assert answer.headers["x-admission-ignored"] == statement
    first, second = app.seen
    hints = first.json.get("nvext", {}).get("agent_hints", {})
    assert not {"priority", "strict_priority", "latency_sensitivity"} & set(hints)
    assert first.json.get("priority") == second.json.get("priority")
    own = b"x-vllm-priority", b"x-dynamo-request-priority"
    for name in {header.partition(":")[0].encode() for header in headers} | {*own}:
        assert first.all(name) == (second.all(name) if name in own else [])


async def test_an_engines_own_priority_counts_where_the_policy_says_so() -> None:
    more = "sources: [engine, key]\nengine_levels: {critical: -10, high: 0, normal: 10, batch: 20}\n"
    app = App()
    async with guarding(app, policy(more, engine="vllm")) as guarded:
        answer = await guarded.ask(chat(), "x-vllm-priority: 15", key("acme"))
        better = await guarded.ask(chat(), "x-vllm-priority: -99", key("acme"))
    assert answer.headers["x-admission-tier"] == "batch"
    assert "x-admission-ignored" not in answer.headers
    assert better.headers["x-admission-clamped-from"] == "critical"
    assert [seen.all(b"x-vllm-priority") for seen in app.seen] == [[b"30"], [b"10"]]


async def test_the_aged_level_is_what_the_engine_hears() -> None:
    app = App(is_held=True)
    more = "aging: {promote_after: 50ms, ceiling: high}\n"
    async with guarding(app, policy(more, engine="vllm", requests="1")) as guarded:
        first = asyncio.create_task(guarded.ask())
        await guarded.until(leases=1)
        waits = asyncio.create_task(guarded.ask(chat(priority="batch")))
        await guarded.until(waiting=1)
        await asyncio.sleep(0.12)  # two promotions: batch to high
        app.release(2)
        answers = await asyncio.gather(first, waits)
        admitted = guarded.recorder.stories[1].events[2]
    assert [answer.headers["x-admission-tier"] for answer in answers] == ["normal", "batch"]
    assert app.seen[1].all(b"x-vllm-priority") == [b"10"]
    assert app.seen[1].scope["admission"].level == 1
    assert admitted.level == 1


async def test_a_batch_endpoint_forwards_to_the_engines_path_with_the_batch_priority() -> None:
    app = App()
    async with guarding(app, policy(engine="tensorrt-llm")) as guarded:
        raw = await exchange(guarded.port, post("/v1/batch/completions", b'{"prompt":[1,2,3]}'))
        assert Answer.parsed(raw).headers["x-admission-tier"] == "batch"
    assert app.seen[0].body == b'{"priority":0.0,"prompt":[1,2,3]}'
    assert app.seen[0].scope["path"] == COMPLETIONS
