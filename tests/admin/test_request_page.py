"""The page of one request: in a real browser before a real sidecar, and with names that an attacker chose."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route
from yarl import URL

from sidecar.admin.auth import Access, AdminGuard
from sidecar.admin.request_page import HEADERS, request_routes, story_page, unknown_page
from sidecar.cluster.document import ReplicaView
from sidecar.explain.builder import ExplanationBuilder
from sidecar.explain.document import (
    AdmissionDetails,
    AdmittedAhead,
    AheadGroup,
    Explanation,
    ObstacleDetails,
    RefusalDetails,
    RequestFacts,
    UnknownAhead,
    WaitDetails,
)
from sidecar.telemetry.journal import Journal
from tests.cluster.replicas import CHAT, Replica, overload, replicas
from tests.cluster.views import overview
from tests.support.browser import browser
from tests.support.devtools import Tab, headless, tab
from tests.support.each import each
from tests.support.serving import serving

pytestmark = pytest.mark.anyio
needs_browser = pytest.mark.skipif(browser() is None, reason="no browser: `sh .ci/browser` installs one")
SCRIPT = "<script>document.title='broken'</script>"
HOSTILE = f"{SCRIPT}<img/src=x/onerror=\"document.title='broken'\">'\"&{{style}}"
TURNED = "\u202egnp.exe\u2066\x1b[2J\n"
EVERYWHERE = f"</title></style>{HOSTILE}{TURNED}"
IDS = [
    "..", ".", "../../state", "a/b//c", "a?b=c&d#e", "%2e%2e", "100%", "'onclick='x'", HOSTILE.replace(" ", "+"),
    "javascript:alert(1)", "{id}", "+", "\\\\host\\share", "&amp;", "-->",
]  # fmt: skip


def ahead(name: str, number: int = 0, *, later: bool = True) -> AdmittedAhead:
    return AdmittedAhead(f"{name}{number}", None, name, name, 12, later, "level", f"{name} is more important", 4.0, 6.0)


def story(name: str, **more: Any) -> Explanation:
    """Everything that a story can hold, with one name wherever a client or an operator chooses one."""
    first = [ahead(name, number) for number in range(40)]
    wait = WaitDetails(
        3.0, 2.0, 6.0, first[0], [AheadGroup(name, True, "level", f"{name} is more important", 40, 480)],
        [UnknownAhead(name, 5, "admitted by other replicas of the pool")], first,
    )  # fmt: skip
    asked = RequestFacts(name, name, "header", name, "chat", name, True, 19, 1, None, name)
    plain: dict[str, Any] = {
        "request_id": name, "conclusion": f"waited 3.00 s: {name}", "state": "refused", "pool": name, "told_at_s": 9.0,
        "method": "POST", "path": f"/{name}", "arrived_at_s": 1.0, "trace_id": "ab" * 16, "span_id": "cd" * 8,
        "others": 2, "asked": asked, "in_the_way": ObstacleDetails(1.5, "no_room", f"no room: {name}"), "wait": wait,
        "admitted": AdmissionDetails(8.0, 1, name, 10.0),
        "refused": RefusalDetails(8.5, 503, "queue_timeout", name),
    }  # fmt: skip
    return Explanation(**{**plain, **more})


def builder(*, is_shared: bool = True) -> ExplanationBuilder:
    return ExplanationBuilder(Journal(), lambda: ["high", "batch"], "lab", is_shared)


def elsewhere(name: str) -> Any:
    """A pool with another replica, which may have the request."""
    return overview(replicas=[ReplicaView("two", name, 1, 1, 0.0)])


def test_everything_that_was_written_elsewhere_is_text() -> None:
    for page in (story_page(story(EVERYWHERE)), unknown_page(builder(), elsewhere(EVERYWHERE), EVERYWHERE)):
        assert "<script" not in page
        assert "<img" not in page
        assert page.count("<style>") == page.count("</style>") == page.count("</title>") == 1
        assert not re.search("[\u202e\u2066\x1b]", page), "nothing turns the reading around"
        assert "&lt;script&gt;" in page
        assert set(re.findall(r"<(\w+)", page)) <= {
            "html", "head", "meta", "title", "link", "style", "body", "header", "h1", "h2", "h3", "p", "span", "main",
            "section", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "a",
        }  # fmt: skip
        assert all(re.fullmatch(r"(?:\./|requests?\?id=[\w.~%-]*|data:,)", link) for link in links(page)), links(page)


def links(page: str) -> list[str]:
    return re.findall(r'href="([^"]*)"', page)


def test_the_page_may_run_nothing_and_load_nothing() -> None:
    policy = HEADERS["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src" not in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert HEADERS["cache-control"] == "no-store"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with headless(tmp_path_factory.mktemp("browser")) as address:
        yield address


@asynccontextmanager
async def drawn(tools: str, page: str) -> AsyncIterator[Tab]:
    served = Starlette(
        routes=[Route("/request", lambda _: HTMLResponse(page.encode("utf-8", "replace"), 200, HEADERS))]
    )
    async with serving(served) as site, tab(tools) as opened:
        await opened.open(f"{site.url}/request?id=x")
        yield opened


@needs_browser
@each("name", ["batch", "n" * 128, EVERYWHERE], ids=["plain", "long", "hostile"])
async def test_nothing_is_cut_off_or_runs_at_any_width(tools: str, name: str) -> None:
    for page in (story_page(story(name)), unknown_page(builder(), elsewhere(name), name)):
        async with drawn(tools, page) as opened:
            for width in (320, 390, 700, 1200):
                await opened.look(width, 900, dark=width == 390)
                await opened.until(f"innerWidth === {width}")
                assert await opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
                assert await opened.evaluate(CUT_OFF) == []
            assert (await opened.evaluate("document.title")).startswith("Request ")
            assert opened.console == []


CUT_OFF = """[...document.querySelectorAll('td, dd, dt, li, p, h1, h2')].filter((node) => node.clientWidth > 1)
  .filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.innerText)"""


# -- a real sidecar


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replicas(tmp_path_factory.mktemp("request"), 1) as (one,):
        yield one


async def refused_as(sidecar: Replica, request_id: str) -> None:
    """Has it refuse a request with this id."""
    headers = {"authorization": "Bearer unknown", "x-request-id": request_id}
    async with aiohttp.ClientSession() as client, client.post(sidecar.url + CHAT, json={}, headers=headers) as answer:
        assert (answer.status, answer.headers["x-request-id"]) == (401, request_id)


async def get(url: str, **headers: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as client, client.get(URL(url, encoded=True), headers=headers) as answer:
        return answer.status, answer.content_type, await answer.text()


@each("request_id", IDS)
async def test_any_id_that_a_client_may_choose_has_its_page_and_its_json(sidecar: Replica, request_id: str) -> None:
    await refused_as(sidecar, request_id)
    status, kind, page = await get(f"{sidecar.admin_url}/request?id={quote(request_id, safe='')}")
    assert (status, kind) == (200, "text/html")
    assert "Refused at once with 401 invalid_api_key" in page
    assert "<script" not in page
    (as_json,) = [link for link in links(page) if link.startswith("requests")]
    status, kind, text = await get(f"{sidecar.admin_url}/{as_json}")
    assert (status, kind) == (200, "application/json")
    assert '"code":"invalid_api_key"' in text


@needs_browser
async def test_the_id_on_the_live_page_opens_the_story_for_people(sidecar: Replica, tools: str) -> None:
    async with tab(tools) as page, overload([sidecar.url]):
        await refused_as(sidecar, "..")
        await page.look(390, 800)
        await page.open(f"{sidecar.admin_url}/")
        await page.until("document.querySelector('#refusal-rows a')?.href.endsWith('/request?id=..')", 15)
        await page.evaluate("document.querySelector('#refusal-rows a').click()")
        await page.until("document.title === 'Request ..'")
        text = await page.text()
        assert "Refused at once with 401 invalid_api_key" in text
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await page.evaluate("[...document.querySelectorAll('.links a')].map((a) => a.pathname + a.search)") == [
            "/",
            "/requests?id=..",
        ]
        assert page.console == []


@pytest.mark.long
async def test_a_request_that_waited_says_what_it_waited_for_and_links_to_those_ahead(sidecar: Replica) -> None:
    async with overload([sidecar.url]), aiohttp.ClientSession() as client:
        await asyncio.sleep(1)
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
        headers = {"x-request-id": "slow", "x-priority": "batch"}
        async with client.post(sidecar.url + CHAT, json=body, headers=headers) as answer:
            await answer.read()
    _, _, page = await get(f"{sidecar.admin_url}/request?id=slow")
    assert "Waited " in page
    assert "had to wait" in page
    assert "4 of 4 requests are held, and it asks for 1 request" in page or "already, in " in page
    assert "Admitted while it waited" in page
    other = next(link for link in links(page) if link.startswith("request?id="))
    status, _, theirs = await get(f"{sidecar.admin_url}/{other}")
    assert status == 200
    assert "settled" in theirs


@each("query", ["?id=forgotten", "?id=", "", f"?id={'n' * 5000}", "?id=%ff%00%0a", "?id=a&id=b"])
async def test_an_id_that_is_not_known_has_a_page_that_says_so(sidecar: Replica, query: str) -> None:
    status, kind, page = await get(f"{sidecar.admin_url}/request{query}")
    assert (status, kind) == (404, "text/html")
    assert ("is known here" if query not in ("", "?id=") else "The address names no request") in page
    assert 'href="./"' in page
    assert len(page) < 40_000


async def test_of_a_request_that_is_not_known_here_the_other_replicas_are_named() -> None:
    page = unknown_page(builder(), elsewhere("gpu-2"), "id-7")
    assert "<li>gpu-2 two</li>" in page
    assert "ask the other replicas, too" in page
    alone = unknown_page(builder(is_shared=False), overview(), "id-7")
    assert "other replicas" not in alone


async def test_the_page_needs_the_token_as_the_others_do() -> None:
    app = AdminGuard(Starlette(routes=request_routes(builder(), overview)), Access("s" * 32))
    async with serving(app) as site:
        assert (await get(f"{site.url}/request?id=x"))[0] == 401
        assert (await get(f"{site.url}/request?id=x", authorization=f"Bearer {'s' * 32}"))[0] == 404
