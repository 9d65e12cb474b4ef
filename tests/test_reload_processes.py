"""Policies replaced in processes of their own: by SIGHUP, and in a server that is not ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.policy.compiler import load
from tests.cluster.replicas import address, started
from tests.support.middleware import CHAT, chat, key, write_policy
from tests.support.ports import free_ports

pytestmark = pytest.mark.anyio
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there
MOUNTED = """\
import uvicorn
from fastapi import FastAPI
from sidecar import AdmissionMiddleware
app = FastAPI()
app.add_middleware(AdmissionMiddleware)
app.post("/v1/chat/completions")(lambda: {"ok": True})
uvicorn.run(app, port=%d, log_level="warning")
"""


async def page(url: str) -> Any:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return await response.json(content_type=None) if "metrics" not in url else await response.text()


async def until(url: str, is_so: Callable[[Any], Any], within_s: float = 20.0) -> Any:
    """The page, when it is so."""
    shown: Any = None

    async def became_so() -> None:
        nonlocal shown
        while shown is None or not is_so(shown):
            await asyncio.sleep(0.05)
            try:
                shown = await page(url)
            except aiohttp.ClientConnectionError:
                shown = None

    try:
        await asyncio.wait_for(became_so(), within_s)
    except asyncio.TimeoutError:
        pytest.fail(f"never so: {shown}")
    return shown


def runs(path: Path) -> Callable[[Any], bool]:
    """Whether a `/state` is of a process that follows this file."""
    return lambda state: bool(state["policy"]["generation"] == load(path).generation)


def events(log: Path) -> list[str]:
    return [json.loads(line)["event"] for line in log.read_text().splitlines() if line.startswith("{")]


async def logged(log: Path, *wanted: str) -> None:
    """Waits for these events, in order, among others."""
    for _ in range(400):
        found = iter(events(log))
        if all(event in found for event in wanted):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"not logged: {wanted}, but {events(log)}")


def break_file(pool: Path) -> None:
    pool.write_text("engine: [")


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    (tmp_path / "policies").mkdir()
    return write_policy(tmp_path / "policies")


async def test_sighup_reads_the_files_at_once_and_ends_nothing(pool: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    served = ("serve", "--upstream", NOBODY, "--policy", str(pool), "--port", "0", "--admin-port", "0")
    with started(log, *served, "--log-format", "json", SIDECAR_ENGINE_CHECK="off") as process:
        sidecar, admin = address(process, log), address(process, log)
        process.send_signal(signal.SIGHUP)
        await logged(log, "policy_asked", "policy_current")
        write_policy(pool.parent, requests="9")
        process.send_signal(signal.SIGHUP)
        await logged(log, "policy_asked", "policy_reloaded")
        state = await until(f"{admin}/state", runs(pool))
        assert state["pool"]["capacity"]["requests"] == 9
        break_file(pool)
        process.send_signal(signal.SIGHUP)
        ready = await until(f"{admin}/readyz", lambda ready: ready["notices"])
        assert ready["status"] == "ready", "what runs is in order"
        assert f"generation {state['policy']['generation']} stays in force: {pool}:2" in ready["notices"][0]
        async with aiohttp.ClientSession() as client, client.post(sidecar + CHAT, json=chat()) as response:
            assert response.status == 502, "admitted, and the engine is not there"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
    assert "Traceback" not in log.read_text()


@asynccontextmanager
async def mounted(pool: Path, log: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """An app of somebody else with the sidecar in it, in a session without a terminal: as in a container."""
    port = free_ports(2)
    variables = {
        "SIDECAR_POLICY": str(pool),
        "SIDECAR_ADMIN_PORT": str(port + 1),
        "SIDECAR_LOG_LEVEL": "info",
        "SIDECAR_LOG_FORMAT": "json",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR_", "OTEL_"))}
    with log.open("w") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MOUNTED % port,
            env={**environment, **variables}, stderr=errors, start_new_session=True,
        )  # fmt: skip
    try:
        yield process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_mounted_app_follows_its_policy_and_takes_sighup_where_no_one_else_does(
    pool: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with mounted(pool, log) as (process, sidecar, admin), aiohttp.ClientSession() as client:
        await until(f"{admin}/readyz", lambda ready: ready["status"] == "ready")
        # The admin port opens in the app's start, and uvicorn listens only after that.
        await until(f"{sidecar}/openapi.json", bool)
        name, _, value = key("acme").partition(": ")
        async with client.post(sidecar + CHAT, json=chat(), headers={name: value}) as response:
            assert response.status == 200
        (pool.parent / "tenants" / "acme.yaml").unlink()
        await until(f"{admin}/state", runs(pool))
        async with client.post(sidecar + CHAT, json=chat(), headers={name: value}) as response:
            assert response.status == 401
        process.send_signal(signal.SIGHUP)
        await logged(log, "policy_reloaded", "policy_asked", "policy_current")
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 10)
    assert "Traceback" not in log.read_text()
