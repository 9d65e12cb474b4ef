"""A tenant's key ends at the sidecar; the engine's own goes on. As the app, or a server behind the proxy, sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar import AdmissionMiddleware
from sidecar.admission.policy_snapshot import Credentials
from sidecar.app import find_store
from sidecar.proxy.proxy import ReverseProxy
from tests.support.each import each
from tests.support.engine import RawEngine, answering, raw_engine
from tests.support.middleware import CHAT, SMALL, Answer, App, guarding, key, policy, write_policy
from tests.support.serving import serving
from tests.support.wire import exchange, get, post

pytestmark = pytest.mark.anyio

ENGINE_KEY = "sk-engines-own"
BASIC = "authorization: Basic dXNlcjpwYXNz"


async def passed_on(*headers: str, more: str = "") -> list[tuple[bytes, bytes]]:
    """What of the two headers the app behind a sidecar gets to see."""
    app = App()
    async with guarding(app, policy(more)) as guarded:
        assert (await guarded.ask(None, *headers)).status == 200
    return [pair for pair in app.seen[0].scope["headers"] if b"sk-" in pair[1] or pair[0] == b"authorization"]


@each(
    "sent",
    [
        ("authorization: Bearer sk-acme",),
        ("authorization: bEARER   sk-acme",),
        ("x-api-key: sk-acme",),
        ("authorization: Bearer sk-acme", "x-api-key: sk-acme"),
        ("authorization: Bearer\tsk-acme",),  # no key to the sidecar, and still nothing that should go on
        ("x-api-key: sk-acme", "connection: close, x-api-key"),
        ("api-key: sk-acme",),
        ("authorization: Bearer sk-acme", "x-api-key: sk-acme", "api-key: sk-acme"),
        # Not read there, but known:
        ("x-goog-api-key: sk-acme",),
        ("authorization: sk-acme",),
        ("authorization: Token sk-acme", "x-auth-token: sk-acme"),
    ],
)
async def test_a_tenants_key_ends_at_the_sidecar(sent: Sequence[str]) -> None:
    assert await passed_on(*sent) == []


async def test_a_scheme_that_is_not_the_sidecars_stays() -> None:
    assert await passed_on(BASIC, "x-api-key: sk-acme") == [(b"authorization", b"Basic dXNlcjpwYXNz")]


async def test_a_policy_may_let_the_key_pass() -> None:
    passed = await passed_on(key("acme"), "x-api-key: sk-other", more="forward_key: true\n")
    assert passed == [(b"authorization", b"Bearer sk-acme"), (b"x-api-key", b"sk-other")]


@each(
    "twice",
    [
        ("authorization: Bearer sk-nightly", key("acme")),
        (BASIC, key("acme")),
        ("x-api-key: sk-nightly", "x-api-key: sk-acme"),
        ("api-key: sk-nightly", "api-key: sk-acme"),
    ],
)
@each("more", ["", "forward_key: true\n"])
async def test_two_keys_in_one_header_are_a_400(twice: Sequence[str], more: str) -> None:
    """The sidecar would account the request to one tenant, and the server after it would take it for the other's."""
    app = App()
    async with guarding(app, policy(more)) as guarded:
        refused = await guarded.ask(None, *twice)
        assert refused.is_error(400, "invalid_header", "given twice", "once")
        assert "sk-" not in refused.body.decode()
    assert app.seen == []


# A key in a place that is not read

UNREAD = [
    ("x-goog-api-key: sk-acme", CHAT, "x-goog-api-key"),
    ("authorization: sk-acme", CHAT, "authorization"),
    ("authorization: ApiKey  sk-acme ", CHAT, "authorization"),
    ("ocp-apim-subscription-key: sk-acme", CHAT, "ocp-apim-subscription-key"),
    ("accept: */*", f"{CHAT}?api-version=1&key=sk%2Dacme", "?key"),
]


@each(("line", "path", "place"), UNREAD)
async def test_a_known_key_that_is_not_read_is_reported(
    line: str, path: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarding(App()) as guarded:
        for _ in range(3):
            answer = await guarded.ask(None, line, path=path)
            assert (answer.status, answer.headers["x-admission-tier"]) == (200, "normal")
            assert answer.headers["x-admission-ignored"] == place
    [said] = [record.getMessage() for record in caplog.records if record.name == "sidecar.keys"]
    assert f"a key of tenant acme is in {place}, where it does not count" in said
    assert "sk-" not in caplog.text


@each(("line", "path", "place"), UNREAD)
async def test_where_a_key_is_needed_the_refusal_says_where_one_is(line: str, path: str, place: str) -> None:
    refusing = replace(policy("unguarded: deny\n"), anonymous=None)
    async with guarding(App(), refusing) as guarded:
        refused = await guarded.ask(None, line, path=path)
        page = Answer.parsed(await exchange(guarded.port, post(path.replace(CHAT, "/tokenize"), b"{}", line)))
    for answer in (refused, page):
        assert answer.is_error(401, "invalid_api_key", f"(a known key in {place} does not count)")
        assert "sk-" not in answer.body.decode()


@each(
    ("lines", "query"),
    [
        ((), ""),
        (("x-goog-api-key: sk-stranger", "idempotency-key: 1", "authorization: Basic dTpw"), "?key=sk-stranger&&=&a"),
        ((key("acme"), "x-goog-api-key: sk-nightly"), "?key=sk-nightly"),  # the one that is read counts
        ((), "?sk-acme=1&sk-acme"),
        ((), "?" + "a=1&" * 40 + "key=sk-acme"),
        ((), "?k%20=sk-acme"),  # no name that may stand in a header
    ],
)
async def test_nothing_is_said_of_what_is_no_known_key_or_needs_no_word(
    lines: Sequence[str], query: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarding(App()) as guarded:
        answer = await guarded.ask(None, *lines, path=CHAT + query)
    assert answer.status == 200
    assert "x-admission-ignored" not in answer.headers
    assert [record for record in caplog.records if record.name == "sidecar.keys"] == []


# The engine's own key


@asynccontextmanager
async def before_an_engine(folder: Path, more: str = "") -> AsyncIterator[tuple[RawEngine, int]]:
    """A sidecar as `sidecar serve` makes it, before a raw engine, with what the environment says."""
    path = write_policy(folder, more, engine="vllm")
    async with raw_engine(answering()) as engine:
        sidecar = AdmissionMiddleware(ReverseProxy(engine.url), path)
        async with serving(sidecar) as served:
            yield engine, served.port


@each("sent", [(), (key("acme"),), ("x-api-key: sk-acme",), (BASIC,)])
async def test_an_engine_with_a_key_of_its_own_gets_that_one(
    sent: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", ENGINE_KEY)
    async with before_an_engine(tmp_path) as (engine, port):
        answer = Answer.parsed(await exchange(port, post(CHAT, SMALL, *sent)))
        assert answer.status == 200
        unguarded = await exchange(port, get("/v1/models", *sent))
    assert unguarded.startswith(b"HTTP/1.1 200")
    guarded, passed = engine.requests
    assert guarded.all(b"authorization") == [f"Bearer {ENGINE_KEY}".encode()]
    assert guarded.all(b"x-api-key") == []
    assert b"sk-acme" not in guarded.head
    # What is not guarded passes as it came: no one may use the engine's key who showed none of his own.
    assert ENGINE_KEY.encode() not in passed.head
    assert [line.partition(": ")[2].encode() for line in sent] == [
        *passed.all(b"authorization"),
        *passed.all(b"x-api-key"),
    ]


@each("named", ["X-Vllm-Priority", "authorization", "x-vllm-priority , Authorization"])
async def test_a_client_cannot_have_the_proxy_drop_what_the_sidecar_has_written(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request without its priority would go first: vLLM's default of 0 is before everything that we write."""
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", ENGINE_KEY)
    request = post(CHAT, SMALL, key("nightly"), f"connection: X-Own, {named}, close", "x-own: 1", close=False)
    async with before_an_engine(tmp_path) as (engine, port):
        await exchange(port, request)
    seen = engine.requests[0]
    assert seen.all(b"x-vllm-priority") == [b"30"]
    assert seen.all(b"authorization") == [f"Bearer {ENGINE_KEY}".encode()]
    assert (seen.all(b"x-own"), seen.all(b"connection")) == ([], [])


def test_what_holds_the_engines_key_does_not_show_it() -> None:
    assert ENGINE_KEY not in repr(Credentials(False, ENGINE_KEY.encode()))


@each(
    ("said", "warns"),
    [
        ((ENGINE_KEY, "normal", ""), True),
        ((ENGINE_KEY, "deny", ""), False),
        ((ENGINE_KEY, "normal", "forward_key: true\n"), False),
        (("", "normal", ""), False),
    ],
)
def test_an_engine_that_its_key_opens_for_everybody_is_warned_of(
    said: tuple[str, str, str],
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine_key, anonymous, more = said
    monkeypatch.setenv("SIDECAR_ENGINE_KEY", engine_key)
    path = write_policy(tmp_path, more)
    path.write_text(path.read_text().replace("anonymous: normal", f"anonymous: {anonymous}"))
    AdmissionMiddleware(App(), path)
    assert ["anonymous: deny" in record.getMessage() for record in caplog.records] == [True] * warns
    assert ENGINE_KEY not in caplog.text


def test_a_store_may_be_named_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "store"
    file.write_text("redis://user:hidden@store.example:6379/2\n")
    found = find_store(policy(), {"SIDECAR_STORE_FILE": str(file)})
    assert str(found) == "redis://user:***@store.example:6379/2"
    file.write_text("http://hidden@store.example")
    with pytest.raises(ValueError, match=r"^SIDECAR_STORE: ") as refused:
        find_store(policy(), {"SIDECAR_STORE_FILE": str(file)})
    assert "hidden" not in str(refused.value)
