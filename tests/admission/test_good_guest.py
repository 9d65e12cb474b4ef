"""The middleware in somebody's app: what the middlewares around it see, what the app knows, and what runs once."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from sidecar import AdmissionMiddleware, granted
from tests.admission.test_preemption import CRITICAL, Engine, rules, running
from tests.support.each import each
from tests.support.middleware import CHAT, App, Caller, chat, guarding, policy
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio

SMALL = json.dumps(chat()).encode()
POLICY_WITHOUT = """\
engine: none
capacity: {{requests: 1}}
tiers: {{critical: {{preempt_after: 50ms}}, batch: {{preemptible: true}}}}
default_tier: batch
anonymous: batch
{more}
"""
BATCH = "/v1/batch/completions"
"""It is forwarded to another path."""


async def answered(request: Request) -> Response:
    request.state.user = "ada"
    return JSONResponse({"at": request.url_for("any", which="there").path})


def routed() -> Starlette:
    """An app in an app, so that routing writes all that it ever does."""
    inner = Starlette(routes=[Route("/{which:path}", answered, methods=["POST"], name="any")])
    return Starlette(routes=[Mount("/v1", inner), Route("/tokenize", answered, methods=["POST"])])


class Around:
    """A middleware that looks at its scope as the answer begins and at its end, as those for metrics do."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.at_start: dict[str, Any] = {}
        self.at_end: dict[str, Any] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.at_start = {**scope}
            await send(message)

        try:
            await self.app(scope, receive, sent)
        finally:
            self.at_end = {**scope}


@each(
    ("path", "more", "engine_key"),
    [
        (CHAT, "", None),
        (CHAT, "", "sk-engine"),
        (CHAT, "mode: observe\n", None),
        (CHAT, "mode: pass\n", "sk-engine"),
        (BATCH, "", None),
        (BATCH, "mode: observe\n", None),
        (BATCH, "mode: pass\n", None),
        ("/tokenize", "", "sk-engine"),
    ],
)
async def test_what_the_router_writes_is_seen_outside_as_without_us(
    path: str, more: str, engine_key: str | None
) -> None:
    sent = [(b"content-type", b"application/json"), (b"authorization", b"Bearer sk-acme")]
    body = b'{"model": "m", "prompt": "hi", "max_tokens": 1}' if path == BATCH else SMALL
    plain = Around(routed())
    await Caller(plain, body, path=path, headers=sent).run()
    environment = {} if engine_key is None else {"SIDECAR_ENGINE_KEY": engine_key}
    mounted = Around(AdmissionMiddleware(routed(), policy(more, engine="vllm"), environment=environment))
    caller = Caller(mounted, body, path=path, headers=[*sent])
    await caller.run()
    assert caller.status == 200
    for with_us, without in ((mounted.at_start, plain.at_start), (mounted.at_end, plain.at_end)):
        assert with_us.keys() == without.keys()
        assert {"endpoint", "path_params", "router", "root_path"} <= with_us.keys()
        for name in ("root_path", "state", "headers", "path", "raw_path"):
            assert with_us[name] == without[name], name


async def test_an_app_that_raises_has_shown_its_route() -> None:
    async def failing(_: Request) -> Response:
        raise LookupError

    app = Starlette(routes=[Route(CHAT, failing, methods=["POST"])])
    around = Around(AdmissionMiddleware(app, policy()))
    with pytest.raises(LookupError):
        await Caller(around, SMALL).run()
    assert around.at_end["endpoint"] is failing


async def test_a_middleware_that_reads_the_route_from_its_answer_finds_it() -> None:
    found = []

    class Reading(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            response: Response = await call_next(request)
            found.append((request.scope["path_params"], request.state.user))
            return response

    async with serving(Reading(AdmissionMiddleware(routed(), policy()))) as served:
        assert b" 200 " in await exchange(served.port, post(CHAT, SMALL))
    assert found == [({"which": "chat/completions"}, "ada")]


async def test_a_second_attempt_gets_a_scope_that_the_first_has_not_written_into(tmp_path: Path) -> None:
    class Routing(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[Any] = []

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["admission"].tier == "batch":
                self.given.append(scope.get("root_path"))
                scope["root_path"] = f"{scope['root_path']}/again"
            await super().__call__(scope, receive, send)

    engine = Routing()
    async with guarding(engine, rules(tmp_path)) as guarded:
        batch = await running(guarded, engine)
        assert (await guarded.ask(None, CRITICAL)).status == 200
        engine.may_end.set()
        assert (await batch).headers["x-admission-preempted"] == "1"
    assert engine.given == ["", ""]


# -- the request's id


@each(
    ("sent", "is_ours"),
    [
        ([], True),
        ([b"the-clients"], False),
        ([b"not an id"], True),
        ([b""], True),
        ([b"\xff"], True),
        ([b"x" * 129], True),
        ([b"first", b"second"], False),
        ([b"second", b"two words"], True),
    ],
)
async def test_the_app_knows_the_id_that_the_client_gets(sent: list[bytes], is_ours: bool) -> None:
    seen: dict[str, Any] = {}

    async def told(request: Request) -> Response:
        grant = granted()
        assert grant is not None
        seen["headers"] = request.headers.getlist("x-request-id")
        seen["grant"] = grant.request_id
        seen["thread"] = await run_in_threadpool(lambda: getattr(granted(), "request_id", None))
        return Response()

    app = Starlette(routes=[Route(CHAT, told, methods=["POST"])])
    around = Around(AdmissionMiddleware(app, policy()))
    headers = [(b"content-type", b"application/json"), *((b"x-request-id", one) for one in sent)]
    caller = Caller(around, SMALL, headers=headers)
    await caller.run()
    got = dict(caller.sent[0]["headers"])[b"x-request-id"].decode()
    assert seen == {"headers": [got], "grant": got, "thread": got}
    assert (got.encode() not in sent) is is_ours
    if is_ours:
        assert uuid.UUID(got).version == 4  # what apps check, such as those with asgi-correlation-id
    assert around.at_end["headers"] == headers
    assert granted() is None


async def test_what_is_observed_or_passes_keeps_the_clients_headers() -> None:
    for mode in ("observe", "pass"):
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any, seen: list[Any] = seen) -> None:
            seen.append(scope["headers"])
            await Response()(scope, receive, send)

        await Caller(AdmissionMiddleware(app, policy(f"mode: {mode}\n")), SMALL, headers=[(b"x-a", b"1")]).run()
        assert seen == [[(b"x-a", b"1")]]


# -- a handler runs once


async def test_a_handler_runs_once_unless_the_app_says_that_it_may_run_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    sidecar = AdmissionMiddleware(engine, rules(tmp_path))
    async with serving(sidecar) as served:
        bulk = asyncio.create_task(exchange(served.port, post(CHAT, SMALL)))
        await asyncio.wait_for(engine.has_begun.wait(), 60)
        critical = asyncio.create_task(exchange(served.port, post(CHAT, SMALL, CRITICAL)))
        await until(lambda: sidecar.controller.pool.state()["waiting"] == 1)
        await asyncio.sleep(0.2)  # four times `preempt_after`
        assert not bulk.done()
        engine.may_end.set()
        assert b" 200 " in await bulk
        assert b"x-admission-preempted" not in await bulk
        assert b" 200 " in await critical
    assert engine.tiers == ["batch", "critical"]
    assert engine.stopped == 0
    said = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "not_preempted"]
    assert len(said) == 1
    assert "batch" in said[0]
    assert "retry_handlers=True" in said[0]


async def test_an_app_that_says_so_is_called_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    async with serving(AdmissionMiddleware(engine, rules(tmp_path), retry_handlers=True)) as served:
        bulk = asyncio.create_task(exchange(served.port, post(CHAT, SMALL)))
        await asyncio.wait_for(engine.has_begun.wait(), 60)
        assert b" 200 " in await exchange(served.port, post(CHAT, SMALL, CRITICAL))
        engine.may_end.set()
        assert b"x-admission-preempted: 1" in await bulk
    assert engine.tiers == ["batch", "critical", "batch"]
    assert not [record for record in caplog.records if getattr(record, "event", "") == "not_preempted"]


@each("more", ["mode: pass\n", "max_preemptions: 0\n"])
async def test_nothing_is_said_where_nothing_is_preempted_anyway(more: str, tmp_path: Path, caplog: Any) -> None:
    text = POLICY_WITHOUT.format(more=more)
    (tmp_path / "policy.yaml").write_text(text)
    await Caller(AdmissionMiddleware(App(), tmp_path), SMALL).run()
    assert not [record for record in caplog.records if getattr(record, "event", "") == "not_preempted"]


async def test_what_cannot_be_given_back_is_no_victim_beside_what_can(tmp_path: Path) -> None:
    """Two of one tier hold the pool: the later one, an upload or of an app that runs once, is not chosen in vain."""
    engine = Engine()
    async with guarding(engine, rules(tmp_path, requests=2)) as guarded:
        first = await running(guarded, engine)
        engine.has_begun.clear()
        guarded.sidecar._repeats = False
        guarded.sidecar.snapshot = guarded.sidecar._new_snapshot(guarded.sidecar.policy)
        second = await running(guarded, engine)
        assert (await guarded.ask(None, CRITICAL)).status == 200
        engine.may_end.set()
        answers = [await first, await second]
    assert [answer.headers.get("x-admission-preempted") for answer in answers] == ["1", None]
    assert engine.stopped == 1
