"""One admin port for all workers: its pages are of all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import httpx2
import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from sidecar.admin.auth import Access, AdminGuard
from sidecar.admission.via import OWN_VIA
from sidecar.composition.serving import ServeSettings
from sidecar.telemetry.logs.setup import LogSettings
from sidecar.workers.crew import Crew
from sidecar.workers.pages import WorkerPages
from sidecar.workers.process import WorkerState
from tests.workers.running import (
    ASKED,
    Command,
    both_have_some,
    held_engine,
    is_restarted,
    serving,
    until,
    write_policy,
)

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has workers")]
ADMITTED = 'admission_admitted_total{admission_pool="default",admission_tier="normal"}'
HELD = 'admission_held_requests{admission_pool="default",admission_tier="normal"}'
HELD_TOKENS = 'admission_held_tokens{admission_pool="default",admission_tier="normal"}'
TENANT_HELD = 'admission_tenant_tokens_held{admission_pool="default",admission_tenant="anonymous"}'
TTFT = 'admission_time_to_first_token_seconds_count{admission_pool="default",admission_tier="normal"}'


async def metrics(command: Command) -> dict[str, float]:
    lines = (await command.page("/metrics")).splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


@pytest.mark.long
async def test_metrics_are_the_sum_of_all_workers_and_never_fall(tmp_path: Path) -> None:
    async with held_engine() as engine, serving(write_policy(tmp_path, requests=40), engine.url) as command:
        streams: list[asyncio.Task[tuple[int, bytes]]] = []
        await both_have_some(command, streams)
        assert [await command.ask() for _ in range(10)] == [200] * 10
        before = await metrics(command)
        assert before[ADMITTED] == len(streams) + 10
        assert before["admission_workers"] == 2
        assert (await command.page("/models/none/metrics", 404))["error"]["code"] == "unknown_page"
        assert before[TTFT] == len(streams)  # of each worker one at least
        await until(lambda: shows(command, HELD, len(streams)), "what the pool holds is shown once")
        held = await metrics(command)
        assert held[TENANT_HELD] == held[HELD_TOKENS] > 0  # what one process holds is added up
        pids = await command.pids()
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: is_restarted(command, 1, pids), "it is started again")
        after = await metrics(command)
        counted = [name for name in before if name.endswith(("_total", "_count", "_bucket", "_sum"))]
        assert [name for name in counted if after[name] < before[name]] == []
        assert after[ADMITTED] == before[ADMITTED]
        assert await command.ask() == 200
        assert (await metrics(command))[ADMITTED] == before[ADMITTED] + 1
        assert after["admission_worker_restarts_total"] == 1
        engine.release.set()
        await asyncio.gather(*streams, return_exceptions=True)


async def shows(command: Command, name: str, value: float) -> bool:
    return (await metrics(command))[name] == value


async def shows_replicas(client: aiohttp.ClientSession, command: Command, number: int) -> bool:
    async with client.get(f"{command.admin}/overview") as answer:
        return len((await answer.json())["replicas"]) == number


@pytest.mark.long
async def test_the_pages_of_all_workers(tmp_path: Path) -> None:
    token = {"authorization": "Bearer let-me-look-at-this-pool"}
    async with (
        held_engine() as engine,
        serving(write_policy(tmp_path), engine.url, SIDECAR_ADMIN_TOKEN="let-me-look-at-this-pool") as command,
        aiohttp.ClientSession(headers=token) as client,
    ):
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/state", 401), ("/metrics", 401), ("/", 401)):
            await command.page(path, status)
        # A request is found, whichever worker has served it.
        ids = []
        for _ in range(12):
            async with command.client.post(f"{command.proxy}/v1/completions", json=ASKED) as answer:
                ids.append(answer.headers["x-request-id"])
        for path in [f"/requests/{one}" for one in ids] + [f"/request?id={one}" for one in ids]:
            async with client.get(command.admin + path) as answer:
                assert answer.status == 200
        async with client.get(f"{command.admin}/requests/none") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown_request")
        # The live page shows both, and one stream is enough for it.
        await until(lambda: shows_replicas(client, command, 2), "each worker has heard of the other")
        async with client.get(f"{command.admin}/") as answer:
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        async with client.get(f"{command.admin}/overview/stream") as stream:
            assert (await stream.content.readline()).startswith(b"retry")
            command.signal(signal.SIGTERM)
            await asyncio.wait_for(stream.content.read(), 20)  # it ends
        assert (await command.ended())[0] == 0


@pytest.mark.long
async def test_a_drain_of_an_engine_reaches_all_workers(tmp_path: Path) -> None:
    async with held_engine() as first, held_engine() as second:
        path = tmp_path / "policy.yaml"
        path.write_text(
            f"engine: none\nengines:\n  capacity: {{tokens: 100k, requests: 20}}\n"
            f"  static: [{{name: a, url: '{first.url}'}}, {{name: b, url: '{second.url}'}}]\n"
            "tiers: {normal: {reserve: 50%}}\nanonymous: normal\n"
        )
        async with serving(path, None) as command:
            async with command.client.post(f"{command.admin}/engines/a/drain?wait=true") as answer:
                assert (answer.status, (await answer.json())["drained"]) == (200, True)
            before = first.served
            assert [await command.ask() for _ in range(20)] == [200] * 20
            assert (first.served, second.served) == (before, 20)
            rows = {row["name"]: row for row in (await command.page("/engines"))["engines"]}
            assert (rows["a"]["state"], rows["b"]["state"]) == ("draining", "ready")
            async with command.client.post(f"{command.admin}/engines/a/resume") as answer:
                assert answer.status == 200
            streams: list[asyncio.Task[tuple[int, bytes]]] = []
            await both_have_some(command, streams)
            # The requests that a process counts at an engine are added up.
            rows = {row["name"]: row for row in (await command.page("/engines"))["engines"]}
            assert sum(row["in_flight"] for row in rows.values()) == len(streams)
            first.release.set()
            second.release.set()
            await asyncio.gather(*streams)
            async with command.client.post(f"{command.admin}/engines/none/drain") as answer:
                assert answer.status == 404


async def test_a_host_that_reads_as_a_path_opens_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette from 0.49 to 1.0 puts the client's `Host` before the path, and divides them again."""
    monkeypatch.setattr(Request, "url", URL("http://a/state?/healthz"))
    async with pages_of(crew_of(tmp_path, 0), Access(token="secret")) as client:
        assert (await client.get("/healthz")).json() == {"status": "alive"}
        assert (await client.get("/state")).status_code == 401


async def test_what_cannot_be_relayed_to_a_worker_is_refused(tmp_path: Path) -> None:
    crew = crew_of(tmp_path, 1)
    crew.workers[0].state = WorkerState.SERVING
    async with pages_of(crew, Access()) as client:
        looped = await client.get("/overview", headers={"via": OWN_VIA})
        assert (looped.status_code, looped.json()["error"]["code"]) == (508, "loop_detected")
        gone = await client.get("/overview")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "no_worker")
    await crew.close()


def crew_of(folder: Path, workers: int) -> Crew:
    """Workers of which no process runs."""
    settings = ServeSettings(None, "", "127.0.0.1", 0, "127.0.0.1", 0, grace_s=1.0)
    return Crew(settings, workers, LogSettings("info", "json"), {}, folder, listener=socket.socket)


def pages_of(crew: Crew, access: Access) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(AdminGuard(WorkerPages(crew), access))
    return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1")
