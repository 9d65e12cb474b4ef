"""A store that is killed, hangs or is cut off under load: what a replica shows then is its own, present, and agrees."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.replicas import CHAT, Replica, overload, replicas, until_shown
from tests.support.browser import browser
from tests.support.devtools import Tab, headless, tab
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_servers import RedisServer, free_port
from tests.support.shared_pools import begun_store

pytestmark = [pytest.mark.anyio, pytest.mark.hasty]
REQUESTS, TOKENS = 4, 1000
BATCH, HIGH = 9, 5
"""Clients that always ask: those of `high` at one replica would fill its part alone."""
SETTLED_S = 2.5
"""After this time every request that ran when the store was lost has ended, and others run or none does."""


def policy(on_loss: str) -> str:
    return f"""\
engine: vllm
pool: pair
on_store_loss: {on_loss}
capacity: {{tokens: {TOKENS}, requests: {REQUESTS}}}
tiers:
  high: {{reserve: 25%}}
  batch: {{}}
default_tier: batch
anonymous: high
endpoints:
  {CHAT}: {{}}
"""


@dataclass
class Two:
    """Two replicas of one pool; the first reaches the store through `proxy`."""

    store: RedisServer
    proxy: FaultProxy
    first: Replica
    second: Replica

    async def lose(self, fault: str) -> None:
        """Takes the store from the first replica, or from both."""
        if fault == "kill":
            self.store.kill()
        elif fault == "hang":
            self.store.pause()
        else:
            self.proxy.swallow_replies = self.proxy.swallow_requests = self.proxy.refuse = True

    async def bring_back(self, fault: str) -> None:
        """Ends that."""
        if fault == "kill":
            self.store.restart()
        elif fault == "hang":
            self.store.resume()
        else:
            self.proxy.swallow_replies = self.proxy.swallow_requests = self.proxy.refuse = False
            self.proxy.drop_connections()


@asynccontextmanager
async def two(folder: Path, on_loss: str) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(begun_store(folder, "pair"))
        proxy = await stack.enter_async_context(FaultProxy(store.host, store.port))
        started = ExitStack()
        stack.push_async_callback(asyncio.to_thread, started.close)
        stores = (proxy.url(), store.url)
        # In a thread: a replica asks for its store before it prints its address, and the proxy is in this loop.
        first, second = await asyncio.to_thread(
            started.enter_context, replicas(folder, 2, policy(on_loss), stores=stores)
        )
        yield Two(store, proxy, first, second)


async def get(replica: Replica, path: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(replica.admin_url + path) as response:
        return await response.text()


def check_overview(shown: Any, is_alone: bool) -> None:
    """No figure of one document contradicts another."""
    own = shown["store"]["own"]
    if is_alone:
        assert sum(tier["queued"]["requests"] for tier in shown["tiers"]) == own["waiting"]
        assert sum(tier["held"]["requests"] for tier in shown["tiers"]) == shown["held"]["requests"] == own["leases"]
        assert [replica["replica"] for replica in shown["replicas"]] == [shown["replica"]]
        assert [(tier["queued"]["requests"] > 0) == (tier["oldest"] is not None) for tier in shown["tiers"]] == [
            True
        ] * 2
        assert ("No request waits" in shown["headline"]) == (own["waiting"] == 0)
        said = [notice for notice in shown["notices"] if "store" in notice or "replica" in notice]
        assert len(said) == 1, shown["notices"]
        assert said[0].startswith("the store has not answered for ")
    (itself,) = [replica for replica in shown["replicas"] if replica["replica"] == shown["replica"]]
    assert (itself["leases"], itself["waiting"]) == (own["leases"], own["waiting"])
    for tier in shown["tiers"]:
        assert tier["held"]["tokens"] >= tier["held"]["requests"]


def gauge(page: str, name: str) -> float:
    """The sum of a metric's series."""
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} ([\d.e+]+)", page, re.MULTILINE))


async def check_pages(replica: Replica, clients: int, part: dict[str, int]) -> None:
    """`/state`, `/metrics` and the overview show the same part, and every request that this replica has."""
    state = json.loads(await get(replica, "/state"))["pool"]
    assert state["capacity"] == part
    assert (state["leases"], state["waiting"]) == (state["store"]["own"]["leases"], state["store"]["own"]["waiting"])
    assert sum(tier["queued"]["requests"] for tier in state["tiers"]) == state["waiting"]
    assert sum(tier["reserve"]["requests"] for tier in state["tiers"]) <= max(1, part["requests"])
    metrics = await get(replica, "/metrics")
    assert gauge(metrics, "admission_capacity_requests") == part["requests"]
    assert gauge(metrics, "admission_capacity_tokens") == part["tokens"]
    assert gauge(metrics, "admission_store_available") == 0
    assert gauge(metrics, "admission_capacity_wanted") > 0, "an autoscaler that read 0 would end the engines"
    queued, held = (gauge(metrics, f"admission_{name}_requests") for name in ("queue", "held"))
    assert held <= part["requests"]
    assert abs(queued + held - clients) <= 3, "its clients always ask; one or two are between two requests"


MATRIX = [
    pytest.param("divide", "kill", marks=pytest.mark.soak),
    pytest.param("divide", "hang", marks=pytest.mark.soak),
    ("divide", "partition"),
    ("closed", "kill"),
    pytest.param("closed", "hang", marks=pytest.mark.soak),
    pytest.param("closed", "partition", marks=pytest.mark.soak),
]


@pytest.mark.long
@pytest.mark.parametrize(("on_loss", "fault"), MATRIX)
async def test_while_the_store_is_lost_under_load_a_replica_shows_itself_and_then_the_pool_again(
    on_loss: str, fault: str, tmp_path: Path
) -> None:
    async with two(tmp_path, on_loss) as both:
        first, second = both.first, both.second
        whole = {"tokens": TOKENS, "requests": REQUESTS}
        async with overload([first.url], BATCH, HIGH - 2), overload([second.url], 2, 0):
            await until_shown(first, lambda one: len(one["replicas"]) == 2 and one["held"]["requests"] == REQUESTS)
            await both.lose(fault)
            state = "divided" if on_loss == "divide" else "closed"
            await until_shown(first, lambda one: one["store"]["state"] == state)
            await asyncio.sleep(SETTLED_S)
            for _ in range(4):
                shown = await first.overview()
                check_overview(shown, is_alone=True)
                assert ("its part of the pool is" in str(shown["notices"])) == (on_loss == "divide")
                await asyncio.sleep(0.21)
            if on_loss == "divide":
                await check_pages(first, BATCH + HIGH, shown["capacity"])
                assert shown["capacity"]["requests"] in (0, 1, 2), "0 where the others held the rest when it was lost"
            else:
                assert (shown["capacity"], shown["held"]["requests"]) == ({"tokens": 0, "requests": 0}, 0)
                assert shown["store"]["own"]["waiting"] > 0, "those that waited wait on, for ten seconds"
            top = await printed("top", "--once", "--admin", first.admin_url)
            assert top.count("the store has not answered for") == 1
            if fault == "partition":
                theirs = await second.overview()
                assert (theirs["store"]["state"], theirs["capacity"]) == ("shared", whole)
            await both.bring_back(fault)
            back = await until_shown(first, lambda one: len(one["replicas"]) == 2 and not one["notices"])
            check_overview(back, is_alone=False)
            assert (back["capacity"], back["store"]["state"]) == (whole, "shared")
            await until_shown(first, lambda one: one["held"]["requests"] == REQUESTS)
            assert gauge(await get(first, "/metrics"), "admission_capacity_requests") == REQUESTS


async def printed(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidecar.cli", *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return " ".join(out.decode().split())


# -- in a browser


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with headless(tmp_path_factory.mktemp("browser")) as address:
        yield address


async def rows(page: Tab) -> list[list[str]]:
    script = (
        "[...document.getElementById('tier-rows').children].map((row) => [...row.children].map((c) => c.innerText))"
    )
    return [[cell.replace("\u00a0", " ") for cell in row] for row in await page.evaluate(script)]


@pytest.mark.long
@pytest.mark.skipif(browser() is None, reason="no browser: `sh .ci/browser` installs one")
@pytest.mark.parametrize("on_loss", ["divide", "closed"])
async def test_the_page_says_once_that_it_shows_this_replica_alone_and_no_row_contradicts_itself(
    on_loss: str, tools: str, tmp_path: Path
) -> None:
    async with two(tmp_path, on_loss) as both, tab(tools) as page, overload([both.first.url], BATCH, HIGH - 2):
        await page.look(390, 900)
        await page.open(f"{both.first.admin_url}/")
        await page.until("document.body.innerText.includes('store shared, 2 replicas')")
        both.store.kill()
        await page.until("document.body.innerText.includes('has not answered for')")
        for _ in range(5):
            text = (await page.text()).replace("\u00a0", " ")
            assert text.count("has not answered for") == text.count("only this replica's") == 1
            assert len(re.findall(r"\bstore\b", text.partition("Last refusals")[0])) == 1, text
            for cells in await rows(page):
                assert ("request" in cells[2]) == ("waits " in cells[3]), cells
            await asyncio.sleep(0.25)
        if on_loss == "divide":
            (part,) = re.findall(r"its part of the pool is \d+ of 1,000 tokens and (\d) of 4 requests", text)
            assert f" of {part} held" in text
        else:
            assert "nothing may be added" in text
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        both.store.restart()
        await page.until("document.body.innerText.includes('store shared, 2 replicas')")
        await page.until("document.body.innerText.includes(' of 4 held')")
        assert "has not answered" not in await page.text()
        assert page.console == []


@pytest.mark.long
@pytest.mark.skipif(browser() is None, reason="no browser: `sh .ci/browser` installs one")
async def test_a_store_that_was_never_reached_is_not_called_lost_anywhere(tools: str, tmp_path: Path) -> None:
    store = f"redis://127.0.0.1:{free_port()}/0"
    why = f"the store has not been reached yet: connection refused by {store}"
    with replicas(tmp_path, 1, policy("closed"), SIDECAR_STORE=store) as (one,):
        ready = json.loads(await get(one, "/readyz"))
        assert (ready["reasons"], ready["notices"]) == ([why], [])
        state = json.loads(await get(one, "/state"))["pool"]
        assert state["store"]["reason"] == f"connection refused by {store}"
        async with aiohttp.ClientSession() as client, client.post(one.url + CHAT, json={"messages": []}) as answer:
            assert answer.status in (400, 503)
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
        async with aiohttp.ClientSession() as client, client.post(one.url + CHAT, json=body) as answer:
            said = await answer.text()
        assert (answer.status, "has not been reached yet" in said, store in said) == (503, True, False)
        async with tab(tools) as page:
            await page.open(f"{one.admin_url}/")
            await page.until("document.getElementById('link').className === 'live'")
            text = await page.text()
        assert text.count(why) == 1
        assert "lost" not in text
        logged = (tmp_path / "sidecar-0").read_text()
        assert f"the store of pool pair has not been reached yet: connection refused by {store}" in logged
        assert "store lost" not in logged
