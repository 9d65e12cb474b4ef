"""Incidents as the operator on call meets them: what the live page's first sentence, `explain` and the metrics say.

`docs/who-starves.md` sends the operator to exactly these places.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from sidecar.policy.tenant_keys import hash_line
from tests.cluster.replicas import CHAT, address, started

pytestmark = pytest.mark.anyio
POLICY = f"""\
engine: vllm
capacity: {{tokens: 100k, requests: 4}}
tiers:
  high: {{reserve: 25%}}
  normal: {{}}
  batch: {{}}
default_tier: normal
anonymous: deny
endpoints:
  {CHAT}: {{}}
tenants: tenants/*.yaml
"""
KEYS = {tenant: f"sk-{tenant}-of-the-incidents" for tenant in ("flood", "chat", "night")}
TIERS = {"flood": "normal", "chat": "high", "night": "batch"}
WITHIN_S = 60.0
RUNBOOKS = Path(__file__).parents[2] / "docs" / "who-starves.md"


@dataclass
class Site:
    """A sidecar before an engine, and the clients that keep asking."""

    folder: Path
    url: str
    admin_url: str
    engine: subprocess.Popen[str]

    async def headline(self, holds: Callable[[str], bool]) -> str:
        """The page's first sentence, as soon as it is one that `holds`."""
        end_s = time.monotonic() + WITHIN_S
        async with aiohttp.ClientSession() as client:
            while True:
                async with client.get(f"{self.admin_url}/overview") as response:
                    said = str((await response.json())["headline"])
                if holds(said):
                    return said
                assert time.monotonic() < end_s, said
                await asyncio.sleep(0.2)

    async def admitted(self) -> list[int]:
        """Runs the runbook's own two lines, with a second between the looks."""
        _, begins, text = RUNBOOKS.read_text().partition("admitted() {")
        function, looks = f"{begins}{text}".splitlines()[:2]
        script = f"{function}\n{looks}".replace("http://HOST:9464", self.admin_url).replace("sleep 10", "sleep 1")
        process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=asyncio.subprocess.PIPE)
        said, _ = await asyncio.wait_for(process.communicate(), WITHIN_S)
        return [int(float(line)) for line in said.split()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "tenants").mkdir()
    (folder / "policy.yaml").write_text(POLICY)
    for tenant, key in KEYS.items():
        text = f'tenant: {tenant}\nkeys: ["{hash_line(key)}"]\ntier: {TIERS[tenant]}\n'
        (folder / "tenants" / f"{tenant}.yaml").write_text(text)
    emulated = ("emulate", "--engine", "vllm", "--port", "0", "--step-ms", "10", "--max-num-seqs", "8")
    with started(folder / "engine", *emulated) as engine:
        served = ("serve", "--upstream", address(engine, folder / "engine"), "--policy", str(folder))
        with started(folder / "sidecar", *served, "--port", "0", "--admin-port", "0") as sidecar:
            yield Site(folder, address(sidecar, folder / "sidecar"), address(sidecar, folder / "sidecar"), engine)
        engine.send_signal(signal.SIGCONT)


@asynccontextmanager
async def asking(url: str, clients: Sequence[str]) -> AsyncIterator[None]:
    """While the block runs, each client (by its tenant) sends its next request as soon as it has an answer."""
    body = {"model": "m", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}

    async def keeps_asking(number: int, tenant: str) -> None:
        key = {"authorization": f"Bearer {KEYS[tenant]}"}
        for sent in range(10_000):
            headers = {**key, "x-request-id": f"{tenant}-{number}-{sent}"}
            async with client.post(url + CHAT, json=body, headers=headers) as response:
                await response.read()
                await asyncio.sleep(0.1 if response.status == 429 else 0)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        tasks = [asyncio.ensure_future(keeps_asking(number, tenant)) for number, tenant in enumerate(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.long
async def test_an_engine_that_hangs_admits_nothing_while_requests_wait(site: Site) -> None:
    async with asking(site.url, ["flood"] * 12):
        await site.headline(lambda said: "wait" in said and "No request waits" not in said)
        site.engine.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        stopped = await site.admitted()
        site.engine.send_signal(signal.SIGCONT)
        end_s, running = time.monotonic() + WITHIN_S, stopped
        while not running[1] > running[0] > stopped[1]:
            assert time.monotonic() < end_s, "the counter shows nothing"
            running = await site.admitted()
    assert stopped[0] == stopped[1] > 0


@pytest.mark.long
async def test_a_tenant_that_floods_is_named_in_the_first_sentence(site: Site) -> None:
    async with asking(site.url, ["flood"] * 60 + ["chat"] * 2):
        said = await site.headline(lambda said: "are from tenant flood." in said)
        with (site.folder / "tenants" / "flood.yaml").open("a") as file:  # what the runbook says
            file.write("limits: {concurrent_requests: 4}\n")
        await site.headline(lambda said: "tenant flood" not in said)
    assert re.search(r" \d+ of the \d+ waiting requests are from tenant flood\.$", said)


@pytest.mark.long
async def test_a_tier_that_starves_is_named_with_what_overtakes_it(site: Site) -> None:
    async with asking(site.url, ["chat"] * 8 + ["night"] * 3):
        said = await site.headline(lambda said: said.startswith("batch starves"))
    assert re.search(r"high overtook it .* in 5 minutes, because high is more important\.$", said)
