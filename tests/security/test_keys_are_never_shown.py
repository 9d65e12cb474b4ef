"""Marked keys through a real sidecar with everything turned on, and all that the process ever said, searched for
them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import subprocess
from pathlib import Path

import aiohttp
import pytest

from sidecar.policy.compiler import load
from sidecar.policy.problems import PolicyError
from tests.support.commands import address, command
from tests.support.engine import OK, Connection, raw_engine
from tests.support.middleware import CHAT, SMALL, write_policy
from tests.support.otlp import Received, otlp_over_http
from tests.support.wire import connected, get, post

KNOWN, UNKNOWN = "sk-marked-known-5f1c", "sk-marked-unknown-77aa"
ENGINE_KEY, ADMIN_TOKEN = "sk-marked-engine-90de", "marked-admin-token-4242"
MARK = "marked"
DIGEST = hashlib.sha256(KNOWN.encode()).hexdigest()


def odd_places(key: str) -> list[bytes]:
    """Requests that show a key where the sidecar looks for one, and where clients put it by mistake."""
    bearer = f"authorization: Bearer {key}"
    return [
        post(CHAT, SMALL, bearer),
        post(CHAT, SMALL, f"x-api-key: {key}"),
        post(CHAT, SMALL, f"authorization: BEARER\t{key}"),
        post(CHAT, SMALL, f"authorization: Bearer:{key}"),
        post(CHAT, SMALL, f"authorization: Bearer {key} {key}"),
        post(CHAT, SMALL, f"authorization: {key}"),
        post(CHAT, SMALL, f"authorization: Basic {key}", f"x-api-key: Bearer {key}"),
        post(CHAT, SMALL, bearer, bearer),
        post(CHAT, SMALL, f"proxy-authorization: Bearer {key}", f"api-key: {key}", f"cookie: key={key}", bearer),
        post(f"{CHAT}?api_key={key}", SMALL, bearer),
        post(f"/{key}/v1", SMALL, bearer),
        post(CHAT, b"{", bearer),
        post(CHAT, b'{"messages":["hi"],"user":"%s","priority":"gold"}' % key.encode(), bearer),
        post(CHAT, SMALL, bearer, "x-priority: gold"),
        post(CHAT, SMALL, bearer, "x-admission-max-wait: soon"),
        post(CHAT, b"x" * 70_000, bearer),
        post("/v1/messages", b'{"messages":["hi"],"max_tokens":200000}', f"x-api-key: {key}", "anthropic-version: 1"),
        post("/cut", SMALL, bearer),
        post("/not-http", SMALL, bearer),
        get("/v1/models", bearer),
        get("/cut", bearer),
        post(CHAT, SMALL, bearer, f"\x01{key}: 1"),
        post(CHAT, SMALL, bearer, "content-length: 5"),
        f"POST {CHAT} HTTP/9 {key}\r\n{bearer}\r\n\r\n".encode(),
    ]


async def script(connection: Connection) -> None:
    """An engine that answers, breaks off, or speaks no HTTP, as the path wants."""
    while True:
        request = await connection.request()
        if request.target == b"/cut":
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            return
        await connection.send(b"SSH-2.0-OpenSSH\r\n\r\n" if request.target == b"/not-http" else OK)


def policy(folder: Path) -> Path:
    path = write_policy(folder, "unguarded: allow\n", engine="vllm")
    tenant = f'tenant: marked-by-name\nkeys: ["sha256:{DIGEST}"]\ntier: normal\n'.replace("marked-by", "known-by")
    (folder / "tenants" / "marked.yaml").write_text(tenant)
    return path


async def said_by(port: int, request: bytes) -> str:
    async with connected(port) as (reader, writer):
        writer.write(request)
        with contextlib.suppress(ConnectionError):
            return (await asyncio.wait_for(reader.read(), 10)).decode("latin-1")
    return ""


async def pages(url: str) -> dict[str, str]:
    shown = {}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN_TOKEN}"}) as client:
        of_one = ("/requests/the-first", "/request?id=the-first")
        for path in ("/", "/state", "/overview", "/metrics", "/readyz", "/healthz", *of_one):
            async with client.get(url + path) as answer:
                assert answer.status == 200, path
                shown[path] = str(answer.headers) + await answer.text()
        async with client.get(url + "/overview/stream") as answer:
            shown["stream"] = (await answer.content.readuntil(b"\n\n")).decode()
    async with aiohttp.ClientSession() as client, client.get(f"{url}/?token={ADMIN_TOKEN}x") as answer:
        shown["refused"] = str(answer.headers) + await answer.text()
    return shown


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("log_format", ["json", "text"])
async def test_no_key_is_in_anything_that_the_process_says(log_format: str, tmp_path: Path) -> None:
    variables = {
        "SIDECAR_ENGINE_KEY": ENGINE_KEY,
        "SIDECAR_ADMIN_TOKEN": ADMIN_TOKEN,
        "SIDECAR_LOG_FORMAT": log_format,
        "SIDECAR_LOG_LEVEL": "debug",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
    }
    reported: dict[str, str] = {}
    with otlp_over_http() as collector:
        async with raw_engine(script) as engine:
            served = ("serve", "--upstream", engine.url, "--policy", str(policy(tmp_path)), "--port", "0")
            with command(
                *served, "--admin-port", "0", OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **variables
            ) as sidecar:
                url, admin = address(sidecar), address(sidecar)
                port = int(url.rpartition(":")[2])
                first = post(CHAT, SMALL, f"authorization: Bearer {KNOWN}", "x-request-id: the-first")
                reported["the first"] = await said_by(port, first)
                assert reported["the first"].startswith("HTTP/1.1 200")
                for key in (KNOWN, UNKNOWN):
                    for number, request in enumerate(odd_places(key)):
                        reported[f"answer {number}"] = await said_by(port, request)
                reported |= await pages(admin)
                reported |= await asyncio.to_thread(the_rest, sidecar, collector)
            at_the_engine = [
                request.head.decode("latin-1") for request in engine.requests if b"/v1/chat" in request.head
            ]

    # There is something to be found in each: without that, nothing found would mean nothing.
    assert "the-first" in reported["/requests/the-first"]
    assert "the-first" in reported["spans"]
    assert "the-first" in reported["log"]
    assert "known-by-name" in reported["/metrics"] + reported["metrics"]
    assert all(
        word in reported["log"] for word in ("invalid_api_key", "engine_unreachable", "broke off", "unknown_tier")
    )
    for where, text in reported.items():
        assert MARK not in text, (where, text[max(0, text.find(MARK) - 300) :][:600])
        assert DIGEST not in text, where

    # And the engine's key went where it belongs, the tenants' nowhere: but for what no sidecar can know to be a key.
    assert at_the_engine
    assert all(f"Bearer {ENGINE_KEY}" in head for head in at_the_engine)
    known = [head for head in at_the_engine if KNOWN in head]
    places = {line.partition(":")[0] for head in known for line in head.splitlines() if KNOWN in line}
    assert places == {"cookie", f"POST {CHAT}?api_key={KNOWN} HTTP/1.1"}


def the_rest(sidecar: subprocess.Popen[str], collector: Received) -> dict[str, str]:
    """Ends the sidecar: its log, what it printed, and all that was sent to the collector."""
    sidecar.send_signal(signal.SIGTERM)
    out, log = sidecar.communicate(timeout=20)
    assert sidecar.returncode == 0
    if log.startswith("{"):
        assert [json.loads(line) for line in log.splitlines()]
    return {
        "output": out,
        "log": log,
        "spans": "\n".join(str(span) for span in collector.spans),
        "metrics": "\n".join(str(metric) for metric in collector.metrics),
        "exports": str(collector.headers),
    }


def test_a_policy_with_the_key_itself_in_it_is_refused_without_showing_it(tmp_path: Path) -> None:
    path = policy(tmp_path)
    tenant = tmp_path / "tenants" / "marked.yaml"
    for written in (
        f"keys: [{KNOWN}]",
        f"keys: {KNOWN}",
        f"keys: {{{KNOWN}: 1}}",
        f"keys: [sha256:{KNOWN}]",
        f"keys: [{{{KNOWN}: {KNOWN}}}]",
        f"keys:\n  {KNOWN}: 1\n  {KNOWN}: 2",
        f"key: {KNOWN}",
        f"keys: [!!str {KNOWN}]",
        f'keys: ["{KNOWN}',
        f"{KNOWN}",
        f"{KNOWN}: 1",
    ):
        tenant.write_text(f"tenant: t\ntier: normal\n{written}\n")
        with pytest.raises(PolicyError) as refused:
            load(path)
        said = str(refused.value)
        assert str(tenant) in said
        assert MARK not in said.replace(str(tenant), ""), (written, said)
