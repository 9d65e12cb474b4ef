"""No mount, `root_path` or spelling leads past admission, with Starlette's own router as the judge: not to a guarded
path, nor to one that generates without a lease, nor to an operator's page.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as some
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from sidecar import AdmissionMiddleware
from sidecar.admission.request_path import readings
from sidecar.context import SCOPE_KEY
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError
from tests.support.each import each
from tests.support.middleware import CHAT, KEYS, SMALL, App, Caller, policy, write_policy

pytestmark = pytest.mark.anyio

ENDPOINTS = """endpoints:
  /chat: {api: chat}
  /Own/Chat: {api: chat}
  /v1/batch/chat: {api: chat, tier: batch, forward_to: /v1/chat/completions}
"""
GUARDED = (CHAT, "/chat", "/Own/Chat")
ROUTES = ("/v1/chat/completions", "/chat/completions", "/completions", "/", "/chat", "/Own/Chat", "/Chat")
MOUNTS = ((), ("/v1",), ("/api", "/v1"), ("/api/v1",), ("/{tenant}/v1",), ("/v1/chat",), ("/Own",), (CHAT,))
ROOTS = ("", "/api", "/v1", "/api/v1", "/v1/", "/v", "/")
PIECES = ("/", "//", ".", "..", "/./", "/../", "%2f", "%2e", "%0a", "%0A", "%00", "%20", "%2520", ";a=b", "\\", "%5c",
          "?", "%3f", "#", "%23", "%253f", "v", "V", "/v1")  # fmt: skip
OPEN = (CHAT, "/V1/Chat/Completions", "/v1/%63hat/completions", "/metrics", "/%6detrics", "/docs", "/v1/score",
        "/V1/Score", "/v1/%73core")  # fmt: skip


def denying(more: str) -> Policy:
    """The policy with these endpoints, too, and no tier for requests without a key."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_policy(Path(folder), more)
        text = path.read_text().replace("anonymous: normal", "anonymous: deny").replace("endpoints:\n", ENDPOINTS)
        path.write_text(text)
        return load(path)


class Endpoint:
    """An endpoint for every method: it says whether it was admitted, and whether a guarded path has led to it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        root, route = scope["root_path"], scope["route"].path
        whole = root.rstrip("/") + ("" if route == "/" else route)
        is_guarded = any(whole.endswith(path) and path.endswith(route.rstrip("/")) for path in GUARDED)
        said = "admitted" if SCOPE_KEY in scope else "past admission" if is_guarded else "not guarded"
        await PlainTextResponse(f"{said}: {root} {route}")(scope, receive, send)


@functools.cache
def app_of(mounts: tuple[str, ...], more: str) -> Any:
    """The routes, with the middleware around them, below the mounts."""
    app: Any = AdmissionMiddleware(Starlette(routes=[Route(path, Endpoint()) for path in ROUTES]), denying(more))
    for prefix in reversed(mounts):
        app = Starlette(routes=[Mount(prefix, app)])
    return app


async def answer(app: Any, path: str, root: str = "", *, method: str = "POST", key: str = "", raw: str = "") -> str:
    """The answer's body, or its status where it is an error of ours or of the router."""
    headers = [(b"content-length", b"%d" % len(SMALL)), *([(b"x-api-key", key.encode())] if key else [])]
    raw_path = (raw or path).encode()
    caller = Caller(app, SMALL, path=unquote(path), raw_path=raw_path, root_path=root, method=method, headers=headers)
    await caller.run()
    said = b"".join(message.get("body", b"") for message in caller.sent[1:]).decode()
    return said if caller.status == 200 else str(caller.status)


@some.composite
def spelled(draw: some.DrawFn) -> str:
    """A path below some mount, with pieces inserted anywhere."""
    root = draw(some.sampled_from(ROOTS)) if draw(some.booleans()) else ""
    path = root + "".join(draw(some.sampled_from(MOUNTS))).replace("{tenant}", draw(some.sampled_from(("a", "x%3f"))))
    return with_pieces(draw, path + draw(some.sampled_from(ROUTES)))


def with_pieces(draw: some.DrawFn, path: str) -> str:
    for _ in range(draw(some.integers(0, 3))):
        at = draw(some.integers(0, len(path)))
        path = path[:at] + draw(some.sampled_from(PIECES)) + path[at:]
    return path if path.startswith("/") else f"/{path}"


@some.composite
def spelled_openly(draw: some.DrawFn) -> str:
    return with_pieces(draw, draw(some.sampled_from(("", "/below", "/v", "/v1", "/m"))) + draw(some.sampled_from(OPEN)))


@pytest.mark.parametrize("more", ["unguarded: deny\n", "unguarded: generating\n", "unguarded: allow\n"])
@given(path=spelled(), root=some.sampled_from(ROOTS), mounts=some.sampled_from(MOUNTS))
@example(path="/v1/chat/completions", root="", mounts=("/v1",))
@example(path="/chat/completions", root="/v1", mounts=())
@example(path="/v1/chat/completions", root="/v", mounts=())
@example(path="/x%3f/v1/chat/completions", root="", mounts=("/{tenant}/v1",))
@example(path="/v1/chat/completions", root="", mounts=("/v1/chat",))
@example(path="/v1/chat/completions/", root="", mounts=(CHAT,))
async def test_whatever_leads_starlette_to_a_guarded_endpoint_is_guarded(
    more: str, path: str, root: str, mounts: tuple[str, ...]
) -> None:
    app = app_of(mounts, more)
    for method in ("POST", "post", *(() if "allow" in more else ("PUT", "DELETE", "QUERY"))):
        assert not (await answer(app, path, root, method=method)).startswith("past admission"), method


async def _chat(request: Request) -> PlainTextResponse:
    return PlainTextResponse("admitted" if SCOPE_KEY in request.scope else "past admission")


async def _page(_: Request) -> PlainTextResponse:
    return PlainTextResponse("a page")


async def _score(_: Request) -> PlainTextResponse:
    return PlainTextResponse("generated")


@functools.cache
def engine_of(more: str) -> Any:
    """An engine's server; its `/metrics` is mounted as vLLM's, and so is everything that begins like it."""
    metrics = Mount("/metrics", Starlette(routes=[Route("/{rest:path}", _page, methods=["GET", "POST"])]))
    generating = [Route(CHAT, _chat, methods=["POST", "GET"]), Route("/v1/score", _score, methods=["POST"])]
    return AdmissionMiddleware(
        Starlette(routes=[*generating, metrics, Route("/docs", _page)]), policy(f"{more}public: []\n", engine="vllm")
    )


@pytest.mark.parametrize("more", ["unguarded: deny\n", "unguarded: generating\n", "unguarded: allow\n"])
@given(path=spelled_openly(), root=some.sampled_from(["", "/below", "/v", "/v1", "/m"]))
@example(path="/v1/chat/completions%0A", root="")
@example(path="/v1/chat/completions", root="/v")
@example(path="/below/v1/chat/completions", root="/below")
@example(path="/metrics%0a", root="")
@example(path="/v/%6detrics/../", root="/v")
@example(path="/below//v1/./%73core", root="/below")
async def test_no_spelling_leads_past_admission(more: str, path: str, root: str) -> None:
    for method in ("POST", "GET"):
        said = await answer(engine_of(more), path, root, method=method, key=KEYS["acme"])
        assert said != "past admission" or (method == "GET" and "allow" in more)
        assert said != "a page" or "deny" not in more
        assert said != "generated" or "allow" in more


# In every mode

ROWS = [
    ((), "", CHAT, "/v1/chat/completions"),
    (("/v1",), "", CHAT, "/chat/completions"),
    (("/api", "/v1"), "", f"/api{CHAT}", "/chat/completions"),
    (("/a/{tenant}/v1",), "", f"/a/b{CHAT}", "/chat/completions"),
    ((), "/v1", CHAT, "/chat/completions"),
    ((), "/v1", "/chat/completions", "/chat/completions"),
    ((), "/api/v1", "/chat/completions", "/chat/completions"),
    ((), "/api/v1", f"/api{CHAT}", "/chat/completions"),
    ((), "/v", CHAT, "/v1/chat/completions"),
    ((), "/api", CHAT, "/v1/chat/completions"),
    (("/v1",), "/api", f"/api{CHAT}", "/chat/completions"),
    (("/v1",), "", "/v1/batch/chat", "/chat/completions"),
    ((), "/v1", "/batch/chat", "/chat/completions"),
    ((), "/api", "/api/v1/batch/chat", "/v1/chat/completions"),
    (("/Own",), "", "/Own/Chat", "/Chat"),
    ((CHAT,), "", f"{CHAT}/", "/"),
]
"""Mounts, the server's `root_path`, the path that it gives, and the route that is to serve it."""
SPELLED = [
    (("/v1",), "", "/v1//Chat/completions/", "/chat/completions"),
    (("/v1",), "", "/v1/./chat%2fcompletions", "/chat/completions"),
    ((), "/v1", "/v1/%63hat/completions%0a", "/chat/completions"),
    ((), "/v1", "/CHAT/completions;a=b", "/chat/completions"),
]


@each(("mounts", "root", "path", "route"), [*ROWS, *SPELLED])
async def test_an_admitted_request_reaches_the_route_that_the_mount_has(
    mounts: tuple[str, ...], root: str, path: str, route: str
) -> None:
    said = await answer(app_of(mounts, ""), path, root, key=KEYS["acme"])
    assert said.startswith("admitted: ")
    assert said.endswith(f" {route}")


@each("mode", ["observe", "pass"])
async def test_where_all_pass_a_request_reaches_the_same_route(mode: str) -> None:
    for mounts, root, path, route in ROWS:
        said = await answer(app_of(mounts, f"mode: {mode}\n"), path, root)
        assert said.endswith(f" {route}"), (said, path)


async def test_observing_sees_the_requests_below_a_mount() -> None:
    sidecar = AdmissionMiddleware(
        Starlette(routes=[Route("/chat/completions", Endpoint())]), denying("mode: observe\n")
    )
    caller = Caller(Starlette(routes=[Mount("/v1", sidecar)]), SMALL, path=CHAT)
    await caller.run()
    assert (b"x-admission-mode", b"observe") in caller.sent[0]["headers"]


async def test_a_root_path_of_fastapis_own_is_known_also_around_other_middlewares() -> None:
    from fastapi import FastAPI
    from starlette.middleware.cors import CORSMiddleware

    app = FastAPI()
    app.root_path = "/v1"  # as the argument, which some versions warn of

    @app.post("/chat/completions")
    async def chat(request: Request) -> PlainTextResponse:
        return PlainTextResponse("admitted" if SCOPE_KEY in request.scope else "past admission")

    for wrapped in (AdmissionMiddleware(app, denying("")), AdmissionMiddleware(CORSMiddleware(app), denying(""))):
        for path in (CHAT, "/chat/completions"):
            assert await answer(wrapped, path) == "401"
            assert (await answer(wrapped, path, key=KEYS["acme"])) == "admitted"


async def test_another_frameworks_root_path_is_no_prefix() -> None:
    """Quart and Flask call the folder of their code so."""
    app = App()
    app.root_path = "/v1"  # type: ignore[attr-defined]
    assert await answer(AdmissionMiddleware(app, denying("")), "/chat/completions") == '{"ok":true}'
    assert app.seen[0].scope["root_path"] == ""


async def test_a_protocol_that_is_not_known_passes_but_on_guarded_paths() -> None:
    app = App()
    sidecar = AdmissionMiddleware(app, denying(""))
    await Caller(sidecar, b"", type="webtransport", path="/own").run()
    with pytest.raises(NotImplementedError, match="'webtransport' is not served"):
        await Caller(sidecar, type="webtransport", path="/chat").run()
    assert app.others == ["webtransport"]


READ_OTHERWISE = [
    ("/v", "/vchat", ""),  # Django and Quart take the letters of the prefix away, wherever its segment ends
    ("/v1", "/x/v1/chat", ""),  # Litestar takes away what is before it, too
    ("/api", "http://a.host/api/chat", ""),  # Quart reads a whole address, which hypercorn and h11 leave in the path
    ("", "http://a.host/chat", ""),
    ("", "%20http://a.host/chat", ""),  # after spaces, too, and with anything in the host
    ("", "http://a.host%5Cb/chat", ""),
    ("", "http://a.host%252Fb/chat", ""),
    ("/api", "http://api/api/chat", ""),
    ("/api", "/apihttp://a.host/chat", ""),  # BlackSheep, from `raw_path`, behind what uvicorn writes before it
    ("", "http://a.host/b@c/chat", "http://a.host%2Fb@c/chat"),
    ("", "/chat%23a", ""),
    ("", "/chat%3Fa/b", ""),
    ("/a?/v1", "/a%3F/v1/chat/completions", ""),  # a segment that the client chooses, of a mount at `/{tenant}/v1`
    ("/api%2Fv1", "/chat/completions", ""),
    ("", "/chat/completions", CHAT),  # a mount of Litestar's: only `raw_path` has the prefix
    ("", "/chat/completions", "/v1chat/completions"),  # and it does not ask for a slash
]


@each(("root", "path", "raw"), READ_OTHERWISE)
async def test_a_path_is_guarded_however_a_framework_divides_it(root: str, path: str, raw: str) -> None:
    sidecar = AdmissionMiddleware(App(), denying("unguarded: allow\n"))
    assert await answer(sidecar, path, root, raw=raw) == "401"


@each(
    ("root", "path", "raw"),
    [
        ("/a" * 30_000, "/chat", ""),  # a mount at `/{path:path}`, or a server that takes it from a header (daphne)
        ("", f"/b?{'/a' * 30_000}/b", f"/b%252525253f{'/a' * 30_000}/b"),
        ("/a" * 30_000, "/a" * 30_000 + CHAT, ""),
    ],
)
def test_a_prefix_that_a_client_makes_long_costs_no_more_for_each_segment(root: str, path: str, raw: str) -> None:
    found = readings({"path": path, "root_path": root, "raw_path": (raw or path).encode()})
    assert sum(map(len, found)) < 10 * len(raw or path + root)


def test_a_policy_names_no_longer_path_than_is_looked_for() -> None:
    longest = "/a" * 32
    sidecar = AdmissionMiddleware(App(), denying(f"public: [{longest}]\n"))
    assert sidecar.controller.policy.public_paths == (longest,)
    with pytest.raises(PolicyError, match=r"has more than 32 segments"):
        denying(f"public: [{longest}/a]\n")


@each(
    ("root", "path"), [("/api", "/api/users/chat"), ("/llm", "/chat/completions"), ("", "/v1/users"), ("/v1", "/chats")]
)
async def test_what_no_reading_names_is_the_apps_own(root: str, path: str) -> None:
    sidecar = AdmissionMiddleware(App(), denying(""))
    assert await answer(sidecar, path, root) == '{"ok":true}'


@each(
    ("path", "said"),
    [
        ("/v1/models", '{"ok":true}'),
        ("/v1//models", "401"),
        ("/v1/models/", "401"),
        ("/v1/docs", "404"),
        ("/v1/%64ocs", "404"),
    ],
)
async def test_below_a_mount_a_public_page_is_open_and_an_operators_closed(path: str, said: str) -> None:
    sidecar = AdmissionMiddleware(App(), denying("unguarded: deny\npublic: [/v1/models]\n"))
    assert await answer(Starlette(routes=[Mount("/v1", sidecar)]), path, method="GET") == said


async def test_a_websocket_on_a_guarded_path_below_a_mount_is_refused() -> None:
    app = App()
    caller = Caller(AdmissionMiddleware(app, denying("")), type="websocket", path="/v1/batch/chat", root_path="/v1")
    caller.incoming.put_nowait({"type": "websocket.connect"})
    await caller.run()
    assert ([message["type"] for message in caller.sent], app.others) == (["websocket.close"], [])


async def test_a_read_with_a_body_is_none_on_a_guarded_path() -> None:
    """Django's views, and ASGI apps as endpoints, answer every method."""
    app = App()
    sidecar = AdmissionMiddleware(app, denying(""))
    for method in ("GET", "HEAD", "OPTIONS"):
        assert await answer(sidecar, "/chat", method=method) == "404"
        assert await answer(sidecar, "/own", method=method) == '{"ok":true}'
    caller = Caller(sidecar, b"", path="/chat", method="GET")
    await caller.run()
    assert caller.status == 200
    assert [seen.scope["path"] for seen in app.seen] == ["/own"] * 3 + ["/chat"]


async def test_over_http_2_such_a_body_is_not_heard_of() -> None:
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())
        await PlainTextResponse("")(scope, receive, send)

    for body in (b"", SMALL):
        await Caller(AdmissionMiddleware(app, denying("")), body, path="/chat", method="GET", http_version="2").run()
    assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]
