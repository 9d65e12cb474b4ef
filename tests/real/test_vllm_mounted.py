"""`vllm serve --middleware sidecar.AdmissionMiddleware`, with everything from the environment, on a real vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.real.lab import MODEL, READY_WITHIN_S, ROOT, Engine, installed_in, script, skip_without, vllm, vllm_process
from tests.server.hosts import line_of
from tests.support.ports import free_ports
from tests.support.redis_servers import RedisServer, first_binary, free_port

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

_, MIDDLEWARE = line_of("vLLM").split(" --middleware ")
ENGINE_KEY, TENANT_KEY = "sk-engine", "sk-tenant"
POLICY = """\
engine: vllm
capacity: {{tokens: {tokens}, requests: {requests}}}
tiers:
  high: {{reserve: 10%}}
  normal: {{reserve: 10%}}
  batch: {{reserve: 10%}}
default_tier: normal
anonymous: batch
sources: [header, body]
tenants: tenants/*.yaml
"""
TENANT = (
    f'tenant: known\nkeys: ["sha256:{hashlib.sha256(TENANT_KEY.encode()).hexdigest()}"]\ntier: normal\nmax_tier: high\n'
)
COMPLETIONS = "/v1/completions"
KEY = {"authorization": f"Bearer {TENANT_KEY}"}


def write_policy(folder: Path, *, tokens: str = "60k", requests: int = 200) -> str:
    (folder / "tenants").mkdir(exist_ok=True)
    (folder / "tenants" / "known.yaml").write_text(TENANT)
    (folder / "policy.yaml").write_text(POLICY.format(tokens=tokens, requests=requests))
    return str(folder)


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[Engine]:
    """With vLLM's own key, four sequences, and a pool much larger than that: vLLM has a queue to order."""
    variables = {
        "SIDECAR_POLICY": write_policy(tmp_path_factory.mktemp("policy")),
        "SIDECAR_ADMIN_PORT": str(admin_port),
        "SIDECAR_ENGINE_KEY": ENGINE_KEY,
        "OTEL_TRACES_EXPORTER": "console",
    }
    names = ("tests.real.seen.Seen", MIDDLEWARE)
    with vllm(middleware=names, arguments=["--api-key", ENGINE_KEY], variables=variables) as running:
        yield running


async def ask(url: str, headers: dict[str, str], path: str = COMPLETIONS, **body: Any) -> tuple[int, Any, Any]:
    """Status, headers, JSON."""
    whole = {"model": MODEL, "max_tokens": 4, **({"prompt": "the queue"} if path == COMPLETIONS else {}), **body}
    async with aiohttp.ClientSession() as client, client.post(url + path, json=whole, headers=headers) as answer:
        return answer.status, answer.headers, await answer.json()


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as page:
        lines = re.findall(rf"^{re.escape(name)}[^ ]* (\S+)$", await page.text(), re.MULTILINE)
    return sum(map(float, lines))


async def test_every_endpoint_is_admitted_and_vllm_gets_the_priority(engine: Engine) -> None:
    messages = [{"role": "user", "content": "the queue"}]
    bodies: dict[str, Any] = {
        COMPLETIONS: {},
        "/v1/chat/completions": {"messages": messages},
        "/v1/responses": {"input": "the queue"},
        "/v1/messages": {"messages": messages},
    }
    for path, body in bodies.items():
        for tier, reported in (("high", "0"), ("normal", "10"), ("batch", "20")):
            status, headers, answer = await ask(
                engine.url, {**KEY, "x-priority": tier, "x-vllm-priority": "-9"}, path, **body
            )
            assert status == 200, answer
            assert headers["x-admission-tier"] == tier
            assert headers["x-seen-priority"] == reported, "and not what the client wrote"
            assert headers["x-admission-ignored"] == "x-vllm-priority"


async def test_the_sidecar_stands_before_vllms_own_key_and_shows_it_for_its_tenants(engine: Engine) -> None:
    status, headers, _ = await ask(engine.url, {})
    assert (status, headers["x-admission-tier"]) == (200, "batch"), "the policy lets them in who have no key"
    for stranger in ("sk-other", ENGINE_KEY):
        status, headers, answer = await ask(engine.url, {"authorization": f"Bearer {stranger}"})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), "the sidecar's refusal"
        assert "x-seen-priority" not in headers


async def test_what_is_not_guarded_and_the_admin_pages(engine: Engine, admin_port: int) -> None:
    async with aiohttp.ClientSession() as client:
        for key, status in ((ENGINE_KEY, 200), (TENANT_KEY, 401)):
            shown = {"authorization": f"Bearer {key}"}
            async with client.get(f"{engine.url}/v1/models", headers=shown) as models:
                assert (models.status, models.headers.get("x-admission-tier")) == (status, None)
        async with client.get(f"http://127.0.0.1:{admin_port}/readyz") as ready:
            assert await ready.json() == {"status": "ready", "reasons": [], "notices": []}
        async with client.get(f"http://127.0.0.1:{admin_port}/state") as state:
            assert (await state.json())["policy"]["engine"] == "vllm"
    assert f"sidecar: admin on http://127.0.0.1:{admin_port}" in engine.log


async def first_token_s(client: aiohttp.ClientSession, url: str, tier: str) -> float:
    body = {"model": MODEL, "prompt": "the queue", "max_tokens": 24, "ignore_eos": True, "stream": True}
    sent_s = time.monotonic()
    async with client.post(url + COMPLETIONS, json=body, headers={**KEY, "x-priority": tier}) as answer:
        assert answer.status == 200
        begun = await answer.content.readany()  # of a busy engine perhaps all
        first_s = time.monotonic() - sent_s
        assert (begun + await answer.content.read()).endswith(b"data: [DONE]\n\n")
    return first_s


async def test_the_tier_decides_who_is_first_in_vllms_own_queue(engine: Engine) -> None:
    """The pool takes all of them at once, so the order is vLLM's doing, by the header that it was sent."""
    tiers = ("batch", "normal", "high") * 20
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        firsts_s = await asyncio.gather(*(first_token_s(client, engine.url, tier) for tier in tiers))
    medians_s = {
        name: statistics.median(first_s for tier, first_s in zip(tiers, firsts_s, strict=True) if tier == name)
        for name in ("high", "normal", "batch")
    }
    assert medians_s["high"] < medians_s["normal"] < medians_s["batch"]
    assert medians_s["batch"] > 2 * medians_s["high"], medians_s


async def test_a_client_that_leaves_is_aborted_in_the_engine(engine: Engine, admin_port: int) -> None:
    before = await metric(engine.url, "vllm:generation_tokens_total")
    body = {"model": MODEL, "prompt": "the queue", "max_tokens": 480, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(headers=KEY) as client:
        async with client.post(engine.url + COMPLETIONS, json=body) as answer:
            await _until_running(engine.url, 1)
            answer.close()
        await _until_running(engine.url, 0)
        assert await metric(engine.url, "vllm:generation_tokens_total") - before < 400
        async with client.get(f"http://127.0.0.1:{admin_port}/state") as state:
            assert (await state.json())["pool"]["leases"] == 0


async def _until_running(url: str, count: int) -> None:
    deadline_s = time.monotonic() + 5
    while await metric(url, "vllm:num_requests_running") != count:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


async def test_it_ends_in_order_and_sends_its_spans(engine: Engine) -> None:
    """The last test of this engine."""
    assert engine.end() == 0
    assert '"name": "admission"' in engine.log
    assert "/sidecar/" not in engine.log, "no traceback through our code; vLLM has some of its own when it ends"


@pytest.mark.parametrize(
    ("policy", "said"),
    [("", "set SIDECAR_POLICY to a policy file"), ("engine: vlm\n", 'policy.yaml:1: engine: "vlm" is no engine')],
)
def test_without_a_good_policy_vllm_does_not_start_and_says_why(tmp_path: Path, policy: str, said: str) -> None:
    (tmp_path / "policy.yaml").write_text(policy)
    variables = {"SIDECAR_POLICY": str(tmp_path)} if policy else {}
    with vllm_process(middleware=[MIDDLEWARE], variables=variables) as engine:
        assert engine.process.wait(READY_WITHIN_S) != 0
        lines = [line for line in engine.log.splitlines() if line.startswith("ERROR:")]
    assert said in lines[0]
    assert "Application startup failed" in lines[-1]


def test_two_api_servers_without_a_store_do_not_start(tmp_path: Path) -> None:
    variables = {"SIDECAR_POLICY": write_policy(tmp_path)}
    with vllm_process(middleware=[MIDDLEWARE], arguments=["--api-server-count", "2"], variables=variables) as engine:
        assert engine.process.wait(READY_WITHIN_S) != 0
        assert "ERROR:    2 server processes share this engine" in engine.log


async def test_two_api_servers_share_a_pool_in_the_store(tmp_path: Path) -> None:
    """Three requests at once over both: with a pool each it would be up to four, as many as the engine takes."""
    skip_without("hiredis", "vllm", "redis hiredis")
    admin = free_ports(2)
    arguments = ["--api-server-count", "2"]
    with RedisServer(first_binary(), tmp_path) as store:
        variables = {
            "SIDECAR_POLICY": write_policy(tmp_path, requests=3),
            "SIDECAR_STORE": store.url,
            "SIDECAR_ADMIN_PORT": str(admin),
        }
        with vllm(middleware=[MIDDLEWARE], arguments=arguments, variables=variables) as engine:
            most = await _most_at_once(engine.url)
            async with aiohttp.ClientSession() as client:
                stores = []
                for port in (admin, admin + 1):
                    async with client.get(f"http://127.0.0.1:{port}/state") as page:
                        stores.append((await page.json())["pool"]["store"])
    assert most == 3
    assert [store["replicas"] for store in stores] == [2, 2]
    assert len({store["replica"] for store in stores}) == 2


async def _most_at_once(url: str) -> int:
    """Of 40 requests, how many the engine has at the same time, by its own metrics."""
    asked = [
        asyncio.ensure_future(ask(url, {"x-priority": "normal"}, max_tokens=40, ignore_eos=True)) for _ in range(40)
    ]
    most = 0.0
    while not all(each.done() for each in asked):
        most = max(
            most, await metric(url, "vllm:num_requests_running") + await metric(url, "vllm:num_requests_waiting")
        )
        await asyncio.sleep(0.01)
    assert {each.result()[0] for each in asked} == {200}
    return int(most)


def test_installing_it_beside_vllm_changes_no_other_package(tmp_path: Path) -> None:
    script("run_vllm.sh", "vllm")
    python = str(installed_in() / "vllm" / "bin" / "python")
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, timeout=60, check=True
    )
    there = {package["name"].lower() for package in json.loads(listed.stdout)}
    report = tmp_path / "report.json"
    asked = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if asked.returncode:
        pytest.skip(f"pip could not resolve it: {asked.stderr.strip().splitlines()[-1]}")
    would = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert would & there <= {"admission-sidecar"}
