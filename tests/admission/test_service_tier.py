"""`service_tier` in the body: a source of the tier, for the APIs' own clients, whose answers say what was granted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.apis import Api
from sidecar.cli import main
from sidecar.composition.serving import new_proxy
from sidecar.engines import ENGINES
from sidecar.identity.service_tiers import ServiceTiers
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.server.http_protocol import BoundedHttpProtocol
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.admission.test_sse_keepalive import OPENAI_EVENTS, Engine, pool_taken
from tests.support.each import each
from tests.support.late import anthropic, openai
from tests.support.middleware import (
    CHAT,
    KEYS,
    App,
    chat,
    chunk,
    guarding,
    key,
    policy,
    start,
    whole_body,
    write_policy,
)
from tests.support.serving import serving
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

SOURCES = "sources: [service_tier, body, header, endpoint, key]\n"
TIERS = """\
service_tiers: {priority: high, scale: critical, default: normal, standard_only: normal, flex: batch, batch: batch}
"""
HELLO: Any = [{"role": "user", "content": "hello"}]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CRITICAL, HIGH, NORMAL, BATCH = "critical", "high", "normal", "batch"


def tiered(more: str = "", **settings: str) -> Policy:
    return policy(SOURCES + TIERS + more, **settings)


@asynccontextmanager
async def an_engine(*, is_proxied: bool, engine: str = "vllm", more: str = "") -> AsyncIterator[str]:
    """The address of an emulated engine with the middleware mounted in it, or with `sidecar serve`'s before it."""
    emulated = Emulator(EmulatorConfig(engine=ENGINES[engine], steps=StepModel(step_us=100))).app
    written = tiered(more, engine=engine)
    if not is_proxied:
        async with serving(AdmissionMiddleware(emulated, written)) as served:
            yield served.url
        return
    async with serving(emulated) as upstream:
        sidecar = AdmissionMiddleware(new_proxy(upstream.url, written), written)
        async with serving(sidecar, http=BoundedHttpProtocol) as served:
            yield served.url


@pytest.mark.parametrize("is_proxied", [False, True])
async def test_openais_client_is_told_which_tier_it_got(is_proxied: bool) -> None:
    async with (
        an_engine(is_proxied=is_proxied) as url,
        openai.AsyncOpenAI(api_key="sk-acme", base_url=f"{url}/v1", max_retries=0) as client,
    ):
        for asked, granted, tier in (
            ("priority", "priority", HIGH),
            ("auto", "default", NORMAL),
            ("flex", "flex", BATCH),
            ("scale", "priority", HIGH),  # critical is more than acme may have
        ):
            chats, responses = client.chat.completions, client.responses
            raw = await chats.with_raw_response.create(model="m", messages=HELLO, service_tier=asked, max_tokens=5)
            assert raw.headers["x-admission-tier"] == tier
            assert raw.headers.get("x-admission-clamped-from") == ("critical" if asked == "scale" else None)
            assert "x-admission-ignored" not in raw.headers
            whole = raw.parse()
            assert (whole.service_tier, whole.choices[0].finish_reason) == (granted, "length")
            text = ""
            async for piece in await chats.create(
                model="m", messages=HELLO, service_tier=asked, max_tokens=5, stream=True
            ):
                assert piece.service_tier == granted
                text += piece.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content
            answer = await responses.create(model="m", input="hello", service_tier=asked, max_output_tokens=5)
            assert answer.service_tier == granted
            events = await responses.create(
                model="m", input="hello", service_tier=asked, max_output_tokens=5, stream=True
            )
            with_tier = [
                (event.type, event.response.service_tier) async for event in events if hasattr(event, "response")
            ]
            assert with_tier == [(f"response.{name}", granted) for name in ("created", "in_progress", "completed")]
        unasked = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=5)
        assert unasked.service_tier is None


@pytest.mark.long  # its import takes a second
@pytest.mark.parametrize("is_proxied", [False, True])
async def test_anthropics_client_is_told_which_tier_it_got(is_proxied: bool) -> None:
    async with (
        an_engine(is_proxied=is_proxied) as url,
        anthropic.AsyncAnthropic(api_key="sk-acme", base_url=url, max_retries=0) as client,
    ):
        asked: Any
        for asked, granted in (("auto", "standard"), ("standard_only", "standard"), ("priority", "priority")):
            create: Any = {"model": "m", "messages": HELLO, "max_tokens": 5, "service_tier": asked}
            whole = await client.messages.create(**create)
            assert whole.usage.service_tier == granted
            async with client.messages.stream(**create) as stream:
                last = await stream.get_final_message()
            assert (last.usage.service_tier, last.usage.output_tokens) == (granted, 5)
            assert last.content[0].text == whole.content[0].text
        plain = await client.messages.create(model="m", messages=HELLO, max_tokens=5)
        assert plain.usage.service_tier is None


# What the engine gets


async def passed(body: bytes, with_policy: Policy, *headers: str, path: str = CHAT) -> tuple[bytes, Any]:
    """The body that the app got, and the answer."""
    app = App(answer=b'{"choices":[],"service_tier":null}')
    async with guarding(app, with_policy) as guarded:
        answer = await guarded.ask(body, key("acme"), *headers, path=path)
    return app.seen[0].body if app.seen else b"", answer


def body_of(value: str) -> bytes:
    return b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user"}], "service_tier": %b}' % value.encode()


@each("value", ['"priority"', '"auto"', "null", '"batch"', '"pri\\u006frity"', '"flex", "service_tier": "priority"'])
async def test_a_value_that_is_read_here_does_not_reach_the_engine(value: str) -> None:
    forwarded, answer = await passed(body_of(value), tiered())
    assert forwarded == body_of("1").replace(b', "service_tier": 1', b"")
    assert "x-admission-ignored" not in answer.headers


@each("value", ['"ultra"', "7", "[]", '{"a":{}}', '"Priority"', '" priority"', '""'])
async def test_another_value_counts_as_not_given_is_reported_and_the_engine_decides(value: str) -> None:
    forwarded, answer = await passed(body_of(value), tiered(), "x-priority: batch")
    assert forwarded == body_of(value)
    assert (answer.headers["x-admission-tier"], answer.headers["x-admission-ignored"]) == (BATCH, "service_tier")
    assert answer.json["service_tier"] == "flex"  # not what the engine may have repeated


@each("value", ['"priority"', '"ultra"', "7", "null"])
async def test_without_the_source_it_is_a_field_as_any_other(value: str) -> None:
    forwarded, answer = await passed(body_of(value), policy())
    assert forwarded == body_of(value)
    assert answer.body == b'{"choices":[],"service_tier":null}'
    assert answer.headers["x-admission-tier"] == NORMAL
    assert "x-admission-ignored" not in answer.headers


async def test_the_400_of_an_unknown_value_is_the_engines_own() -> None:
    """TensorRT-LLM refuses every field of a chat that it does not know: no value that is read here may reach it."""
    async with (
        an_engine(is_proxied=True, engine="tensorrt-llm") as url,
        openai.AsyncOpenAI(api_key="sk-acme", base_url=f"{url}/v1", max_retries=0) as client,
    ):
        known = await client.chat.completions.create(model="m", messages=HELLO, service_tier="flex", max_tokens=5)
        assert known.service_tier == "flex"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=HELLO, service_tier="fast", max_tokens=5)
    assert "service_tier" in refused.value.response.text
    assert refused.value.response.headers["x-admission-ignored"] == "service_tier"


# Who may have which


BEST = Endpoint(path="/v1/best", api=Api.CHAT, level=0, forward_to=CHAT)


@each(
    ("tenant", "members", "headers", "path", "tier", "clamped"),
    [
        ("nightly", {"service_tier": "priority"}, (), CHAT, BATCH, HIGH),
        ("nightly", {"priority": "critical"}, (), CHAT, BATCH, CRITICAL),
        ("nightly", {}, ("x-priority: critical",), CHAT, BATCH, CRITICAL),
        ("nightly", {}, (), BEST.path, BATCH, CRITICAL),
        ("nightly", {"service_tier": "scale", "priority": "high"}, ("x-priority: high",), BEST.path, BATCH, CRITICAL),
        ("nightly", {"service_tier": "auto"}, (), BEST.path, BATCH, CRITICAL),
        ("acme", {"service_tier": "scale"}, (), CHAT, HIGH, CRITICAL),
        ("acme", {"service_tier": "flex", "priority": 1.0}, ("x-vllm-priority: -9",), BEST.path, BATCH, None),
        ("acme", {"service_tier": "auto", "priority": "high"}, ("x-priority: batch",), CHAT, HIGH, None),
        ("acme", {"service_tier": "auto"}, ("x-priority: batch",), CHAT, BATCH, None),
    ],
)
async def test_no_client_gets_a_better_tier_than_it_may_have(  # noqa: PLR0917  # a row of the table
    tenant: str, members: Any, headers: tuple[str, ...], path: str, tier: str, clamped: str | None
) -> None:
    app, written = App(answer=b'{"choices":[]}'), tiered()
    written = replace(written, endpoints={**written.endpoints, BEST.path: BEST})
    async with guarding(app, written) as guarded:
        answer = await guarded.ask(chat(**members), key(tenant), *headers, path=path)
    assert (answer.headers["x-admission-tier"], answer.headers.get("x-admission-clamped-from")) == (tier, clamped)
    others = [*(["priority"] if "priority" in members and "service_tier" in members else []), *headers]
    ignored = answer.headers.get("x-admission-ignored", "")
    if members.get("service_tier") not in (None, "auto"):
        assert ignored == ", ".join(name.partition(":")[0] for name in others)
        assert answer.json == {"choices": [], "service_tier": {HIGH: "priority", BATCH: "flex"}[tier]}
    assert app.seen[0].json == chat()


async def test_a_downgraded_request_says_what_it_is_charged_as() -> None:
    limits = "limits: {requests_per_minute: 1, burst: 1m}\nover_limit: {downgrade: batch}\n"
    async with guarding(App(answer=b'{"choices":[]}'), tiered(acme=limits)) as guarded:
        for granted, tier, before in (("priority", HIGH, None), ("flex", BATCH, HIGH)):
            answer = await guarded.ask(chat(service_tier="priority"), key("acme"))
            assert answer.json["service_tier"] == granted
            assert answer.headers["x-admission-tier"] == tier
            assert answer.headers.get("x-admission-downgraded-from") == before


# The name of what was granted


@each(
    ("api", "level", "asked", "name"),
    [
        (Api.CHAT, 1, "priority", "priority"),
        (Api.CHAT, 1, "fast", "fast"),  # as its client called it
        (Api.CHAT, 1, "flex", "priority"),
        (Api.CHAT, 2, "auto", "default"),
        (Api.CHAT, 2, "standard_only", "standard_only"),
        (Api.CHAT, 4, "priority", "flex"),
        (Api.CHAT, 4, "batch", "batch"),
        (Api.MESSAGES, 2, "auto", "standard"),
        (Api.MESSAGES, 2, "standard_only", "standard"),
        (Api.MESSAGES, 2, "default", "default"),
        (Api.MESSAGES, 4, "auto", "batch"),
        (Api.MESSAGES, 1, "auto", "priority"),
        (Api.CHAT, 3, "priority", "flex"),  # without a name: the next less important one
        (Api.CHAT, 0, "priority", "priority"),
        (Api.CHAT, 5, "priority", "flex"),  # below all names
        (Api.CHAT, 2, "\udc00", "default"),
    ],
)
def test_a_granted_tier_has_a_name_of_its_api(api: Api, level: int, asked: str, name: str) -> None:
    tiers = (("priority", 1), ("fast", 1), ("auto", 2), ("standard_only", 2), ("default", 2), ("flex", 4), ("batch", 4))
    assert ServiceTiers(tiers).granted_name(api, level, json.dumps(asked).encode()) == name


# On the way back


async def test_after_comments_a_stream_is_edited_too() -> None:
    engine = Engine(*OPENAI_EVENTS, b"data: [DONE]\n\n")
    async with guarding(engine, tiered("keep_alive: 20ms\n", requests="1")) as guarded:
        holder = await pool_taken(guarded)
        asking = asyncio.create_task(guarded.ask(chat(stream=True, service_tier="priority"), key("acme")))
        await guarded.until(waiting=1)
        engine.first_may_end.set()
        answer = await asking
        await holder
    events = [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: {")]
    assert [json.loads(event)["service_tier"] for event in events] == ["priority"] * 2
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_what_is_no_answer_of_the_api_passes_as_it_is() -> None:
    for body in (b'{"error":{"message":"no"}}', b"hello", b"", b'{"choices":', b'["choices"]'):
        async with guarding(App(answer=body), tiered()) as guarded:
            answer = await guarded.ask(chat(service_tier="flex"), key("acme"))
        assert (answer.body, answer.headers["x-admission-tier"]) == (body, BATCH)
    async with guarding(App(answer=b'{"choices":[]}'), tiered()) as guarded:
        answer = await guarded.ask({"prompt": "hi", "service_tier": "flex"}, key("acme"), path="/v1/completions")
        assert answer.body == b'{"choices":[]}'  # the API has no such member
        unasked = await guarded.ask(chat(service_tier=None), key("acme"))
        assert unasked.body == answer.body
        refused = await guarded.ask(chat(service_tier="flex", messages=[]), key("acme"))
        assert refused.is_error(400, "invalid_body")


async def test_an_answer_that_breaks_off_is_not_shown_as_a_whole_one() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await whole_body(receive)
            await start(send)
            await chunk(send, b'{"choices":[]')
            raise ConnectionError
        await App()(scope, receive, send)

    async with guarding(app, tiered()) as guarded, connected(guarded.port) as (reader, writer):
        writer.write(post(CHAT, json.dumps(chat(service_tier="flex")).encode(), key("acme")))
        answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"choices" not in answer
    assert not answer.endswith(b"0\r\n\r\n")


async def test_a_renamed_model_and_the_tier_are_said_in_one_answer() -> None:
    app = App(answer=b'{"id": "1", "model": "llama", "choices": [], "service_tier": null}')
    async with guarding(app, tiered("aliases: {gpt: {as: llama}}\n")) as guarded:
        answer = await guarded.ask(chat(model="gpt", service_tier="flex"), key("acme"))
    assert answer.body == b'{"id":"1","model":"gpt","choices":[],"service_tier":"flex"}'
    assert app.seen[0].json == chat(model="llama")


async def test_observed_requests_and_answers_pass_unchanged() -> None:
    forwarded, answer = await passed(body_of('"priority"'), tiered("mode: observe\n"))
    assert forwarded == body_of('"priority"')
    assert (answer.body, answer.headers["x-admission-tier"]) == (b'{"choices":[],"service_tier":null}', HIGH)
    clamped = (await passed(body_of('"scale"'), tiered("mode: observe\n")))[1]
    assert clamped.headers["x-admission-clamped-from"] == CRITICAL


def test_explain_says_what_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_policy(tmp_path, SOURCES + TIERS)
    body = tmp_path / "body.json"
    for value, lines in (
        ('"scale"', ['   service_tier service_tier: "scale", which means critical   <- wins', "clamped to high"]),
        (
            '"ultra"',
            ['   service_tier service_tier: "ultra", which asks for no tier', "   ignored: service_tier   (resp"],
        ),
        ("null", ["   service_tier says nothing", "   key          says normal   <- wins"]),
    ):
        body.write_bytes(body_of(value))
        assert main(["explain", str(written), "--path", CHAT, "--key", KEYS["acme"], "--body", str(body)]) == 0
        printed = capsys.readouterr().out
        assert [line for line in lines if line not in printed] == [], printed
