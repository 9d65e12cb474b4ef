"""docs/tutorial-fastapi.md as it is written: each host's line, the order of middlewares, the tests of one's own app."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sidecar import AdmissionMiddleware
from sidecar.cli import main
from tests.launchers.launched import launched
from tests.server.hosts import BODY, CHAT, HOSTS, PAGE, line_of
from tests.support.markdown import section, table
from tests.support.ports import free_ports
from tests.support.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.long]
EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHED = {"TensorRT-LLM": "STAND_IN_TRTLLM", "SGLang": "STAND_IN_SGLANG_LOG"}
ELSEWHERE = {"vLLM", "Ray Serve"}
"""Their lines are run where they are installed: `sh .ci/test --engine`, `sh .ci/test --ray`."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SIDECAR_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def written_policy(engine: str = "none", mode: str = "enforce") -> str:
    """A policy as `init --mounted` writes it, in the folder that the page names; a tenant's key."""
    assert main(["init", "--mounted", "--requests", "8", "--engine", engine, "--keys-to", "."]) == 0
    path = Path("policies/policy.yaml")
    generic = re.search(r"`(/mcp: .*?)`", section(PAGE, "The line for each host"))
    text = path.read_text().replace("mode: observe", f"mode: {mode}")
    path.write_text(text.replace("endpoints:\n", f"endpoints:\n  {generic[1]}\n"))
    return Path("chat.key").read_text().strip()


@pytest.fixture
def spans(no_providers: None) -> Iterator[InMemorySpanExporter]:
    """What the host's own tracing exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


def bearer(key: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_host_of_the_table_is_run() -> None:
    assert {name for row in table(PAGE, "The line for each host") for name in row[0].split(", ")} == {
        *HOSTS,
        *LAUNCHED,
        *ELSEWHERE,
    }


@pytest.mark.parametrize("name", HOSTS)
async def test_a_framework_with_the_pages_line(
    name: str, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port, key = HOSTS[name], free_ports(1), written_policy()
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
    app = host.app(line_of(name))
    async with (
        serving(app, lifespan="auto") as served,
        aiohttp.ClientSession(headers={"accept": host.accept}) as client,
    ):
        async with client.post(served.url + host.path, json=host.body) as refused:
            assert (refused.status, "invalid_api_key" in await refused.text()) == (401, True)
        async with client.post(served.url + host.path, json=host.body, headers=bearer(key)) as answer:
            assert (answer.status, answer.headers["x-admission-tier"]) == (200, "high"), await answer.text()
            assert '"result"' in await answer.text() if name == "FastMCP" else (await answer.json()) == {"model": "m"}
        async with client.get(f"http://127.0.0.1:{port}/metrics") as page:
            assert "admission_admitted_total{" in await page.text()
    assert {"admission", "engine"} <= {span.name for span in spans.get_finished_spans()}


async def test_a_script_name_of_djangos_own_is_a_prefix() -> None:
    key, app = written_policy(), HOSTS["Django"].app(line_of("Django"))
    from django.test import override_settings

    with override_settings(FORCE_SCRIPT_NAME="/own"):
        async with serving(app) as served, aiohttp.ClientSession() as client:
            for headers, status in (({}, 401), (bearer(key), 200)):
                async with client.post(f"{served.url}/own{CHAT}", json=BODY, headers=headers) as answer:
                    assert answer.status == status, await answer.text()


@pytest.mark.parametrize("name", LAUNCHED)
async def test_a_launcher_with_the_pages_line(name: str, tmp_path: Path) -> None:
    command, *words = shlex.split(line_of(name).replace("MODEL", "m"))
    key = written_policy("tensorrt-llm" if name == "TensorRT-LLM" else "sglang")
    variables = {LAUNCHED[name]: "main" if name == "TensorRT-LLM" else str(tmp_path / "log")}
    async with launched([sys.executable, "-m", f"{command}.cli", *words], variables=variables) as server:
        for headers, status in (({}, 401), (bearer(key), 200)):
            async with server.client.post(server.url + CHAT, json=BODY, headers=headers) as answer:
                assert answer.status == status, await answer.text()


async def test_the_order_of_middlewares_on_the_page(spans: InMemorySpanExporter) -> None:
    """A refusal and a compressed answer reach a page of another origin, a preflight needs no key, and usage is read."""
    key = written_policy()
    (lines,) = python_of("Other middlewares")
    app = answering()
    run(lines, app=app, PAGES=["https://chat.example"])
    asking = {"origin": "https://chat.example", "accept-encoding": "gzip"}
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with serving(app) as served, aiohttp.ClientSession(headers=asking) as client:
        async with client.options(served.url + CHAT, headers=preflight) as answer:
            assert answer.status == 200
        for headers, status in (({}, 401), (bearer(key), 200)):
            async with client.post(served.url + CHAT, json=BODY, headers=headers) as answer:
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, asking["origin"])
                assert "x-request-id" in answer.headers
                assert answer.headers.get("content-encoding") == ("gzip" if status == 200 else None)
    assert output_tokens(spans) == 777


@pytest.mark.parametrize(("mode", "coding", "read"), [("enforce", None, 777), ("observe", "gzip", None)])
async def test_gzip_inside_of_admission(
    mode: str, coding: str | None, read: int | None, spans: InMemorySpanExporter
) -> None:
    key = written_policy(mode=mode)
    app = answering()
    app.add_middleware(GZipMiddleware)
    app.add_middleware(AdmissionMiddleware, policy="policies/")
    asking = {"accept-encoding": "gzip", **bearer(key)}
    async with (
        serving(app) as served,
        aiohttp.ClientSession(headers=asking) as client,
        client.post(served.url + CHAT, json=BODY) as answer,
    ):
        assert (await answer.json())["usage"]["completion_tokens"] == 777
        assert answer.headers.get("content-encoding") == coding
    assert output_tokens(spans) == read


async def test_a_mounted_sub_app_is_guarded_from_inside_and_from_outside() -> None:
    key = written_policy()
    inside, at_v1, outside = Starlette(), Starlette(), Starlette()
    inside.mount("/llm", AdmissionMiddleware(answering(), policy="policies/"))
    at_v1.mount("/v1", AdmissionMiddleware(answering("/chat/completions"), policy="policies/"))
    outside.mount("/v1", answering("/chat/completions"))
    outside.add_middleware(AdmissionMiddleware, policy="policies/")
    for app, path in ((inside, f"/llm{CHAT}"), (at_v1, CHAT), (outside, CHAT)):
        async with serving(app) as served, aiohttp.ClientSession() as client:
            for headers, status in (({}, 401), (bearer(key), 200)):
                async with client.post(served.url + path, json=BODY, headers=headers) as answer:
                    assert (answer.status, "x-admission-tier" in answer.headers) == (status, status == 200)


def test_the_tests_on_the_page_pass() -> None:
    client = pytest.importorskip(
        "starlette.testclient", reason="an older Starlette's client needs httpx", exc_type=RuntimeError
    )
    key = written_policy()
    (tests,) = python_of("Tests of your app")
    app = answering()
    app.add_middleware(AdmissionMiddleware, policy="policies/")
    names = run(tests, app=app, BODY=BODY, KEY=key, TestClient=client.TestClient, httpx=httpx2)
    names["test_a_key_is_needed"]()
    asyncio.run(names["test_the_tier_is_granted"]())


def python_of(heading: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", section(PAGE, heading), re.DOTALL)


def run(code: str, **names: Any) -> dict[str, Any]:
    """Runs code of the page; what it has defined."""
    classes = {"AdmissionMiddleware": AdmissionMiddleware, "GZipMiddleware": GZipMiddleware}
    defined = {**classes, "CORSMiddleware": CORSMiddleware, **names}
    exec(code, defined)
    return defined


def answering(path: str = CHAT) -> Starlette:
    """An app whose answer is long enough to be compressed, and says its usage."""

    async def chat(request: Request) -> JSONResponse:
        await request.body()
        usage = {"prompt_tokens": 3, "completion_tokens": 777, "total_tokens": 780}
        return JSONResponse({"choices": [], "text": "word " * 1000, "usage": usage})

    return Starlette(routes=[Route(path, chat, methods=["POST"])])


def output_tokens(spans: InMemorySpanExporter) -> object:
    """Those that the request's trace has."""
    found = [span.attributes or {} for span in spans.get_finished_spans()]
    return next((one["gen_ai.usage.output_tokens"] for one in found if "gen_ai.usage.output_tokens" in one), None)


def test_the_line_of_ray_serve_is_that_of_its_example() -> None:
    assert f"\n    {line_of('Ray Serve')}\n" in (EXAMPLES / "ray_serve" / "app.py").read_text()
