"""A real SGLang on the CPU: served by `sidecar sglang-serve`, and after the proxy."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.doctor.conditions import ConditionState
from sidecar.tools.doctor.examination import Options, examine
from sidecar.tools.doctor.report import report, steps
from tests.real.lab import MODEL, SGLANG_TOKENS, sglang
from tests.support.commands import address, command
from tests.support.redis_servers import free_port
from tests.support.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

POLICY = """\
engine: sglang
capacity: {tokens: 60k, requests: 200}
tiers:
  high: {reserve: 10%}
  normal: {reserve: 10%}
  batch: {reserve: 10%}
default_tier: normal
anonymous: high
sources: [header]
endpoints:
  /v1/chat/completions: {}
  /v1/completions: {}
  /v1/responses: {}
  /v1/messages: {}
  /generate: {api: generic, tokens: 100}
"""
PRIORITIES = {"high": "4", "normal": "2", "batch": "0"}
DEFAULT = "0"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "the queue"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    COMPLETIONS: {"prompt": "the queue", "max_tokens": 4},
    "/v1/responses": {"input": "the queue", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/generate": {"text": "the queue", "sampling_params": {"max_new_tokens": 4}},
}
WITH_FIELD = frozenset(("/v1/chat/completions", COMPLETIONS))
"""Where a proxy can write the priority into the body."""
ABORTED_WITHIN_S = 10.0
"""SGLang looks for a disconnect every 2 to 4 s, and the machine is busy."""


class Site:
    """Where clients ask, and where SGLang says how it is."""

    def __init__(self, url: str, engine_url: str) -> None:
        self.url = url
        self.engine_url = engine_url
        self.is_mounted = url == engine_url

    @asynccontextmanager
    async def post(self, path: str, tier: str, **body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as client,
            client.post(self.url + path, json={"model": MODEL, **body}, headers={"x-priority": tier}) as answer,
        ):
            yield answer

    async def served(self) -> dict[str, float]:
        """The requests that SGLang has served so far, by the priority that it ran them at."""
        async with aiohttp.ClientSession() as client, client.get(f"{self.engine_url}/metrics") as page:
            text = await page.text()
        counts: dict[str, float] = {}
        for priority, count in re.findall(
            r'^sglang:num_requests_total{.*priority="([^"]+)".*} (\S+)$', text, re.MULTILINE
        ):
            counts[priority] = counts.get(priority, 0) + float(count)
        return counts

    async def running(self, count: int, within_s: float = 30.0) -> None:
        """Returns when SGLang runs so many."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            async with aiohttp.ClientSession() as client, client.get(f"{self.engine_url}/v1/loads") as page:
                loads = (await page.json())["loads"]
            if sum(load["num_running_reqs"] for load in loads) == count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"SGLang never ran {count}")


@pytest.fixture(scope="module", params=["mounted", "proxy"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of(request.param, POLICY, tmp_path_factory.mktemp("policy")) as made:
        yield made


@contextmanager
def site_of(how: str, policy: str, folder: Path) -> Iterator[Site]:
    """SGLang with its metrics, by `sidecar sglang-serve` or after `sidecar serve`."""
    path = folder / "policy.yaml"
    path.write_text(policy)
    with ExitStack() as stack:
        is_mounted = how == "mounted"
        engine = stack.enter_context(sglang(policy=path if is_mounted else None, arguments=["--enable-metrics"]))
        if is_mounted:
            yield Site(engine.url, engine.url)
            return
        serve = ("serve", "--upstream", engine.url, "--policy", str(path), "--port", "0", "--admin-port", "0")
        yield Site(address(stack.enter_context(command(*serve))), engine.url)


async def test_every_endpoint_runs_at_the_granted_priority(site: Site) -> None:
    """Mounted, that holds for the schemas, too, that have no priority or drop it; what a client writes never counts."""
    for path, body in BODIES.items():
        for tier, priority in PRIORITIES.items():
            before = await site.served()
            async with site.post(path, tier, **body, **({"priority": 9} if path in WITH_FIELD else {})) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers["x-admission-tier"] == tier
            expected = priority if site.is_mounted or path in WITH_FIELD else DEFAULT
            now = await site.served()
            assert {name for name, count in now.items() if count > before.get(name, 0)} == {expected}, (path, tier)


async def first_token_s(site: Site, path: str, tier: str) -> float:
    body = {**BODIES[path], "max_tokens": 24, "stream": True}
    sent_s = time.monotonic()
    async with site.post(path, tier, **body) as answer:
        assert answer.status == 200
        seen = b""
        while b"delta" not in seen and b'"text"' not in seen:  # messages begin with an event that has no token
            seen += await answer.content.readany()
        first_s = time.monotonic() - sent_s
        await answer.content.read()
    return first_s


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages"])
async def test_the_tier_decides_who_is_first_in_sglangs_own_queue(site: Site, path: str) -> None:
    """The pool takes all of them at once, so the order is SGLang's doing."""
    if not site.is_mounted and path not in WITH_FIELD:
        pytest.skip("a proxy cannot hand a priority over for messages")
    tiers = ("batch", "normal", "high") * 20
    firsts_s = await asyncio.gather(*(first_token_s(site, path, tier) for tier in tiers))
    medians_s = {
        name: statistics.median(first_s for tier, first_s in zip(tiers, firsts_s, strict=True) if tier == name)
        for name in PRIORITIES
    }
    assert medians_s["high"] < medians_s["normal"] < medians_s["batch"]
    assert medians_s["batch"] > 1.5 * medians_s["high"], medians_s


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_in_the_engine(site: Site, stream: bool) -> None:
    body = {"prompt": "the queue", "max_tokens": 3000, "ignore_eos": True, "stream": stream}

    async def ask() -> None:
        async with site.post(COMPLETIONS, "normal", **body) as answer:
            await answer.read()

    asked = asyncio.create_task(ask())
    await site.running(1)
    asked.cancel()
    await site.running(0, within_s=ABORTED_WITHIN_S)


async def test_a_stream_ends_with_its_usage(site: Site) -> None:
    body = {**BODIES[COMPLETIONS], "stream": True, "stream_options": {"include_usage": True}}
    async with site.post(COMPLETIONS, "high", **body) as answer:
        events = (await answer.text()).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


async def test_the_shape_of_an_error_of_completions(site: Site) -> None:
    """The stand-in answers in the same shape."""
    async with site.post(COMPLETIONS, "high", prompt="the queue", temperature="x") as answer:
        assert answer.status == 400
        assert set(await answer.json()) == {"object", "message", "type", "param", "code"}


@pytest.mark.parametrize("how", ["mounted", "proxy"])
async def test_capacity_is_what_the_engine_says(how: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("engine: sglang\ncapacity: {from: engine}\ntiers: {normal: {}}\nanonymous: normal\n")
    expected = {"tokens": SGLANG_TOKENS * 95 // 100, "requests": 4 + 2}
    if how == "mounted":
        port = free_port()
        with sglang(policy=policy, variables={"SIDECAR_ADMIN_PORT": str(port)}):
            async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/state") as page:
                assert (await page.json())["pool"]["capacity"] == expected
        return
    with sglang() as engine:
        sidecar = AdmissionMiddleware(ReverseProxy(engine.url), policy)
        async with serving(sidecar):
            assert sidecar.controller.state()["pool"]["capacity"] == expected


W, B, U = ConditionState.WORKS, ConditionState.BROKEN, ConditionState.UNKNOWN


@pytest.mark.parametrize(
    ("by_priority", "expected", "fix"),
    [(True, (W, W, W, W), None), (False, (W, B, W, U), "--enable-priority-scheduling")],
)
async def test_the_doctor_sees_through_it(
    by_priority: bool, expected: tuple[ConditionState, ...], fix: str | None
) -> None:
    with sglang(by_priority=by_priority, arguments=["--enable-metrics"]) as engine:
        found = await examine(Options(url=engine.url, headers={}), lambda line: None)
    assert tuple(condition.state for condition in found.conditions) == expected, report(found)
    assert fix is None or fix in steps(found)[0]


SEQUENCES, TOKENS = 4, 1500
PREEMPTING = f"""\
engine: sglang
capacity: {{requests: {SEQUENCES}}}
tiers:
  critical: {{preempt_after: 200ms}}
  batch: {{preemptible: true}}
default_tier: batch
anonymous: critical
sources: [header]
"""


@pytest.mark.parametrize("how", ["mounted", "proxy"])
async def test_a_critical_request_gets_the_room_of_a_batch_that_is_served_after_all(how: str, tmp_path: Path) -> None:
    async def ask(site: Site, tier: str, tokens: int) -> tuple[Any, Any]:
        body = {"prompt": f"the queue of {tier}", "max_tokens": tokens, "ignore_eos": True}
        async with site.post(COMPLETIONS, tier, **body) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers, await answer.json()

    with site_of(how, PREEMPTING, tmp_path) as site:
        batch = [asyncio.create_task(ask(site, "batch", TOKENS)) for _ in range(SEQUENCES)]
        await site.running(SEQUENCES)
        headers, answer = await ask(site, "critical", 8)
        assert answer["usage"]["completion_tokens"] == 8
        assert 0.2 <= float(headers["x-admission-wait-ms"]) / 1000 < ABORTED_WITHIN_S
        assert not any(task.done() for task in batch), "it was served before any of them was done"
        answers = await asyncio.gather(*batch)
        assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [TOKENS] * SEQUENCES
        preempted = [headers["x-admission-preempted"] for headers, _ in answers if "x-admission-preempted" in headers]
        assert preempted == ["1"]
        await site.running(0)
