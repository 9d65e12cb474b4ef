"""Observe, enforce, observe again, by hot reload of a running `sidecar serve`: no period's figures are in another."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.replicas import CHAT, POLICY, Replica, replicas
from tests.support.browser import browser
from tests.support.devtools import headless, tab
from tests.support.http import fetch
from tests.support.redis_servers import until

OBSERVING = POLICY.replace("engine: vllm", "engine: vllm\nmode: observe")
REQUESTS, ROOM = 24, 4
SECONDS = 1.5
"""How long one runs: 150 tokens of 10 ms."""


def read(sidecar: Replica, page: str) -> Any:
    return fetch(f"{sidecar.admin_url}/{page}").json


def change(sidecar: Replica, folder: Path, policy: str, mode: str) -> None:
    (folder / "policy.yaml").write_text(policy)
    until(lambda: read(sidecar, "state")["mode"] == mode, f"it is in mode {mode}")


def send(sidecar: Replica, count: int, tokens: int) -> None:
    """So many streaming requests at once, to their ends."""

    async def one(client: aiohttp.ClientSession) -> None:
        body = {"model": "m", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
        async with client.post(sidecar.url + CHAT, json=body, headers={"x-priority": "batch"}) as response:
            assert response.status == 200
            await response.read()

    async def all_of_them() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            await asyncio.gather(*(one(client) for _ in range(count)))

    asyncio.run(all_of_them())


def observed(sidecar: Replica) -> str:
    command = [sys.executable, "-m", "sidecar.cli", "observed", "--admin", sidecar.admin_url]
    return " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def waits_shown(sidecar: Replica) -> list[float]:
    """Every wait that the overview has, of any tier, and of the gauges."""
    overview = read(sidecar, "overview")
    found = [bucket["wait_max_s"] for tier in overview["tiers"] for bucket in tier["recent"]]
    found += [bucket["starvation_max_s"] for tier in overview["tiers"] for bucket in tier["recent"]]
    found += [tier["oldest"]["wait_s"] for tier in overview["tiers"] if tier["oldest"] is not None]
    lines = fetch(f"{sidecar.admin_url}/metrics").text.splitlines()
    gauges = [line for line in lines if line.startswith("admission_queue_oldest_wait_seconds{")]
    assert gauges
    return found + [float(line.split()[-1]) for line in gauges]


@pytest.mark.long
def test_no_figure_of_one_period_is_in_another(tmp_path: Path) -> None:
    with replicas(tmp_path, 1, OBSERVING) as (sidecar,):
        send(sidecar, REQUESTS, tokens=round(SECONDS * 100))
        waiting = read(sidecar, "observed")
        assert waiting["undecided"] > 0
        assert waiting["total"]["waiting"] == waiting["undecided"] == REQUESTS - waiting["total"]["requests"]
        assert waiting["total"]["wait_max_s"] > SECONDS * 0.8  # of those that wait, so far
        assert waiting["total"]["wait_max_is_least"]
        assert f"{waiting['undecided']} more would still be waiting" in waiting["conclusion"]
        assert max(waits_shown(sidecar)) > SECONDS * 0.5

        change(sidecar, tmp_path, POLICY, "enforce")
        assert max(waits_shown(sidecar)) == 0
        ended = read(sidecar, "observed")
        assert (ended["mode"], ended["generation"]) == ("enforce", waiting["generation"])
        assert ended["since_s"] == waiting["since_s"] < ended["until_s"] <= time.time()
        assert (ended["replicas"], ended["left_out"]) == (waiting["replicas"], [])
        assert ended["total"]["requests"] + ended["undecided"] == REQUESTS
        said = observed(sidecar)
        assert "Observing is over" in said
        assert "left out" not in said
        send(sidecar, ROOM, tokens=5)
        assert max(waits_shown(sidecar)) < 0.5
        assert read(sidecar, "observed")["total"] == ended["total"]

        change(sidecar, tmp_path, OBSERVING, "observe")
        again = read(sidecar, "observed")
        assert (again["generation"], again["until_s"]) == (waiting["generation"], None)
        assert (again["total"]["requests"], again["undecided"]) == (0, 0)
        assert again["since_s"] > ended["until_s"]
        send(sidecar, 3, tokens=5)
        until(lambda: read(sidecar, "observed")["total"]["requests"] == 3, "three were observed")
        assert "1 replica observes" in observed(sidecar)


@pytest.mark.long
@pytest.mark.skipif(browser() is None, reason="no browser: `sh .ci/browser` installs one")
def test_the_live_page_shows_no_shadows_wait_once_it_enforces(tmp_path: Path) -> None:
    row = "[...document.querySelectorAll('#tier-rows tr')].map((row) => row.innerText).join(' | ')"

    async def looked_at(tools: str, sidecar: Replica) -> None:
        async with tab(tools) as page:
            await page.open(sidecar.admin_url)
            await page.until("document.body.innerText.includes('mode: observe')")
            await page.until("document.getElementById('tier-rows').innerText.includes('up to')")
            await asyncio.to_thread(change, sidecar, tmp_path, POLICY, "enforce")
            await page.until("!document.body.innerText.includes('mode: observe')")
            text = str(await page.evaluate(row))
            assert text.count("waits") == text.count("none waits") == 2
            assert "up to" not in text
            assert "No request waits." in await page.text()
            assert page.console == []

    with replicas(tmp_path, 1, OBSERVING) as (sidecar,), headless(tmp_path / "browser") as tools:
        send(sidecar, REQUESTS, tokens=round(SECONDS * 100))
        asyncio.run(looked_at(tools, sidecar))
