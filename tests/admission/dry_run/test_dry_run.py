"""`mode: observe` cannot break a request: what passes is byte for byte what came, at once, whatever the pool does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from sidecar.admission import intake, usage
from sidecar.admission.dry_run import request, shadow
from sidecar.admission.dry_run.shadow import ShadowRegistry
from sidecar.events import Outcome, Settled, Verdict
from sidecar.policy.choices import Mode
from sidecar.proxy.proxy import ReverseProxy
from tests.support.dry_run import DryRun, observing
from tests.support.middleware import (
    CHAT,
    SMALL,
    App,
    Guarded,
    answer,
    chat,
    chunk,
    key,
    monitor,
    policy,
    start,
    whole_body,
)  # fmt: skip
from tests.support.serving import serving
from tests.support.wire import connected, exchange, post

pytestmark = pytest.mark.anyio

CLAMPS = (b"x-admission-clamped-from: ", b"x-admission-ignored: ")
ADDED = (b"x-admission-mode: ", b"x-admission-tier: ", b"x-request-id: ", b"request-id: ", *CLAMPS)
CHUNKED = (
    f"POST {CHAT} HTTP/1.1\r\nhost: sidecar\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode()
    + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (SMALL[:5], SMALL[5:], b'{"twice": 1}'))
    + b"0\r\n\r\n"
)
REQUESTS = {
    "plain": post(CHAT, SMALL),
    "a tenant's key": post(CHAT, SMALL, key("acme")),
    "an unknown key": post(CHAT, SMALL, "authorization: Bearer sk-nobody"),
    "no JSON": post(CHAT, b"not JSON"),
    "nothing": post(CHAT, b""),
    "not UTF-8": post(CHAT, b'{"model": "\xff\xfe"}'),
    "an unknown tier": post(CHAT, SMALL, "x-priority: best-of-all"),
    "spaces and twins": post(CHAT, b' {"model" : "m", "priority": 1,\n"priority":2 , "messages":[] } '),
    "the engine's own fields": post(
        CHAT,
        json.dumps(chat(priority="high", nvext={"agent_hints": {"priority": 3}})).encode(),
        "X-Vllm-Priority: 7",
        "x-priority: batch",
    ),
    "a trace": post(CHAT, SMALL, f"traceparent: 00-{'a' * 32}-{'b' * 16}-01", "x-request-id: mine"),
    "no duration": post(CHAT, SMALL, "x-admission-max-wait: soon"),
    "too large": post(CHAT, b" " * 100_000 + SMALL),
    "chunks": CHUNKED,
    "compressed": post(CHAT, b"\x1f\x8b\x08\x00" + b"\x00" * 40, "content-encoding: gzip"),
    "a query": post(f"{CHAT}?beta=1&x=%2F%00", SMALL),
    "another API": post("/v1/messages", b'{"max_tokens":5,"messages":[]}', "x-api-key: sk-acme"),
}


class Recording:
    """Answers with odd headers and in pieces; keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        known = ("method", "path", "raw_path", "query_string", "root_path", "http_version", "scheme", "headers")
        body = await whole_body(receive)
        self.given.append((*(scope[name] for name in known), sorted(scope), body))
        headers = [
            (b"Content-Type", b"text/x"),
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
            (b"x-priority", b"1"),
        ]
        await send({"type": "http.response.start", "status": 207, "headers": headers})
        await chunk(send, b'data: {"usage"')
        await chunk(send, b"")
        await chunk(send, b': {"prompt_tokens": 1}}\n\n', more=False)


def without_ours(response: bytes) -> bytes:
    """A response without the headers that the sidecar adds; each must be there once."""
    head, separator, body = response.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    for name in (ADDED[0], ADDED[2]):
        assert sum(line.startswith(name) for line in lines) == 1, response
    return b"\r\n".join(line for line in lines if not line.startswith(ADDED)) + separator + body


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=REQUESTS.keys())
async def test_byte_for_byte_as_without_a_sidecar(request_bytes: bytes) -> None:
    app = Recording()
    async with serving(app, lifespan="off") as bare:
        unguarded = await exchange(bare.port, request_bytes)
    async with observing(app, policy(), lifespan="off") as sidecar:
        observed = await exchange(sidecar.port, request_bytes)
        await sidecar.until_found(1)
    assert without_ours(observed) == unguarded
    before, behind = app.given
    assert behind == before
    assert b"\r\nx-admission-mode: observe\r\n" in observed


async def test_nothing_waits_for_a_full_pool() -> None:
    app = App(is_held=True)
    async with observing(app, policy(requests="1", max_requests="1")) as sidecar:
        asking = [asyncio.create_task(sidecar.ask(chat(priority="batch"))) for _ in range(6)]
        await sidecar.until_found(5)  # one that holds, and four that would have been refused; one waits
        assert len(app.seen) == 6
        assert (sidecar.leases, sidecar.waiting) == (1, 1)
        app.release(6)
        assert [(await one).status for one in asking] == [200] * 6
        await sidecar.until_found(6)
    ends = sorted(str(code) for _, code in sidecar.verdicts())
    assert ends == ["None", "None", *["queue_full"] * 4]


async def test_a_body_passes_piece_by_piece_and_is_understood_all_the_same() -> None:
    pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            pieces.put_nowait(message["body"])
        await answer(send, b"{}")

    async with observing(app, lifespan="off") as sidecar, connected(sidecar.port) as (reader, writer):
        head, _, body = post(CHAT, SMALL).partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n" + body[:10])
        assert await asyncio.wait_for(pieces.get(), 60) == body[:10]  # long before the rest was sent
        assert sidecar.found == []
        writer.write(body[10:])
        assert await asyncio.wait_for(pieces.get(), 60) == body[10:]
        assert b"x-admission-tier: normal" in await reader.read()
        assert (await sidecar.until_found(1))[0].tier == "normal"


async def test_an_answer_streams_chunk_by_chunk() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await whole_body(receive)
        await start(send)
        await chunk(send, b"data: one\n\n")
        await go_on.wait()
        await chunk(send, b"data: two\n\n", more=False)

    async with observing(app, lifespan="off") as sidecar, connected(sidecar.port) as (reader, writer):
        writer.write(post(CHAT, SMALL))
        await asyncio.wait_for(reader.readuntil(b"data: one\n\n"), 60)
        go_on.set()
        assert b"data: two\n\n" in await reader.read()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_hangs_up_is_noticed_by_the_app_as_ever(has_begun: bool) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await whole_body(receive)
        if has_begun:
            await start(send)
            await chunk(send, b"data: one\n\n")
        said.put_nowait("running")
        said.put_nowait((await receive())["type"])

    async with observing(app, lifespan="off") as sidecar:
        async with connected(sidecar.port) as (reader, writer):
            writer.write(post(CHAT, SMALL))
            assert await asyncio.wait_for(said.get(), 60) == "running"
            if has_begun:
                await reader.readuntil(b"data: one\n\n")
        assert await asyncio.wait_for(said.get(), 60) == "http.disconnect"
    (story,) = sidecar.recorder.stories
    assert story.one(Settled).outcome is Outcome.CLIENT_LEFT


async def test_an_app_that_answers_before_it_has_read_leaves_it_unknown() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answer(send, b"no", 404)

    async with observing(app, lifespan="off") as sidecar:
        assert (await exchange(sidecar.port, post(CHAT, SMALL))).startswith(b"HTTP/1.1 404")
        await sidecar.until_found(1)
    assert sidecar.verdicts() == [(Verdict.UNKNOWN, "body_unread")]


async def test_a_path_of_the_policys_own_goes_where_the_policy_says() -> None:
    app = App()
    async with observing(app) as sidecar:
        assert (await sidecar.ask({"prompt": "hi"}, path="/v1/batch/completions")).headers[
            "x-admission-tier"
        ] == "batch"
        await sidecar.until_found(1)
    assert app.seen[0].scope["path"] == "/v1/completions"


# Whatever is broken on our side


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a defect")


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "place", ["intake", "pool", "observer", "observed", "overheard", "usage", "headers", "shadows", "settled"]
)
async def test_a_defect_of_ours_is_logged_once_and_every_request_passes(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    sidecar = DryRun(app, policy())
    targets: dict[str, tuple[Any, str]] = {
        "intake": (intake, "decode"),
        "pool": (sidecar.pool, "enter"),
        "observer": (sidecar.recorder, "received"),
        "overheard": (intake.RequestIntake, "feed"),
        "usage": (usage.UsageReader, "feed"),
        "headers": (request, "id_headers"),
        "shadows": (sidecar.sidecar.shadows, "follow"),
        "settled": (sidecar.sidecar.estimator, "learn"),
    }
    if place == "observed":
        monitor(sidecar.sidecar, observed=broken)
    else:
        monkeypatch.setattr(*targets[place], broken)
    app.answer = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}'
    async with serving(sidecar.sidecar) as sidecar.served:
        for _ in range(3):
            answered = await sidecar.ask()
            assert (answered.status, answered.body) == (200, app.answer)
        await sidecar.until(leases=0, waiting=0)
        await asyncio.sleep(0.01)
    assert [seen.body for seen in app.seen] == [SMALL] * 3
    assert len([record for record in caplog.records if "a defect in the sidecar" in record.message]) == 1
    assert len(sidecar.sidecar.shadows) == len(sidecar.sidecar.watchdog) == 0


async def test_a_pool_that_never_answers_holds_no_one_and_is_left_when_the_sidecar_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sidecar = DryRun(App(), policy())
    monkeypatch.setattr(sidecar.sidecar.pool, "enter", never)
    async with serving(sidecar.sidecar) as sidecar.served:
        assert [(await sidecar.ask()).status for _ in range(3)] == [200] * 3
        assert (len(sidecar.sidecar.shadows), sidecar.found) == (3, [])
        await asyncio.wait_for(sidecar.sidecar.shadows.close(), 60)
    assert sidecar.verdicts() == [(Verdict.UNKNOWN, "stopped")] * 3


# Bounds


async def test_there_are_only_so_many_shadows() -> None:
    app = App(is_held=True)
    sidecar = DryRun(app, policy())
    sidecar.sidecar.shadows = ShadowRegistry(most=2)
    async with serving(sidecar.sidecar) as sidecar.served:
        asking = [asyncio.create_task(sidecar.ask()) for _ in range(3)]
        await sidecar.until_found(3)
        assert sorted(str(code) for _, code in sidecar.verdicts()) == ["None", "None", "too_many_shadows"]
        app.release(3)
        assert [(await one).status for one in asking] == [200] * 3
        await sidecar.no_shadow_left()


async def test_a_shadow_does_not_wait_for_ever_where_its_tier_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "LONGEST_WAIT_S", 0.02)
    app = App(is_held=True)
    async with observing(app, policy(requests="1")) as sidecar:
        asking = [asyncio.create_task(sidecar.ask(chat(priority="high"), key("acme"))) for _ in range(2)]
        await sidecar.until_found(2)
        assert sidecar.verdicts()[1] == (Verdict.UNKNOWN, "waited_too_long")
        app.release(2)
        await asyncio.gather(*asking)


async def test_a_shadow_keeps_no_body() -> None:
    app = App(is_held=True)
    async with observing(app, policy(requests="1")) as sidecar:
        asking = [asyncio.create_task(sidecar.ask(chat(user="x" * 50_000))) for _ in range(2)]
        await sidecar.until(leases=1, waiting=1)
        kept = [one.request for one in sidecar.sidecar.shadows._following.values()]
        assert [(len(one.body), one.payload.text()) for one in kept] == [(0, "")] * 2
        app.release(2)
        await asyncio.gather(*asking)


# Beginning and end


async def test_once_it_enforces_no_one_waits_for_a_shadow_whose_request_is_over() -> None:
    app = App(is_held=True)
    sidecar = DryRun(app, policy(requests="1"))
    enforcing = replace(sidecar.sidecar.policy, mode=Mode.ENFORCE)
    async with serving(sidecar.sidecar) as sidecar.served:
        asking = [asyncio.create_task(sidecar.ask()) for _ in range(3)]
        await sidecar.until(leases=1, waiting=2)
        sidecar.sidecar.change_policy(enforcing)
        await sidecar.until(leases=1, waiting=0)  # the first still runs
        real = asyncio.create_task(sidecar.ask())
        await sidecar.until(leases=1, waiting=1)
        app.release(3)
        assert [(await one).status for one in asking] == [200] * 3
        await sidecar.until(leases=1, waiting=0)
        app.release()
        assert (await real).status == 200
        await sidecar.until(leases=0)

        sidecar.sidecar.change_policy(replace(enforcing, mode=Mode.OBSERVE))
        asking = [asyncio.create_task(sidecar.ask()) for _ in range(2)]
        await sidecar.until(leases=1, waiting=1)
        await asyncio.sleep(0.3)
        app.release(2)
        await asyncio.gather(*asking)
        await sidecar.until(leases=1, waiting=0)  # the second one's: it would have run for as long again
        sidecar.sidecar.change_policy(enforcing)
        await sidecar.until(leases=0)


@pytest.mark.parametrize("name", ["too large", "chunks", "the engine's own fields", "a query", "an unknown key"])
async def test_the_engine_behind_the_proxy_gets_the_same_bytes(name: str) -> None:
    engine = Recording()
    async with serving(engine, lifespan="off") as behind:
        proxy = ReverseProxy(behind.url)
        async with serving(proxy) as bare:
            await exchange(bare.port, REQUESTS[name])
        async with observing(proxy) as sidecar:
            await exchange(sidecar.port, REQUESTS[name])
            await sidecar.until_found(1)
    before, observed = engine.given
    assert observed == before


async def test_draining_refuses_no_one_and_waits_for_no_shadow() -> None:
    app = App(is_held=True)
    async with observing(app, policy(requests="1", max_wait="1h")) as sidecar:
        asking = [asyncio.create_task(sidecar.ask()) for _ in range(3)]
        await sidecar.until(leases=1, waiting=2)
        sidecar.sidecar.drain()
        assert list(sidecar.sidecar.readiness()) == ["draining"]
        drained = asyncio.create_task(sidecar.sidecar.drained())
        asking.append(asyncio.create_task(sidecar.ask()))
        await sidecar.until(waiting=3)
        assert not drained.done()
        app.release(4)
        assert [(await one).status for one in asking] == [200] * 4
        await asyncio.wait_for(drained, 60)  # its shadows wait and hold for longer
        await asyncio.wait_for(sidecar.sidecar.shadows.close(), 60)
        assert (sidecar.leases, sidecar.waiting) == (0, 0)
        assert len(await sidecar.until_found(4)) == 4


async def test_a_sidecar_that_is_never_empty_closes_its_port_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.admission.controller.DRY_RUN_DRAIN_S", 0.05)
    app = App(is_held=True)
    async with observing(app) as sidecar:
        asking = asyncio.create_task(sidecar.ask())
        await sidecar.until(leases=1)
        sidecar.sidecar.drain()
        await asyncio.wait_for(sidecar.sidecar.drained(), 60)
        app.release()
        assert (await asking).status == 200


def test_the_mode_is_said_where_people_look() -> None:
    sidecar = DryRun(App(), policy()).sidecar
    assert sidecar.state()["mode"] == "observe"
    assert any("mode: observe" in notice for notice in sidecar.notices())
    enforcing = Guarded(App(), policy()).sidecar
    assert enforcing.state()["mode"] == "enforce"
    assert not any("observe" in notice for notice in enforcing.notices())
