"""Paths that the policy does not guard: what passes and what is refused."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Mount

from sidecar import AdmissionMiddleware
from sidecar.engines import ENGINES, Engine, Vllm
from sidecar.engines.base import OPENAI, PAGES, plain_path
from sidecar.events import UnguardedRequest
from sidecar.policy.compiler import load
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server.http_protocol import BoundedHttpProtocol
from tests.support.engine import RawEngine, answering, raw_engine
from tests.support.markdown import table
from tests.support.middleware import (
    CHAT,
    SMALL,
    Answer,
    App,
    Caller,
    guarding,
    key,
    monitor,
    policy,
    write_policy,
)  # fmt: skip
from tests.support.serving import serving
from tests.support.wire import exchange, get, post

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "write-a-policy.md"
BODY = b'{"text": "a", "sampling_params": {"max_new_tokens": 10000}}'
SEEN = {
    "sglang": [
        *("/generate", "/api/chat", "/api/generate", "/invocations", "/vertex_generate"),
        *("/v1/score", "/v1/rerank", "/encode", "/classify"),
    ],
    "vllm": ["/invocations", "/v1/chat/completions/batch", "/pooling", "/score", "/rerank", "/classify"],
    "tensorrt-llm": ["/v1/messages/batches"],
}
"""The paths on which real servers were seen to generate without a lease."""
SPELLINGS = [
    *(
        "/below/a/mount/v1/score",
        "/V1/Score",
        "/v1\\score",
        "/v1/%2573core",
        "/v1%2fscore",
        "/tokenize%2f..%2fv1/score",
    ),
    *("/v1/score;x=1", "/v1;a=b/score", "/v1/score%20", "/v1/score%00", "/v1/responses/a/../../score"),
]
"""Those that another router than Starlette's may read as one of them. Starlette's own: `security/test_mounts`."""


def request(method: str, path: str, body: bytes = BODY, *headers: str) -> bytes:
    """One request with another method than POST."""
    return post(path, body, *headers).replace(b"POST ", method.encode() + b" ", 1)


@asynccontextmanager
async def fronted(path: Path) -> AsyncIterator[tuple[RawEngine, int]]:
    """An engine, and the port of the sidecar before it."""
    async with (
        raw_engine(answering()) as upstream,
        serving(AdmissionMiddleware(ReverseProxy(upstream.url), path)) as served,
    ):
        yield upstream, served.port


async def status(port: int, sent: bytes) -> int:
    return Answer.parsed(await exchange(port, sent)).status


# Before an engine's server: `deny`


@pytest.mark.parametrize("engine", SEEN)
async def test_no_path_generates_past_a_proxy(engine: str, tmp_path: Path) -> None:
    policy_path = write_policy(tmp_path, engine=engine)
    async with fronted(policy_path) as (upstream, port):
        for path in SEEN[engine]:
            answer = Answer.parsed(await exchange(port, post(path, BODY, key("acme"))))
            put = Answer.parsed(await exchange(port, request("PUT", path)))
            assert (path, answer.status, put.status) == (path, 404, 404)
            error = answer.json["error"]
            assert answer.headers["x-should-retry"] == "false", path
            if path.startswith("/v1/messages/"):
                assert error["type"] == "not_found_error"
            assert error["code"] == "not_guarded", path
            assert path in error["message"]
            assert "unguarded: allow" in error["message"], path
        assert all(taken.head.startswith(b"GET /openapi.json ") for taken in upstream.requests)  # the engine's schema


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_what_changes_the_engine_or_is_not_known_is_refused(method: str, tmp_path: Path) -> None:
    async with fronted(write_policy(tmp_path, engine="sglang")) as (upstream, port):
        for path in ("/v1/load_lora_adapter", "/sleep", "/update_weights", "/flush_cache", "/new_in_2027"):
            answer = Answer.parsed(await exchange(port, request(method, path)))
            assert answer.is_error(404, "not_guarded", "To guard it" if method == "POST" else "Only POST"), path
            is_shown = path == "/flush_cache"  # any other may hold a key, and the log repeats the message
            assert (path in answer.message) == is_shown, path
        assert upstream.requests == []


@pytest.mark.parametrize(("path", "passes"), [("/flush_cache", False), ("//flush_cache", False), ("/v1/models", True)])
async def test_sglang_changes_itself_by_get_too(path: str, passes: bool, tmp_path: Path) -> None:
    async with fronted(write_policy(tmp_path, engine="sglang")) as (upstream, port):
        answer = Answer.parsed(await exchange(port, get(path)))
        assert len(upstream.requests) == int(passes)
    assert answer.status == (200 if passes else 404)


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ("vllm", "/tokenize"),
        ("vllm", "/v1/messages/count_tokens"),
        ("vllm", "/v1/responses/resp_1a/cancel"),
        ("vllm", "/v1/chat/completions/render"),
        ("sglang", "/v1/detokenize"),
        ("tensorrt-llm", "/v1/messages/count_tokens"),
        ("none", "/tokenize"),
    ],
)
async def test_what_is_harmless_passes(engine: str, path: str, tmp_path: Path) -> None:
    async with fronted(write_policy(tmp_path, engine=engine)) as (upstream, port):
        answer = Answer.parsed(await exchange(port, post(path, BODY)))
        assert [taken.body for taken in upstream.requests if taken.head.startswith(b"POST")] == [BODY]
    assert answer.status == 200


async def test_the_lines_of_the_policy_in_the_refusal_guard_the_path(tmp_path: Path) -> None:
    def sidecar(policy_path: Path, upstream: str) -> Any:
        return AdmissionMiddleware(ReverseProxy(upstream), policy_path)

    path = write_policy(tmp_path, engine="vllm")
    async with raw_engine(answering()) as upstream:
        async with serving(sidecar(path, upstream.url)) as served:
            refused = Answer.parsed(await exchange(served.port, post("/invocations", SMALL)))
        assert refused.is_error(404, "not_guarded", "`endpoints:`", "`/invocations: {api: chat}`")
        path.write_text(path.read_text().replace("endpoints:\n", "endpoints:\n  /invocations: {api: chat}\n"))
        async with serving(sidecar(path, upstream.url)) as served:
            answer = Answer.parsed(await exchange(served.port, post("/invocations", SMALL)))
    assert answer.status == 200
    assert answer.headers["x-admission-tier"] == "normal"


@pytest.mark.parametrize(("unguarded", "passes"), [("deny", False), ("generating", False), ("allow", True)])
async def test_the_policy_decides_for_a_proxy_too(unguarded: str, passes: bool, tmp_path: Path) -> None:
    path = write_policy(tmp_path, f"unguarded: {unguarded}\n", engine="sglang")
    async with fronted(path) as (upstream, port):
        await exchange(port, post("/generate", BODY))
        assert len(upstream.requests) == int(passes)


# In somebody's app: `generating`


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_an_apps_own_routes_pass(method: str) -> None:
    app = App()
    paths = ["/login", "/reports/generate", "/v1/models", "/users/score", "/v1/chat/history"]
    async with serving(AdmissionMiddleware(app, policy=policy(engine="sglang"))) as served:
        for path in paths:
            assert Answer.parsed(await exchange(served.port, request(method, path))).status == 200, path
    assert len(app.seen) == len(paths)


@pytest.mark.parametrize(
    ("engine", "paths"),
    [("sglang", ["/v1/score", "/generate", *SPELLINGS]), ("vllm", [CHAT + "/batch"])],
)
async def test_the_engines_generating_paths_do_not(engine: str, paths: list[str]) -> None:
    app = App()
    async with serving(AdmissionMiddleware(app, policy=policy(engine=engine))) as served:
        answers = {path: Answer.parsed(await exchange(served.port, post(path, BODY))) for path in paths}
    assert [path for path, answer in answers.items() if not answer.is_error(404, "not_guarded")] == []
    assert app.seen == []


async def test_a_guarded_path_is_guarded_in_every_method() -> None:
    app = App()
    async with serving(AdmissionMiddleware(app, policy=policy())) as served:
        for method in ("PUT", "PATCH"):
            answer = Answer.parsed(await exchange(served.port, request(method, CHAT, SMALL)))
            assert answer.is_error(404, "not_guarded", "Only POST")
    assert app.seen == []


# Which app it is


def served_by(package: str) -> Any:
    """A handler as one of that package's modules would define it."""

    async def handler() -> str:
        return "served"

    handler.__module__ = f"{package}.entrypoints.api_server"
    return handler


def an_app(engine_routes: int, own_routes: int, package: str = "vllm") -> Any:
    from fastapi import APIRouter, FastAPI

    app, router = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), APIRouter()
    for number in range(engine_routes):
        router.add_api_route(f"/engine/{number}", served_by(package), methods=["POST"])
    app.include_router(router)
    for number in range(own_routes):
        app.add_api_route(f"/own/{number}", served_by("shop"), methods=["POST"])
    return app


def mounted_app() -> Any:
    from fastapi import FastAPI

    return FastAPI(routes=[Mount("/sub", an_app(0, 1)), *an_app(0, 1).routes])


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (lambda: an_app(10, 0), 404),
        (lambda: an_app(10, 2), 404),
        (lambda: an_app(10, 0, "sglang"), 404),
        (lambda: an_app(10, 0, "tensorrt_llm"), 404),
        (lambda: an_app(2, 10), 200),
        (lambda: an_app(0, 3), 200),
        (mounted_app, 200),
    ],
)
async def test_a_server_that_mounts_it_by_name_is_known_by_its_routes(
    made: Callable[[], Any], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm serve --middleware` constructs it with the app alone, and so may an app that is no engine's."""
    monkeypatch.setenv("SIDECAR_POLICY", str(write_policy(tmp_path, engine="vllm")))
    monkeypatch.setenv("SIDECAR_ENGINE_CHECK", "alive")  # else another engine's server would not start
    app = made()
    app.add_middleware(AdmissionMiddleware)
    own = "/engine/0" if status == 404 else "/own/0"
    async with serving(app) as served:
        answer = Answer.parsed(await exchange(served.port, post(own, b"{}")))
    assert answer.status == status


# WebSockets


@pytest.mark.parametrize("path", ["/v1/realtime", "/x/v1/realtime", CHAT])
@pytest.mark.parametrize("more", ["", "unguarded: deny\n"])
async def test_a_websocket_that_may_generate_is_refused(path: str, more: str) -> None:
    app = App()
    caller = Caller(AdmissionMiddleware(app, policy=policy(more, engine="vllm")), type="websocket", path=path)
    caller.incoming.put_nowait({"type": "websocket.connect"})
    await caller.run()
    assert [message["type"] for message in caller.sent] == ["websocket.close"]
    assert app.seen == []


async def test_a_server_that_can_is_given_an_answer_for_the_websocket() -> None:
    extensions = {"websocket.http.response": {}}
    sidecar = AdmissionMiddleware(App(), policy=policy("unguarded: deny\n"))
    caller = Caller(sidecar, type="websocket", path="/chat", extensions=extensions)
    caller.incoming.put_nowait({"type": "websocket.connect"})
    await caller.run()
    assert [message["type"] for message in caller.sent] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert caller.status == 404


@pytest.mark.parametrize("http", ["httptools", BoundedHttpProtocol], ids=["uvicorn's server", "our own"])
async def test_a_websocket_on_a_guarded_path_is_told_to_use_http(http: Any) -> None:
    """Codex tries one on `/v1/responses`, and only after a 426 goes on over HTTP at once."""
    offer = ("connection: Upgrade", "upgrade: WebSocket", "sec-websocket-version: 13", "sec-websocket-key: AA==")
    async with guarding(App(), policy("unguarded: generating\n"), http=http) as served:
        answers = [
            Answer.parsed(await exchange(served.port, get(path, *offer))) for path in (CHAT, CHAT + "/", "/app/chat")
        ]
    assert [answer.status for answer in answers] == [426, 426, 200]
    assert answers[0].is_error(426, "websocket_not_served", "POST")
    assert (answers[0].headers["upgrade"], answers[0].headers["x-should-retry"]) == ("HTTP/1.1", "false")

    sidecar = AdmissionMiddleware(App(), policy=policy("unguarded: deny\n"))
    caller = Caller(sidecar, type="websocket", path=CHAT, extensions={"websocket.http.response": {}})
    caller.incoming.put_nowait({"type": "websocket.connect"})
    await caller.run()
    assert caller.status == 426


@pytest.mark.parametrize("more", ["unguarded: allow\n", "mode: observe\n"])
async def test_where_everything_passes_an_offer_of_a_websocket_does(more: str) -> None:
    async with guarding(App(), policy(more), http=BoundedHttpProtocol) as served:
        offer = get(CHAT, "connection: Upgrade", "upgrade: websocket")
        assert Answer.parsed(await exchange(served.port, offer)).status == 200


@pytest.mark.parametrize(("path", "more"), [("/chat", ""), ("/v1/realtime", "unguarded: allow\n")])
async def test_other_websockets_pass(path: str, more: str) -> None:
    caller = Caller(AdmissionMiddleware(App(), policy=policy(more, engine="vllm")), type="websocket", path=path)
    caller.incoming.put_nowait({"type": "websocket.connect"})
    await caller.run()
    assert caller.sent[0]["type"] == "websocket.accept"


# Keys


@pytest.mark.parametrize(
    ("sent", "status", "passed"),
    [
        ((), 401, None),
        (("x-api-key: sk-stranger",), 401, None),
        ((key("acme"),), 200, [b"Bearer sk-engine"]),
        (("authorization: Bearer sk-engine",), 200, [b"Bearer sk-engine"]),
    ],
)
async def test_without_anonymous_what_is_harmless_needs_a_key(
    sent: tuple[str, ...], status: int, passed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", "sk-engine")
    path = write_policy(tmp_path, engine="vllm")
    path.write_text(path.read_text().replace("anonymous: normal", "anonymous: deny"))
    async with fronted(path) as (upstream, port):
        answer = Answer.parsed(await exchange(port, post("/tokenize", b'{"prompt": "a"}', *sent)))
        assert [taken.all(b"authorization") for taken in upstream.requests] == ([] if passed is None else [passed])
        assert all(taken.all(b"x-api-key") == [] for taken in upstream.requests)
    assert answer.status == status
    if status == 401:
        assert answer.is_error(401, "invalid_api_key")


async def test_without_a_key_the_engines_own_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", "sk-engine")
    async with raw_engine(answering()) as upstream:
        async with serving(
            AdmissionMiddleware(ReverseProxy(upstream.url), write_policy(tmp_path, engine="vllm"))
        ) as served:
            await exchange(served.port, post("/tokenize", b"{}"))
        assert upstream.requests[0].all(b"authorization") == []


# Pages: who reads them

DENIED = "anonymous: deny\n"
OPERATORS = [
    *("/metrics", "/docs", "/redoc", "/openapi.json", "/server_info", "/load", "/is_sleeping"),
    *("/metrics/x", "/metricsx", "/docs/oauth2-redirect", "/below/it/metrics", "/health%2f..%2fdocs", "/METRICS"),
]
"""The first are vLLM's own, the others paths that it, or a server before it, may read as one of them."""


def denying(folder: Path, more: str = "", engine: str = "vllm") -> Path:
    path = write_policy(folder, more, engine=engine)
    path.write_text(path.read_text().replace("anonymous: normal\n", DENIED))
    return path


@pytest.mark.parametrize("sent", [(), ("authorization: Bearer sk-stranger",), ("x-api-key: sk-stranger",)])
async def test_without_a_known_key_no_page_is_read_but_the_public_one(sent: tuple[str, ...], tmp_path: Path) -> None:
    closed = ("/", "/v1/models", "/version", "/health/", "/Health", "/healthz", "//health", "/v1/responses/a")
    async with fronted(denying(tmp_path)) as (upstream, port):
        for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE"):
            for path in closed:
                expected = 401 if method in {"GET", "HEAD", "OPTIONS"} else 404
                assert await status(port, request(method, path, b"", *sent)) == expected, (method, path)
        assert upstream.requests == []
        for method in ("GET", "HEAD", "OPTIONS"):
            assert await status(port, request(method, "/health", b"", *sent)) == 200
        assert len(upstream.requests) == 3


async def test_a_tenant_reads_pages_and_the_engine_gets_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", "sk-engine")
    async with fronted(denying(tmp_path)) as (upstream, port):
        for path in ("/v1/models", "/v1/responses/resp_1", "/version", "/new-in-2027"):
            assert await status(port, get(path, key("acme"))) == 200, path
        both = await exchange(port, get("/v1/models", key("acme"), key("nightly")))
        assert Answer.parsed(both).is_error(400, "invalid_header")
        assert [seen.all(b"authorization") for seen in upstream.requests] == [[b"Bearer sk-engine"]] * 4


async def test_the_operators_pages_are_for_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", "sk-engine")
    async with fronted(denying(tmp_path)) as (upstream, port):
        for path in OPERATORS:
            for sent in ((), (key("acme"),), ("authorization: Bearer sk-engine",)):
                answer = Answer.parsed(await exchange(port, get(path, *sent)))
                assert answer.is_error(404, "not_guarded", "the engine's own page", "`public:`"), (path, sent)
        assert upstream.requests == []


@pytest.mark.parametrize("engine", ENGINES)
async def test_each_engine_has_its_own_public_page(engine: str, tmp_path: Path) -> None:
    kind = ENGINES[engine]
    async with fronted(denying(tmp_path, engine=engine)) as (_, port):
        for path, expected in [(kind.liveness_page, 200), (kind.metrics_page, 404)]:
            assert await status(port, get(path)) == expected, path
    assert kind.routes.operators_page(kind.liveness_page) is None
    assert kind.routes.operators_page(kind.metrics_page) is not None


@pytest.mark.parametrize("anonymous", [DENIED, "anonymous: normal\n"])
async def test_what_the_policy_names_is_for_everyone_and_nothing_beside_it(anonymous: str, tmp_path: Path) -> None:
    path = denying(tmp_path, "public: [/metrics, /tokenize]\n")
    path.write_text(path.read_text().replace(DENIED, anonymous))
    needs_key = 401 if anonymous == DENIED else 200
    async with fronted(path) as (_, port):
        for page, expected in [
            ("/metrics", 200),
            ("/metrics/", 404),
            ("/docs", 404),
            ("/health", needs_key),
            ("/v1/models", needs_key),
        ]:
            assert await status(port, get(page)) == expected, page
        assert await status(port, request("POST", "/metrics")) == 404
        assert await status(port, post("/tokenize", BODY)) == 200


async def test_where_no_key_is_needed_all_pages_stay_as_they_were(tmp_path: Path) -> None:
    async with fronted(write_policy(tmp_path, engine="vllm")) as (upstream, port):
        for path in ("/metrics", "/docs", "/v1/models"):
            assert await status(port, get(path, key("acme"))) == 200
        assert [seen.all(b"authorization") for seen in upstream.requests] == [[b"Bearer sk-acme"]] * 3


async def test_an_apps_own_pages_are_its_own(tmp_path: Path) -> None:
    app = App()
    async with serving(AdmissionMiddleware(app, denying(tmp_path))) as served:
        for path in ("/metrics", "/docs", "/login"):
            assert await status(served.port, get(path)) == 200
    assert len(app.seen) == 3


async def test_a_browsers_preflight_passes_without_the_key_that_it_cannot_carry(tmp_path: Path) -> None:
    asks = ("origin: https://a.example", "access-control-request-method: POST")
    async with fronted(denying(tmp_path)) as (_, port):
        statuses = [
            await status(port, request(method, path, b"", *asks))
            for method, path in [("OPTIONS", CHAT), ("OPTIONS", "/metrics"), ("GET", "/v1/models")]
        ]
    assert statuses == [200, 404, 401]


async def test_observing_shows_pages_and_counts_those_that_it_would_not(tmp_path: Path) -> None:
    app = App()
    loaded = load(denying(tmp_path, "mode: observe\nunguarded: deny\n"))
    async with guarding(app, loaded) as guarded:
        reported: list[UnguardedRequest] = []
        monitor(guarded.sidecar, unguarded=reported.append)
        for path in ("/metrics/x", "/v1/models", "/health"):
            assert await status(guarded.port, get(path)) == 200
    assert [(one.route, one.is_refused, one.code) for one in reported] == [
        ("/metrics", False, "not_guarded"),
        ("other", False, "invalid_api_key"),
    ]


# mode: observe, and what is counted


async def test_observing_everything_passes_and_what_would_be_refused_is_counted() -> None:
    app = App()
    async with guarding(app, policy("mode: observe\nunguarded: deny\n", engine="sglang")) as guarded:
        reported: list[UnguardedRequest] = []
        monitor(guarded.sidecar, unguarded=reported.append)
        for path in ("/generate", "/login", "/tokenize"):
            assert (await guarded.ask({}, path=path)).status == 200
    assert len(app.seen) == 3
    assert [(one.route, one.is_refused, one.code) for one in reported] == [
        ("/generate", False, "not_guarded"),
        ("other", False, "not_guarded"),
        ("/tokenize", False, None),
    ]


async def test_a_client_cannot_make_up_labels() -> None:
    async with guarding(App(), policy(engine="vllm")) as guarded:
        reported: list[UnguardedRequest] = []
        monitor(guarded.sidecar, unguarded=reported.append)
        for number in range(50):
            await guarded.ask({}, path=f"/made/up/{number}")
            await guarded.ask({}, path=f"/made/up/{number}/v1/score")
            await guarded.ask({}, path=f"/v1/responses/resp_{number}/cancel")
            await exchange(guarded.port, get(f"/made/up/{number}"))
    assert {(one.route, one.is_refused) for one in reported} == {
        ("other", False),
        ("/v1/score", True),
        ("/v1/responses/{id}/cancel", False),
    }
    assert len(reported) == 150


async def test_an_apps_route_is_counted_by_its_template() -> None:
    from fastapi import FastAPI

    app = FastAPI()
    app.add_api_route("/users/{name}/login", served_by("shop"), methods=["POST"])
    sidecar = AdmissionMiddleware(app, policy=policy())
    reported: list[UnguardedRequest] = []
    monitor(sidecar.controller, unguarded=reported.append)
    async with serving(sidecar) as served:
        for name in ("ada", "bo"):
            await exchange(served.port, post(f"/users/{name}/login", b"{}"))
        await exchange(served.port, post("/nowhere", b"{}"))
    assert [one.route for one in reported] == ["/users/{name}/login"] * 2 + ["other"]


# The lists themselves


@pytest.mark.parametrize("engine", ENGINES.values())
def test_no_path_is_both_harmless_and_generating(engine: type[Engine]) -> None:
    routes = engine.routes
    for path in routes.harmless:
        assert routes.generating_route(path.replace("{id}", "resp_1")) is None, path
    for path in [*routes.generating, *routes.websockets]:
        assert routes.harmless_route(path) is None
        assert routes.generating_route(path) == path
        assert plain_path(path) == path, "or no request would ever match it"
    assert set(SEEN.get(engine.name, ())) <= set(routes.generating)


def test_an_identifier_is_never_another_path() -> None:
    for found in ("..", ".", "a/b", "a%2fb", "%2e%2e", "a?b", "a;b", "", "a" * 300, "ä"):
        assert Vllm.routes.harmless_route(f"/v1/responses/{found}/cancel") is None, found


@pytest.mark.parametrize(("engine", "shown"), [("vllm", "vLLM"), ("sglang", "SGLang"), ("dynamo", "Dynamo")])
def test_the_page_says_what_the_code_does(engine: str, shown: str) -> None:
    page_says(engine, shown)


def test_the_page_says_what_the_code_does_of_the_others() -> None:
    page_says("tensorrt-llm", "TensorRT-LLM")
    page_says("none", "none")


def page_says(engine: str, shown: str) -> None:
    """Fails unless docs/write-a-policy.md lists exactly the engine's paths: in its row, and in those of all engines."""
    names = {shown, "all", *({"all but TensorRT-LLM"} if engine != "tensorrt-llm" else ())}
    rows = [row for row in table(PAGE, "Each engine's paths") if row[0] in names]
    assert len(rows) == len(names)
    routes = ENGINES[engine].routes
    assert path_names(rows, 1) == sorted(set(routes.generating) - set(OPENAI))
    assert path_names(rows, 2) == sorted(routes.harmless)
    assert routes.websockets == {"/v1/realtime"}


def path_names(rows: list[list[str]], column: int) -> list[str]:
    """The paths in a column, sorted; one that is in two rows is there twice."""
    return sorted(path for row in rows for path in re.findall("`([^`]+)`", row[column]))


def test_the_page_lists_the_operators_pages() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = {
        shown: set(re.findall("`([^`]+)`", row)) for shown, row in re.findall(r"- (\w[\w-]*), besides: (.*)", text)
    }
    for name, shown in [("vllm", "vLLM"), ("sglang", "SGLang"), ("dynamo", "Dynamo")]:
        assert found[shown] == set(ENGINES[name].routes.pages) - set(PAGES)
    assert ENGINES["tensorrt-llm"].routes.pages == ENGINES["none"].routes.pages == PAGES
    assert all(f"`{page}`" in text for page in PAGES)
