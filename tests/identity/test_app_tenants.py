"""Tenants that the app names: a function of its owner's, which knows the session or the user of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sidecar import AdmissionMiddleware, granted
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from tests.identity.issuer import Issuer, ec
from tests.support.each import each
from tests.support.middleware import CHAT, App, Caller, chat, policy, write_policy
from tests.support.serving import serving
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio

SMALL = json.dumps(chat()).encode()
WITHOUT_KEY = [(b"content-type", b"application/json")]
NIGHTLYS_KEY = [*WITHOUT_KEY, (b"authorization", b"Bearer sk-nightly")]


def keyed(more: str = "", **settings: str) -> Policy:
    """A policy that wants to know who asks: `acme` gets normal and may have high, `nightly` batch."""
    return replace(policy(more, **settings), anonymous=None)


async def who(request: Request) -> Response:
    grant = granted()
    body = await request.body()
    return JSONResponse({"tenant": grant and grant.tenant, "tier": grant and grant.tier, "bytes": len(body)})


def answering() -> Starlette:
    return Starlette(routes=[Route(CHAT, who, methods=["POST"]), Route("/tokenize", who, methods=["POST"])])


async def asked(
    tenant: Any, headers: Any = WITHOUT_KEY, *, app: Any = None, by: Policy | None = None, **scope: Any
) -> Caller:
    """One request, whose scope has more in it, as an outer middleware would write it."""
    sidecar = AdmissionMiddleware(app or answering(), by or keyed(), tenant=tenant)
    caller = Caller(sidecar, SMALL, headers=[*headers], **scope)
    await asyncio.wait_for(caller.run(), 60)
    return caller


def tier_of(caller: Caller) -> str | None:
    """The tier that the answer names."""
    found = dict(caller.sent[0]["headers"]).get(b"x-admission-tier")
    return None if found is None else found.decode()


def code_of(caller: Caller) -> str:
    return str(json.loads(caller.sent[1]["body"])["error"]["code"])


# -- in somebody's app


class ByHeader(AuthenticationBackend):
    """Stands in for the app's own login."""

    async def authenticate(self, conn: HTTPConnection) -> Any:
        name = conn.headers.get("x-login")
        return None if name is None else (AuthCredentials(["user"]), SimpleUser(name))


async def test_a_user_of_the_apps_own_login_is_a_tenant_without_a_key() -> None:
    def tenant(scope: Any) -> str | None:
        return scope["user"].display_name if scope["user"].is_authenticated else None

    app = Starlette(
        routes=[Route(CHAT, who, methods=["POST"])],
        middleware=[
            Middleware(AuthenticationMiddleware, backend=ByHeader()),
            Middleware(AdmissionMiddleware, policy=keyed(), tenant=tenant),
        ],
    )
    async with serving(app) as served:

        async def ask(*headers: str) -> bytes:
            return await exchange(served.port, post(CHAT, SMALL, *headers))

        assert b'"tenant":"acme","tier":"normal"' in await ask("x-login: acme")
        assert b'"tenant":"acme","tier":"high"' in await ask("x-login: acme", "x-priority: high")
        assert b'"tenant":"acme"' in await ask("x-login: acme", "authorization: Bearer sk-nightly")
        assert b'"tenant":"nightly"' in await ask("authorization: Bearer sk-nightly")
        stranger, unnamed = await ask("x-login: eve"), await ask()
        assert stranger.startswith(b"HTTP/1.1 401")
        assert b'"code":"unknown_tenant"' in stranger
        assert unnamed.startswith(b"HTTP/1.1 401")
        assert b'"code":"invalid_api_key"' in unnamed


def named(name: Any) -> Callable[[Any], Any]:
    return lambda _: name


def later(name: Any, steps: int = 0) -> Callable[[Any], Any]:
    async def answer(_: Any) -> Any:
        for _step in range(steps):
            await asyncio.sleep(0)
        return name

    return answer


class Asker:
    async def __call__(self, scope: Any) -> Any:
        return scope["session"]["tenant"]


@each(
    ("tenant", "expected"),
    [
        (named("acme"), ("acme", "normal")),
        (later("acme"), ("acme", "normal")),
        (later("acme", 5), ("acme", "normal")),
        (Asker(), ("nightly", "batch")),
        (partial(lambda key, scope: scope["session"][key], "tenant"), ("nightly", "batch")),
        (named({"tenant": "acme", "tier": "high", "sub": 1}), ("acme", "high")),
        (named(MappingProxyType({"tenant": "acme"})), ("acme", "normal")),
        (named({"tenant": "nightly", "tier": "critical"}), ("nightly", "batch")),  # its best tier
    ],
)
async def test_what_the_function_may_return(tenant: Any, expected: tuple[str, str]) -> None:
    caller = await asked(tenant, session={"tenant": "nightly"})
    assert caller.status == 200
    body = json.loads(caller.sent[1]["body"])
    assert (body["tenant"], body["tier"], body["bytes"]) == (*expected, len(SMALL))


async def test_claims_have_the_names_that_the_policy_gives_them(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(Issuer(ec()).key_set())
    section = "jwt: {issuer: i, audience: a, jwks: keys.json, tenant_claim: org, tier_claim: plan}\n"
    by = replace(load(write_policy(tmp_path, section)), anonymous=None)
    assert tier_of(await asked(named({"org": "acme", "plan": "high"}), by=by)) == "high"
    assert code_of(await asked(named({"tenant": "acme"}), by=by)) == "unknown_tenant"


async def test_without_an_answer_keys_count_as_ever() -> None:
    assert tier_of(await asked(named(None), NIGHTLYS_KEY)) == "batch"
    assert code_of(await asked(named(None))) == "invalid_api_key"
    assert (await asked(named(None), by=policy())).status == 200


# -- what goes wrong


def raising(error: BaseException) -> Callable[[Any], Any]:
    def fail(_: Any) -> Any:
        raise error

    return fail


def raising_later(error: BaseException) -> Callable[[Any], Any]:
    async def fail(_: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    return fail


@each(
    ("tenant", "status", "code"),
    [
        (named("eve"), 401, "unknown_tenant"),
        (named(""), 401, "unknown_tenant"),
        (named({}), 401, "unknown_tenant"),
        (named({"tenant": 5}), 401, "unknown_tenant"),
        (named({"tenant": "acme", "tier": 1}), 401, "unknown_tenant"),
        (named({"tenant": "acme", "tier": "gold"}), 401, "unknown_tenant"),
        (named(5), 500, "tenant_failed"),
        (named(b"acme"), 500, "tenant_failed"),
        (named(True), 500, "tenant_failed"),
        (named(["acme"]), 500, "tenant_failed"),
        (later(later("acme")), 500, "tenant_failed"),
        (raising(LookupError("a secret")), 500, "tenant_failed"),
        (raising(HTTPException(401)), 500, "tenant_failed"),
        (raising_later(LookupError("a secret")), 500, "tenant_failed"),
        (raising_later(asyncio.CancelledError()), 500, "tenant_failed"),
    ],
)
async def test_what_it_cannot_say_is_a_refusal_with_a_sentence(
    tenant: Any, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    caller = await asked(tenant, NIGHTLYS_KEY, app=app)
    assert (caller.status, code_of(caller)) == (status, code)
    assert app.seen == []
    assert b"secret" not in caller.sent[1]["body"]
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events.count("tenant_failed") == (1 if status == 500 else 0)


@each("tenant", [5, "acme", lambda: None, lambda scope, key: None, {"acme": 1}])
def test_what_is_no_function_of_a_scope_fails_the_construction(tenant: Any) -> None:
    with pytest.raises(ValueError, match=r"^tenant: "):
        AdmissionMiddleware(App(), keyed(), tenant=tenant)


async def test_a_function_without_an_end_is_canceled_when_its_client_leaves() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def never(_: Any) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "acme"

    app = App()
    tasks = asyncio.all_tasks()
    caller = Caller(AdmissionMiddleware(app, keyed(), tenant=never), SMALL, headers=[*WITHOUT_KEY])
    asking = caller.begin()
    await asyncio.wait_for(begun.wait(), 60)
    caller.leave()
    await asyncio.wait_for(asyncio.gather(asking, ended.wait()), 60)
    assert (app.seen, caller.sent) == ([], [])
    while asyncio.all_tasks() - tasks:  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0)


@each("mode", ["enforce", "observe"])
async def test_a_function_without_an_end_has_as_long_as_a_body(mode: str) -> None:
    tasks = asyncio.all_tasks()
    caller = await asked(lambda _: asyncio.Event().wait(), by=keyed(f"mode: {mode}\n", body_timeout="50ms"))
    if mode == "enforce":
        assert (caller.status, code_of(caller)) == (500, "tenant_failed")
    else:
        assert caller.status == 200
    while asyncio.all_tasks() - tasks:  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0)


async def test_a_server_that_stops_cancels_it() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def never(_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    asking = Caller(AdmissionMiddleware(App(), keyed(), tenant=never), SMALL, headers=[*WITHOUT_KEY]).begin()
    await asyncio.wait_for(begun.wait(), 60)
    asking.cancel()
    await asyncio.wait_for(asyncio.wait((asking,)), 60)
    assert asking.cancelled()
    await asyncio.wait_for(ended.wait(), 60)


async def test_a_body_in_pieces_arrives_whole_though_it_came_while_the_function_was_asked() -> None:
    may_say = asyncio.Event()

    async def late(_: Any) -> str:
        await may_say.wait()
        return "acme"

    caller = Caller(AdmissionMiddleware(answering(), keyed(), tenant=late), headers=[*WITHOUT_KEY])
    pieces = [SMALL[at : at + 7] for at in range(0, len(SMALL), 7)]
    for piece in pieces[:5]:
        caller.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": True})
    asking = caller.begin()
    while not caller.incoming.empty():  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0)
    may_say.set()
    await asyncio.sleep(0)
    for piece in pieces[5:]:
        caller.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": piece is not pieces[-1]})
    await asyncio.wait_for(asking, 60)
    assert json.loads(caller.sent[1]["body"])["bytes"] == len(SMALL)


# -- where it is asked


@each(
    ("method", "path", "more", "is_asked"),
    [
        ("POST", CHAT, "", True),
        ("GET", "/v1/admission/self", "", True),
        ("POST", "/tokenize", "", True),
        ("GET", "/docs", "", False),
        ("POST", "/mine", "", False),
        ("OPTIONS", CHAT, "", False),
        ("POST", CHAT, "mode: observe\n", True),
        ("POST", CHAT, "mode: pass\n", False),
    ],
)
async def test_it_is_asked_once_where_the_tenant_counts(method: str, path: str, more: str, is_asked: bool) -> None:
    scopes = []

    def tenant(scope: Any) -> str:
        scopes.append(scope)
        return "acme"

    preflight = [*WITHOUT_KEY, (b"access-control-request-method", b"POST")]
    headers = preflight if method == "OPTIONS" else WITHOUT_KEY
    by = keyed(more, engine="vllm")
    caller = await asked(tenant, headers, by=by, app=App(), method=method, path=path)
    assert len(scopes) == is_asked
    assert caller.status == 200
    if is_asked:
        assert scopes[0] is caller.scope  # what it writes there is seen outside, as of any app


async def test_an_outer_middleware_sees_nothing_of_what_it_has_said() -> None:
    caller = await asked(named("acme"))
    assert not [name for name in caller.scope if "sidecar" in name or "admission" in name]


async def test_the_dry_run_asks_it_too(caplog: pytest.LogCaptureFixture) -> None:
    by = keyed("mode: observe\n")
    seen = await asked(named("nightly"), by=by)
    assert (seen.status, tier_of(seen)) == (200, "batch")
    failed = await asked(raising(LookupError()), by=by)
    assert failed.status == 200
    assert tier_of(failed) is None
    assert [getattr(record, "event", None) for record in caplog.records].count("tenant_failed") == 1


async def test_in_mode_pass_a_session_gets_the_engines_key_as_a_tenants_key_does() -> None:
    for tenant, expected in ((named("acme"), [b"Bearer sk-engine"]), (named(None), []), (raising(LookupError()), [])):
        app = App()
        by = keyed("mode: pass\n")
        sidecar = AdmissionMiddleware(app, by, tenant=tenant, environment={"SIDECAR_ENGINE_KEY": "sk-engine"})
        await Caller(sidecar, SMALL, headers=[*WITHOUT_KEY]).run()
        assert app.seen[0].all(b"authorization") == expected


async def test_another_admission_controller_inside_does_not_hear_it() -> None:
    inner = AdmissionMiddleware(answering(), policy())
    caller = await asked(named("nightly"), app=inner)
    assert json.loads(caller.sent[1]["body"])["tenant"] == "anonymous"
    passing = keyed("mode: pass\n")
    outer = AdmissionMiddleware(inner, passing, tenant=named("nightly"), environment={"SIDECAR_ENGINE_KEY": "sk-acme"})
    caller = Caller(outer, SMALL, headers=[*WITHOUT_KEY])
    await caller.run()
    assert json.loads(caller.sent[1]["body"])["tenant"] == "acme"  # by the key that the outer one has added


async def test_a_tenant_that_only_the_app_names_needs_no_keys(tmp_path: Path) -> None:
    path = write_policy(tmp_path)
    (tmp_path / "tenants" / "staff.yaml").write_text("tenant: staff\nkeys: []\ntier: high\n")
    caller = await asked(named("staff"), by=load(path))
    assert tier_of(caller) == "high"
