"""How other servers end with the middleware in their app: docs/tutorial-fastapi.md. Real processes and signals."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.hosts import BODY, CHAT, PAGE
from tests.server.launched import Command, running
from tests.support.markdown import table
from tests.support.middleware import write_policy
from tests.support.redis_servers import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.long]

APP = """\
import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from fastapi import FastAPI
from sidecar import AdmissionMiddleware


@asynccontextmanager
async def lifespan(app):
    yield
    print("the lifespan ends", flush=True)


app = FastAPI(lifespan=lifespan)
app.add_middleware(AdmissionMiddleware, policy="policy.yaml")


@app.post("/v1/chat/completions")
async def chat(body: dict):
    print("a request runs", flush=True)
    while not Path("released").exists():
        await asyncio.sleep(0.05)
    return {"model": body["model"]}
"""
GUNICORN = ["gunicorn", "main:app", "-b", "127.0.0.1:{port}", "--no-control-socket", "-k"]
SERVERS = {
    "uvicorn": ["uvicorn", "main:app", "--port", "{port}"],
    "hypercorn": ["hypercorn", "main:app", "-b", "127.0.0.1:{port}"],
    "granian": ["granian", "--interface", "asgi", "main:app", "--port", "{port}"],
    "uvicorn_worker": [*GUNICORN, "uvicorn_worker.UvicornWorker"],
    "asgi": [*GUNICORN, "asgi"],
    "daphne": ["daphne", "-p", "{port}", "main:app"],
}
LONGEST_S, SHORTEST_S = "60", "1"


def row_of(server: str) -> list[str]:
    (row,) = (row for row in table(PAGE, "Servers and processes") if server in re.findall(r"\w+", row[0]))
    return row


def test_every_server_of_the_table_is_ended() -> None:
    named = {name for row in table(PAGE, "Servers and processes") for name in re.findall(r"\w+", row[0])}
    assert named - {"gunicorn", "with", "or"} == {*SERVERS}


@asynccontextmanager
async def one_runs_and_one_waits(folder: Path, name: str, bound_s: str) -> AsyncIterator[tuple[Command, list[Any]]]:
    """A server of this bound, with room for one request; the answers of two: status, the error's code or None."""
    if importlib.util.find_spec(SERVERS[name][0]) is None:
        pytest.skip(f"pip install -e '.[dev,hosts]' installs {SERVERS[name][0]}")
    (folder / "main.py").write_text(APP)
    write_policy(folder, requests="1")
    port, option = free_port(), re.match(r"`(--[\w-]+)`", row_of(name)[1])
    line = [word.format(port=port) for word in SERVERS[name]] + ([option[1], bound_s] if option else [])
    url = f"http://127.0.0.1:{port}{CHAT}"
    with running(folder, *line, SIDECAR_ADMIN_PORT=str(admin := free_port())) as server:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client:
            await answers(client, url)
            first = asyncio.create_task(asked(client, url))
            await asyncio.to_thread(server.until, "a request runs")
            second = asyncio.create_task(asked(client, url))
            if not row_of(name)[3].startswith("has none"):  # else there is no page, and both end at once
                await waits(client, f"http://127.0.0.1:{admin}/state")
            yield server, [first, second]


async def answers(client: aiohttp.ClientSession, url: str) -> None:
    """Waits until the server listens."""
    while True:
        with suppress(aiohttp.ClientConnectionError):
            async with client.get(url):
                return
        await asyncio.sleep(0.05)


async def asked(client: aiohttp.ClientSession, url: str) -> tuple[int | None, str | None]:
    try:
        async with client.post(url, json=BODY) as answer:
            found = await answer.json() if answer.content_type == "application/json" else {}
            return answer.status, found.get("error", {}).get("code")
    except aiohttp.ClientConnectionError:
        return None, None


async def waits(client: aiohttp.ClientSession, state: str) -> None:
    """Waits until a request waits for admission."""
    while True:
        async with client.get(state) as page:
            if (await page.json())["pool"]["waiting"]:
                return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "daphne"])
async def test_what_runs_and_what_waits_is_served_to_its_end(name: str, tmp_path: Path) -> None:
    async with one_runs_and_one_waits(tmp_path, name, LONGEST_S) as (server, asking):
        server.signal(signal.SIGTERM)
        (tmp_path / "released").touch()
        assert await asyncio.gather(*asking) == [(200, None), (200, None)]
        assert "the lifespan ends" in await asyncio.to_thread(server.ended)


@pytest.mark.parametrize("name", SERVERS)
async def test_at_the_bound_they_end_as_the_page_says(name: str, tmp_path: Path) -> None:
    _, _, cut, lifespan = row_of(name)
    async with one_runs_and_one_waits(tmp_path, name, SHORTEST_S) as (server, asking):
        server.signal(signal.SIGTERM)
        expected = {"503": (503, "draining"), "500": (500, None)}.get(cut[:3], (None, None))
        assert await asyncio.gather(*asking) == [expected, expected]
        assert ("the lifespan ends" in await asyncio.to_thread(server.ended)) == (lifespan == "ends")
