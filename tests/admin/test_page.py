"""The page in a real browser, before a real sidecar that is overloaded."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from sidecar.admin.routes import HEADERS, PAGE, OverviewStream
from sidecar.cluster.document import Promised, RefusalView, ReplicaView, TenantView
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.engines.view import Amount
from sidecar.telemetry.recent import Bucket
from tests.admin.test_request_page import refused_as
from tests.cluster.replicas import Replica, overload, replicas
from tests.cluster.views import engine, engines, gave_way, overview, sizes, starved, tier
from tests.support.browser import browser
from tests.support.devtools import Tab, headless, tab
from tests.support.each import each
from tests.support.serving import serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(browser() is None, reason="no browser: `sh .ci/browser` installs one"),
]
HOSTILE = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">'\"&"
LIVE = "document.getElementById('link').className === 'live'"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with headless(tmp_path_factory.mktemp("browser")) as address:
        yield address


class Shown:
    """A server with the page alone, which shows whatever overview it is given."""

    def __init__(self) -> None:
        self.overview: Any = overview()
        self.stream = OverviewStream(lambda: msgspec.json.encode(self.overview), every_s=0.05)
        page = Route("/", lambda _: Response(PAGE, media_type="text/html", headers=HEADERS))
        self.app = Starlette(routes=[page, Route("/overview/stream", self.stream, methods=["GET"])])


@asynccontextmanager
async def shown(tools: str, first: Any = None) -> AsyncIterator[tuple[Tab, Shown]]:
    server = Shown()
    server.overview = first or server.overview
    async with serving(server.app) as served, tab(tools) as page:
        await page.open(served.url)
        await page.until(LIVE)
        yield page, server
        server.stream.close()


async def cells(page: Tab, row: int = 0, table: str = "tier-rows") -> list[str]:
    script = f"[...document.getElementById({table!r}).children[{row}].children].map((cell) => cell.innerText)"
    return [str(text).replace("\u00a0", " ") for text in await page.evaluate(script)]


async def test_it_says_who_starves_and_shows_every_figure(tools: str) -> None:
    async with shown(tools) as (page, server):
        text = (await page.text()).replace("\u00a0", " ")
        assert server.overview.headline in text
        assert "90k of 100k held (90%), 10k free" in text
        name, held, queued, oldest, by, waits = await cells(page, 1)
        assert name.strip() == "batch"
        assert held.splitlines() == ["20k tokens (20%)", "reserve 10k, borrows 5,000 tokens, 20 running (20%)"]
        assert queued.splitlines() == ["30 requests", "30k tokens"]
        assert oldest.splitlines() == ["waits 3 m 12 s", "starved 2 m 40 s", "went ahead: high 81k tokens"]
        assert by == "by high 41\u00d7 (more important)"  # the other rule was by far the rarer one
        assert waits == "up to 3 m 12 s"
        assert await cells(page, 0, "tenant-rows") == ["acme", "90k", "90", "30"]
        assert (await cells(page, 0, "refusal-rows"))[1:4] == ["batch, acme", "queue_full (503): no place", "2.0 s"]
        assert await page.evaluate("document.title") == "batch starves \u2013 default"
        assert await page.evaluate("document.getElementById('said').textContent") == "batch starves"
        assert page.console == []


async def test_the_dimension_that_binds_is_drawn_with_its_marks_and_does_not_flicker(tools: str) -> None:
    bound = tier("high", held=Amount(5_000, 60), reserve=Amount(20_000, 20), limit=Amount(50_000, 50))
    async with shown(tools, overview(bound, held=Amount(5_000, 60), free=Amount(95_000, 40))) as (page, server):
        assert (await cells(page))[1].splitlines() == ["60 running (60%)", "reserve 20, limit 50, 5,000 tokens (5%)"]
        marks = "['reserve', 'limit'].map((name) => document.querySelector('.gauge .' + name).style.left)"
        assert await page.evaluate(marks) == ["20%", "50%"]
        assert await page.evaluate("document.querySelector('#bars .bar').innerText.startsWith('Requests')")
        server.overview = overview(bound, held=Amount(65_000, 60), free=Amount(35_000, 40))
        await page.until("document.getElementById('bars').innerText.includes('65k of 100k')")
        assert (await cells(page))[1].startswith("60 running"), "5% more are not enough"
        server.overview = overview(bound, held=Amount(90_000, 60), free=Amount(10_000, 40))
        await page.until("document.querySelector('#tier-rows td').innerText.startsWith('5,000\u00a0tokens')")


async def test_a_tier_at_its_own_limit_is_not_said_to_starve(tools: str) -> None:
    waits = msgspec.structs.replace(starved(), is_at_limit=True)
    async with shown(tools, overview(tier("high"), waits)) as (page, _):
        assert "at its own limit" in (await cells(page, 1))[3]
        assert "starv" not in (await cells(page, 1))[3]


async def test_heads_of_columns_explain_themselves_and_old_figures_say_their_age(tools: str) -> None:
    old = [ReplicaView("one", "a", 1, 1, 0.0), ReplicaView("two", "b", 1, 1, 2.4)]
    async with shown(tools, overview(starved(), replicas=old)) as (page, server):
        links = "[...document.querySelectorAll('th a')]"
        assert await page.evaluate(f"{links}.length") > 10
        assert await page.evaluate(f"{links}.every((it) => it.title && document.querySelector(it.hash))")
        text = (await page.text()).replace("\u00a0", " ")
        assert "Tiers, up to 3 s old" in text
        assert "Tenants by tokens held, of this replica" in text
        server.overview = overview(starved())
        await page.until("[...document.querySelectorAll('.age, .here')].every((it) => it.textContent === '')")


async def test_what_comes_from_requests_is_text_and_stays_text(tools: str) -> None:
    hostile = overview(
        starved(HOSTILE, by=HOSTILE),
        pool=HOSTILE,
        tenants=[TenantView(HOSTILE, 1, 1, 1)],
        refusals=[RefusalView(1.0, HOSTILE, HOSTILE, HOSTILE, 503, HOSTILE, f"../{HOSTILE}", 0.0, "one")],
        replicas=[ReplicaView("one", HOSTILE, 1, 1, 0.0)],
        notices=[HOSTILE],
    )
    async with shown(tools, hostile) as (page, _):
        await asyncio.sleep(0.2)
        assert await page.evaluate("document.title") == f"{HOSTILE} starves \u2013 {HOSTILE}"
        assert await page.evaluate("document.querySelectorAll('script, img').length") == 1
        assert (await page.text()).count("onerror") >= 6
        link = await page.evaluate("document.querySelector('#refusal-rows a').href")
        assert "/request?id=..%2F%3Cscript%3E" in link
        # were it markup, it would not run: the page's policy knows the hash of the one script there is
        await page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
        await page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))"
        )
        await asyncio.sleep(0.1)
        assert await page.evaluate("window.ran") is None
        assert any("Content Security Policy" in line for line in page.console)


async def test_a_row_for_each_engine_of_a_pool_of_several(tools: str) -> None:
    async with shown(tools) as (page, server):
        assert await page.evaluate("document.getElementById('engines-section').hidden")
        server.overview = overview(engines=engines())
        await page.until("document.getElementById('engine-rows').children.length === 4")
        assert "4 engines of vllm" in await page.text()
        rows = [[text.split("\n") for text in await cells(page, row, "engine-rows")] for row in range(4)]
        assert rows[0] == [
            ["a"], ["ready"], ["20k of 400k tokens", "20 of 160 requests"], ["3,000"], ["1"], ["20"], ["42%"],
        ]  # fmt: skip
        assert (rows[1][1], rows[1][6]) == (["draining"], ["~30%"])
        assert rows[2][0] == ["c #3"]
        assert rows[2][1] == ["down", "connection refused by http://c:8000"]
        assert (rows[2][2][0], rows[2][6]) == ("0 of 400k tokens", ["\u2013"])
        assert rows[3][1] == ["ready", "down at gpu-2 0123abcd"]
        assert rows[3][2] == ["20k tokens", "20 of 160 requests"]
        server.overview = overview(engines=[engine("a", state="down", reason=HOSTILE, elsewhere=HOSTILE)])
        await page.until("document.getElementById('engine-rows').children.length === 1")
        assert HOSTILE in (await cells(page, 0, "engine-rows"))[1]
        assert page.console == []


RAISED = "the engine preempted requests, so the quantile is above the 0.95 of learn: cautious"


async def test_lease_sizes_are_shown_where_lengths_are_learned(tools: str) -> None:
    async with shown(tools) as (page, server):
        assert await page.evaluate("document.getElementById('sizes-section').hidden")
        server.overview = overview(lease_sizes=[sizes()])
        await page.until("document.getElementById('size-rows').children.length === 1")
        row = [text.split("\n") for text in await cells(page, 0, "size-rows")]
        assert row[0] == ["vllm"]  # a pool of one engine
        assert row[1][0] == "40k tokens held, 30k used (75%)"
        assert row[2] == ["95%", sizes().reason]
        assert row[3:] == [["1.00"], ["44k"], ["12"], ["\u2013"]]
        fill = "document.querySelector('#size-rows .gauge div').style.width"
        assert await page.evaluate(fill) == "75%"
        raised = sizes("b", quantile=0.9875, is_raised=True, reason=RAISED, overlap=0.833, preemptions=2)
        server.overview = overview(lease_sizes=[sizes("a", held_tokens=0, used_tokens=0), raised])
        await page.until("document.getElementById('size-rows').children.length === 2")
        assert (await cells(page, 0, "size-rows"))[:2] == ["a", "nothing held"]
        second = [text.split("\n") for text in await cells(page, 1, "size-rows")]
        assert (second[0], second[2], second[3], second[6]) == (["b"], ["98.75%", RAISED], ["0.83"], ["2"])
        assert await page.evaluate("document.querySelectorAll('#size-rows .differing').length") == 1
        server.overview = overview(lease_sizes=[sizes(HOSTILE, reason=HOSTILE)])
        await page.until("document.getElementById('size-rows').children.length === 1")
        assert (await cells(page, 0, "size-rows"))[0] == HOSTILE
        server.overview = overview()
        await page.until("document.getElementById('sizes-section').hidden")
        assert page.console == []


async def test_the_speed_of_the_engines_is_shown_where_tokens_have_deadlines(tools: str) -> None:
    async with shown(tools) as (page, server):
        assert await page.evaluate("document.getElementById('speeds-section').hidden")
        known = EngineSpeedDocument(None, 41_250, 1_815_796, 11_733, 0, True, 1, 1, 0.204, 0.0196)
        server.overview = overview(engine_speeds=[known])
        await page.until("document.getElementById('speed-rows').children.length === 1")
        assert await cells(page, 0, "speed-rows") == ["vllm", "measured", "41 µs", "1.8 ms", "12 ms", "20%", "2%"]
        server.overview = overview(
            engine_speeds=[EngineSpeedDocument(HOSTILE, 125_000, 250_000, 25_000, 0, False, 0, 0, None, None)]
        )
        await page.until("document.querySelector('#speed-rows .soft') !== null")
        row = await cells(page, 0, "speed-rows")
        assert row == [HOSTILE, "stated defaults, in part", "125 µs", "250 µs", "25 ms", "\u2013", "\u2013"]
        assert page.console == []


async def test_a_tier_says_how_many_of_its_requests_ended_as_promised(tools: str) -> None:
    buckets = [Bucket(1_700_000_000, offered=30, met=29, gain_earned=97, gain_attainable=100)]
    buckets.append(Bucket(1_700_000_005, offered=10, met=5, gain_earned=0, gain_attainable=100))
    async with shown(tools, overview(tier("high", recent=buckets, guarded="97.4% met"), tier("low", 1))) as (page, _):
        await page.until("document.getElementById('tier-rows').children.length === 2")
        assert (await cells(page, 0))[0].endswith("\n97.4% met")
        assert "85% of 40 as promised, 49% of tokens in time" in (await cells(page, 0))[0]
        assert "as promised" not in (await cells(page, 1))[0]


@each("width", [1180, 900, 390])
async def test_engines_with_long_names_fit_the_window(tools: str, width: int) -> None:
    name = "vllm-decode-0.vllm-headless.inference.svc.cluster.local:8000"
    reason = "connection refused by http://" + "a-very-long-host-name." * 10
    rows = [
        engine(name, state="down", reason=reason),
        engine("b" * 64),
        engine("[2001:db8::1]:8000", id="[2001:db8::1]:8000#12"),
    ]
    async with shown(tools, overview(engines=rows)) as (page, _):
        await page.look(width, 900)
        await page.until("document.getElementById('engine-rows').children.length === 3")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_rows_stay_and_keep_their_focus_while_figures_change(tools: str) -> None:
    async with shown(tools) as (page, server):
        await page.evaluate("window.firstSeen = document.getElementById('tier-rows').children[1]")
        await page.evaluate("document.querySelector('#refusal-rows a').focus()")
        server.overview = overview(tier("high", held=Amount(1, 1)), starved(wait_s=250))
        await page.until("document.body.innerText.includes('4\u00a0m\u00a010\u00a0s')")
        assert await page.evaluate("document.getElementById('tier-rows').children[1] === window.firstSeen")
        assert await page.evaluate("document.activeElement.tagName") == "A"
        server.overview = overview(tier("low"), tier("high"), refusals=[], tenants=[])
        await page.until("document.getElementById('tier-rows').children[0].innerText.includes('low')")
        text = await page.text()
        assert "batch" not in text
        assert "No request waits." in text
        assert "No request was refused lately." in text
        assert "No tenant holds anything." in text


async def test_a_flood_of_the_same_refusal_is_one_line(tools: str) -> None:
    refused = [
        RefusalView(100.0 - n, "batch", "acme", "queue_full", 503, "no", f"id-{n}", 0.0, "one") for n in range(9)
    ]
    refused.append(RefusalView(1.0, None, None, "invalid_api_key", 401, "who?", "id", 0.0, "one"))
    async with shown(tools, overview(refusals=refused)) as (page, _):
        assert await page.evaluate("document.getElementById('refusal-rows').children.length") == 2
        flood, stranger = await cells(page, 0, "refusal-rows"), await cells(page, 1, "refusal-rows")
        assert (flood[2], flood[4]) == ("queue_full (503), 9\u00d7 lately: no", "id-0")
        assert stranger[1] == "not known"
        assert await page.evaluate("document.querySelectorAll('#refusal-rows a')[1].title") == "why id was refused"


async def test_what_was_preempted_is_reported_with_what_it_cost(tools: str) -> None:
    refused = RefusalView(1.0, "batch", "acme", "queue_timeout", 503, "no room", "id", 2.0, "one", preempted=2)
    async with shown(tools, overview(tier("high"), gave_way(), refusals=[refused])) as (page, _):
        assert "preempted 3\u00d7 in 5 min, 9.6 s at the engine lost" in (await cells(page, 1))[1]
        assert "preempted" not in (await cells(page, 0))[1]
        assert (await cells(page, 0, "refusal-rows"))[2] == "queue_timeout (503), preempted 2\u00d7: no room"


async def test_a_replica_that_runs_another_policy_is_marked_until_it_does_not(tools: str) -> None:
    def replicas_run(*generations: str) -> Any:
        named = [ReplicaView(f"r{n}", f"host-{n}", 1, 0, 0.0, run) for n, run in enumerate(generations)]
        return overview(replicas=named, replica="r0", mode="shared", store={"state": "shared"}, generation="abc")

    async with shown(tools, replicas_run("abc", "def", "")) as (page, server):
        names = [(await cells(page, number, "replica-rows"))[0] for number in range(3)]
        assert names == ["host-0 r0 (this one)", "host-1 r1 policy def", "host-2 r2"]
        server.overview = replicas_run("abc", "abc", "")
        await page.until("!document.getElementById('replica-rows').innerText.includes('policy')")


async def test_promises_are_marked_as_kept_or_broken(tools: str) -> None:
    promised = Promised(ttft_s=0.5, queue_wait_s=60.0, starvation_s=1800.0)
    batch = msgspec.structs.replace(starved(), slo=promised)
    async with shown(tools, overview(batch)) as (page, _):
        name = (await cells(page))[0].splitlines()
        assert name[1:] == ["✓ first token within 500 ms", "✗ wait 3 m 12 s, promised 1 m", "✓ starvation within 30 m"]


async def test_nothing_is_cut_off_at_any_width_by_day_or_night(tools: str) -> None:
    long = "a-rather-long-name-of-a-tier"
    wide = overview(
        starved(long),
        *(tier(f"tier-{n}", n) for n in range(6)),
        tenants=[TenantView("t" * 80, 1, 1, 1)],
        engine_speeds=[EngineSpeedDocument("e" * 64, 10**12, 10**12, 10**9, 0, True, 1, 1, 1.0, 1.0)],
        lease_sizes=[sizes("e" * 64, reason=RAISED, is_raised=True, preemptions=123_456), sizes("b")],
    )
    async with shown(tools, wide) as (page, _):
        for width in (360, 700, 1000, 1400):
            pictures = []
            for dark in (False, True):
                await page.look(width, 900, dark=dark)
                await page.until(f"innerWidth === {width}")
                assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                assert await page.evaluate(CUT_OFF) == []
                pictures.append(await page.picture(whole=False))
            assert all(len(picture) > 10_000 for picture in pictures), "a blank page is a tenth of that"
            assert pictures[0] != pictures[1]


async def test_text_can_be_read_by_day_and_by_night(tools: str) -> None:
    """Contrast of what is small or colored against the page: at least 4.5 to 1, as WCAG asks."""
    async with shown(tools) as (page, _):
        for dark in (False, True):
            await page.look(1200, 900, dark=dark)
            for selector in ("#headline", ".starves", ".small", "#facts", "thead th", ".soft", "#link"):
                assert await page.evaluate(CONTRAST % json.dumps(selector)) >= 4.5, (selector, dark)


CUT_OFF = """[...document.querySelectorAll('td, th, li, p, h1, h2')]
  .filter((node) => node.clientWidth > 1 && !node.closest('.hidden'))
  .filter((node) => getComputedStyle(node.closest('thead') || node).clipPath === 'none')
  .filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.innerText)"""


CONTRAST = """(() => {
  const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const found = getComputedStyle(document.querySelector(%s)).color;
  const paper = getComputedStyle(document.body).backgroundColor;
  const [dim, bright] = [light(found), light(paper)].sort((a, b) => a - b);
  return (bright + 0.05) / (dim + 0.05);
})()"""


async def test_a_cut_stream_is_said_and_comes_back(tools: str) -> None:
    server = Shown()
    async with tab(tools) as page:
        async with serving(server.app) as served:
            port = served.port
            await page.open(served.url)
            await page.until(LIVE)
            server.stream.close()
        await page.until("document.getElementById('link').className === 'cut'")
        assert "no connection since" in await page.evaluate("document.getElementById('link-text').textContent")
        assert await page.evaluate("document.getElementById('main').className") == "stale"
        assert await page.evaluate("document.getElementById('said').textContent") == "the connection is cut"
        again = Shown()
        async with serving(again.app, port=port):
            await page.until(LIVE, within_s=60)
            assert await page.evaluate("document.getElementById('main').className") == ""
            again.stream.close()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with replicas(tmp_path_factory.mktemp("page"), 1) as (one,):
        yield one


@pytest.mark.long
async def test_a_running_sidecar_under_overload_is_seen_as_it_is(sidecar: Replica, tools: str) -> None:
    async with tab(tools) as page, overload([sidecar.url]):
        await page.open(f"{sidecar.admin_url}/")
        await page.until("document.title.startsWith('batch starves')", within_s=60)
        text = await page.until("document.getElementById('headline').textContent")
        assert "high overtook it" in text
        assert text.endswith("because high is more important.")
        request_id = "refused-here"
        await refused_as(sidecar, request_id)
        await page.until(
            f"document.querySelector('#refusal-rows a[title*=\"{request_id}\"]')?.href.endsWith('{request_id}')"
        )
        assert page.console == []
        assert {url.removeprefix(sidecar.admin_url) for url in page.requested} == {"/", "/overview/stream"}


async def test_a_sidecar_that_stops_waits_for_no_viewer(sidecar: Replica) -> None:
    """The last test: it ends the sidecar."""
    async with aiohttp.ClientSession() as client, client.get(f"{sidecar.admin_url}/overview/stream") as response:
        assert (await response.content.readline()).startswith(b"retry")
        sidecar.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(response.content.read(), 60)
    assert await asyncio.to_thread(sidecar.process.wait, 60) == 0
