"""The admin port: by its address alone, and with a token. As a browser, Prometheus, a probe and our commands ask it."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from sidecar import AdmissionMiddleware
from sidecar.admin.app import admin_app
from sidecar.admin.auth import Access, AdminGuard, is_loopback, read_access
from sidecar.cli import main
from sidecar.policy.compiler import shipped_policies
from tests.support.commands import address, command
from tests.support.each import each
from tests.support.http import fetch
from tests.support.middleware import Answer, App, write_policy
from tests.support.redis_servers import free_port
from tests.support.serving import Served, serving
from tests.support.wire import exchange, get

TOKEN = "token-of-this-test-0123456789"
BEARER = f"authorization: Bearer {TOKEN}"
PAGES = (
    "/",
    "/state",
    "/overview",
    "/overview/stream",
    "/metrics",
    "/requests/any",
    "/request?id=any",
    "/nothing-here",
)
PROBES = ("/healthz", "/readyz")
NOBODY = "http://127.0.0.1:9"


@asynccontextmanager
async def admin(access: Access) -> AsyncIterator[Served]:
    shown = [Route(path, lambda _: PlainTextResponse("shown")) for path in ("/", "/overview", "/metrics")]
    async with serving(AdminGuard(admin_app(state=dict, readiness=list, routes=shown), access)) as served:
        yield served


async def ask(served: Served, path: str, *headers: str, host: str | None = None) -> Answer:
    request = get(path, *headers)
    sent_host = b"" if host == "" else b"host: %s\r\n" % (host or f"127.0.0.1:{served.port}").encode()
    return Answer.parsed(await exchange(served.port, request.replace(b"host: sidecar\r\n", sent_host)))


def is_refused(answer: Answer, status: int, code: str) -> bool:
    assert (answer.status, answer.json["error"]["code"]) == (status, code), answer
    assert answer.headers["cache-control"] == "no-store"
    return True


# With a token


@pytest.mark.anyio
async def test_no_page_is_shown_without_the_token() -> None:
    wrong = [
        (),
        ("authorization: Bearer wrong-token-of-this-test",),
        (f"authorization: Bearer {TOKEN}x",),
        (f"authorization: Bearer {TOKEN[:-1]}",),
        ("authorization: Bearer",),
        (f"authorization: Basic {TOKEN}",),
        (f"authorization: {TOKEN}",),
        (f"x-api-key: {TOKEN}",),
        ("authorization: Bearer t\xf6ken",),
        (f"cookie: sidecar-admin-1={TOKEN}",),
    ]
    async with admin(Access(TOKEN)) as served:

        @each("path", PAGES)
        @each("shown", wrong)
        async def is_shown_nothing(path: str, shown: tuple[str, ...]) -> None:
            answer = await ask(served, path, *shown)
            assert is_refused(answer, 401, "admin_token_required")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "token" in answer.json["error"]["message"]
            assert TOKEN not in answer.body.decode()

        await is_shown_nothing()


@pytest.mark.anyio
async def test_the_token_opens_every_page_and_probes_need_none() -> None:
    async with admin(Access(TOKEN, is_local=False)) as served:
        for path in ("/", "/state", "/overview", "/metrics"):
            assert (await ask(served, path, BEARER)).status == 200
            assert (await ask(served, path, BEARER.replace("Bearer", "bearer"), host="sidecar.example")).status == 200
        assert [(await ask(served, path, host="any.example")).status for path in PROBES] == [200, 200]


@pytest.mark.anyio
async def test_a_browser_is_let_in_once_by_the_address_and_then_by_its_cookie() -> None:
    async with admin(Access(TOKEN)) as served:
        welcome = await ask(served, f"/?token={TOKEN}")
        assert (welcome.status, welcome.headers["location"]) == (303, "./")
        assert welcome.headers["cache-control"] == "no-store"
        cookie, *attributes = welcome.headers["set-cookie"].split("; ")
        assert {attribute.lower() for attribute in attributes} == {"httponly", "samesite=strict", "path=/"}
        assert TOKEN not in str(welcome)
        for path in ("/", "/overview"):
            assert (await ask(served, path, f"cookie: other=1; {cookie}")).status == 200
            assert is_refused(await ask(served, path, f"cookie: {cookie[:-1]}"), 401, "admin_token_required")
        assert is_refused(await ask(served, "/?token=wrong"), 401, "admin_token_required")
        assert is_refused(await ask(served, f"/overview?token={TOKEN}"), 401, "admin_token_required")
    async with admin(Access(TOKEN + "-changed")) as served:
        assert (await ask(served, "/", f"cookie: {cookie}")).status == 401


# Without one


@pytest.mark.anyio
@each("host", ["127.0.0.1:9464", "localhost", "LOCALHOST:1", "[::1]:9464", "[::1]", "10.1.2.3", ""])
async def test_on_loopback_an_address_or_localhost_is_shown(host: str) -> None:
    async with admin(Access()) as served:
        if host == "":  # HTTP/1.0 has none; in 1.1 the server itself may refuse it
            request = b"GET /overview HTTP/1.0\r\n\r\n"
            assert (await exchange(served.port, request)).startswith(b"HTTP/1.1 200")
            return
        assert (await ask(served, "/overview", host=host)).status == 200


@pytest.mark.anyio
@each("host", ["rebound.example:9464", "127.0.0.1.rebound.example", "localhost.rebound.example", "x"])
async def test_a_name_that_was_made_to_point_here_is_shown_nothing(host: str) -> None:
    async with admin(Access()) as served:
        assert is_refused(await ask(served, "/overview", host=host), 403, "unknown_host")
        assert (await ask(served, "/healthz", host=host)).status == 200
    async with admin(Access(is_local=False)) as served:
        assert (await ask(served, "/overview", host=host)).status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("access", [Access(), Access(TOKEN)])
async def test_a_page_of_another_site_gets_nothing_in_the_background(access: Access) -> None:
    async with admin(access) as served:
        cross = "sec-fetch-site: cross-site"
        assert is_refused(await ask(served, "/overview", BEARER, cross, "sec-fetch-mode: no-cors"), 403, "cross_site")
        for allowed in (
            (cross, "sec-fetch-mode: navigate"),
            ("sec-fetch-site: same-origin",),
            ("sec-fetch-site: none",),
        ):
            answer = await ask(served, "/overview", BEARER, *allowed)
            assert answer.status == 200
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"


# What the environment says


@each(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("sidecar.example", False),
    ],
)
def test_loopback_is_distinguished_from_the_network(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert read_access({}, host).is_open is not expected
    assert not read_access({"SIDECAR_ADMIN_TOKEN": TOKEN}, host).is_open


def test_a_token_that_can_be_guessed_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ValueError, match="SIDECAR_ADMIN_TOKEN: shorter than 16 characters") as refused:
        read_access({"SIDECAR_ADMIN_TOKEN": "hidden"}, "127.0.0.1")
    assert "hidden" not in str(refused.value)
    assert TOKEN not in repr(read_access({"SIDECAR_ADMIN_TOKEN": TOKEN}, "127.0.0.1"))


# The commands


@contextmanager
def sidecar(*more: str, **variables: str) -> Iterator[str]:
    """`sidecar serve`; gives its admin port."""
    policies = str(shipped_policies())
    ours = ("serve", "--upstream", NOBODY, "--policy", policies, "--port", "0", "--admin-port", "0", *more)
    with command(*ours, **variables) as process:
        address(process)
        yield address(process)


def reported(*arguments: str, **variables: str) -> tuple[int, str, str]:
    with command(*arguments, **variables) as process:
        out, errors = process.communicate(timeout=20)
        return process.returncode, out, errors


@pytest.mark.long
def test_serve_top_and_explain_with_a_token_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    with sidecar(SIDECAR_ADMIN_TOKEN_FILE=str(file), SIDECAR_ENGINE_CHECK="off") as url:
        assert [fetch(url + path).status for path in PROBES] == [200, 200]
        assert [fetch(url + path).status for path in ("/", "/metrics", "/state", "/requests/x")] == [401] * 4
        assert [fetch(url + path, key=TOKEN).status for path in ("/", "/metrics", "/state")] == [200] * 3

        code, out, errors = reported("top", "--once", "--admin", url)
        assert (code, out) == (1, "")
        how = "needs its admin token; set SIDECAR_ADMIN_TOKEN, or SIDECAR_ADMIN_TOKEN_FILE to a file that holds it"
        assert errors == f"sidecar top: {url} {how}\n"
        assert reported("explain", "--request", "x", "--admin", url) == (1, "", f"sidecar explain: {url} {how}\n")

        code, out, errors = reported("top", "--once", "--admin", url, SIDECAR_ADMIN_TOKEN=TOKEN)
        assert (code, errors) == (0, "")
        assert "critical" in out
        code, _, errors = reported("explain", "--request", "x", "--admin", url, SIDECAR_ADMIN_TOKEN_FILE=str(file))
        assert code == 1
        assert "no request with the id or trace id 'x' is known here" in errors
        code, _, errors = reported("top", "--once", "--admin", url, SIDECAR_ADMIN_TOKEN="short")
        assert code == 1
        assert errors.startswith("sidecar top: SIDECAR_ADMIN_TOKEN: shorter than 16 characters")


@each(
    ("host", "variables", "warns"),
    [
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"SIDECAR_ADMIN_TOKEN": TOKEN}, False),
        ("127.0.0.1", {}, False),
    ],
)
def test_an_admin_port_for_everybody_is_warned_of(
    host: str,
    variables: Mapping[str, str],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"SIDECAR_LOG_FORMAT": "json", **variables}.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = ("--port", str(taken.getsockname()[1]), "--admin-port", "0", "--admin-host", host)
        # The port is taken: this is about what is said before.
        assert main(["serve", "--upstream", NOBODY, "--policy", str(shipped_policies()), *ports]) == 1
    errors = capsys.readouterr().err
    logged: list[Any] = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    warned = [entry["message"] for entry in logged if entry["event"] == "admin_port_open"]
    assert bool(warned) is warns
    if warned:
        assert "the admin port on 0.0.0.0 shows every caller" in warned[0]
        assert "set SIDECAR_ADMIN_TOKEN, or SIDECAR_ADMIN_TOKEN_FILE to a file that holds it" in warned[0]


@pytest.mark.anyio
async def test_a_mounted_sidecar_guards_its_admin_port_by_the_same_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("SIDECAR_POLICY", str(write_policy(tmp_path)))
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    monkeypatch.setenv("SIDECAR_ADMIN_TOKEN", TOKEN)
    async with serving(AdmissionMiddleware(App())):
        answers = [Answer.parsed(await exchange(port, get("/state", *shown))) for shown in ((), (BEARER,))]
    assert [answer.status for answer in answers] == [401, 200]
