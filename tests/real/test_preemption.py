"""Preemption on a real vLLM, mounted and through the proxy: its own server hears it, and its engine lets go."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from tests.real.lab import MODEL, vllm
from tests.support.commands import address, command

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

SEQUENCES, TOKENS = 4, 1500
POLICY = f"""\
engine: vllm
capacity: {{requests: {SEQUENCES}}}
tiers:
  critical: {{preempt_after: 200ms}}
  batch: {{preemptible: true}}
default_tier: batch
anonymous: critical
sources: [header]
"""


class Site:
    """Where clients ask, and where vLLM says how it is."""

    def __init__(self, url: str, engine_url: str) -> None:
        self.url = url
        self.engine_url = engine_url

    async def ask(self, tier: str, tokens: int) -> tuple[int, Any, Any]:
        """Status, headers, JSON of a whole answer of so many tokens."""
        body = {"model": MODEL, "prompt": f"the queue of {tier}", "max_tokens": tokens, "ignore_eos": True}
        timeout = aiohttp.ClientTimeout(total=120)
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.post(f"{self.url}/v1/completions", json=body, headers={"x-priority": tier}) as answer,
        ):
            return answer.status, answer.headers, await answer.json()

    async def running(self, count: int) -> None:
        """Returns when vLLM runs so many."""
        for _ in range(600):
            if await self._running() == count:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"vLLM never ran {count}")

    async def _running(self) -> float:
        async with aiohttp.ClientSession() as client, client.get(f"{self.engine_url}/metrics") as page:
            found = re.findall(r"^vllm:num_requests_running(?:{[^}]*})? (\S+)$", await page.text(), re.MULTILINE)
        return sum(map(float, found))


@pytest.fixture(scope="module", params=["mounted", "proxy"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    policy = tmp_path_factory.mktemp("policy")
    (policy / "policy.yaml").write_text(POLICY)
    variables = {"MAXLEN": "2048", "SIDECAR_POLICY": str(policy)}
    mounted = ["sidecar.AdmissionMiddleware"] if request.param == "mounted" else []
    with ExitStack() as stack:
        running = vllm(sequences=SEQUENCES, scheduling="fcfs", middleware=mounted, variables=variables)
        engine = stack.enter_context(running)
        if mounted:
            yield Site(engine.url, engine.url)
            return
        serve = ("serve", "--upstream", engine.url, "--policy", str(policy), "--port", "0", "--admin-port", "0")
        yield Site(address(stack.enter_context(command(*serve))), engine.url)


async def test_a_critical_request_gets_the_room_of_a_batch_that_is_served_after_all(site: Site) -> None:
    batch = [asyncio.create_task(site.ask("batch", TOKENS)) for _ in range(SEQUENCES)]
    await site.running(SEQUENCES)

    status, headers, answer = await site.ask("critical", 8)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    waited_s = float(headers["x-admission-wait-ms"]) / 1000
    assert 0.2 <= waited_s < 2.0, "preempt_after, and the moment in which vLLM lets go"
    # vLLM has as many slots as the pool: without one of the four being let go it would have waited inside.
    assert not any(task.done() for task in batch), "it was served before any of them was done"

    answers = await asyncio.gather(*batch)
    assert [status for status, _, _ in answers] == [200] * SEQUENCES
    assert [answer["usage"]["completion_tokens"] for _, _, answer in answers] == [TOKENS] * SEQUENCES
    preempted = [headers["x-admission-preempted"] for _, headers, _ in answers if "x-admission-preempted" in headers]
    assert preempted == ["1"]
    await site.running(0)
