"""Apps that mount the middleware, each in a uvicorn process of its own, on one pool."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp

from tests.cluster.replicas import CHAT
from tests.support.ports import free_ports

POLICY = """\
engine: none
engines:
  mounted: true
  capacity: {{tokens: 100k, requests: {requests}}}
  prefill: {prefill}
  slow_start: 0s
tiers:
  high: {{{high}}}
  low: {{}}
default_tier: low
anonymous: high
sources: [header]
endpoints: {{/v1/chat/completions: {{}}}}
abort_latency: 100ms
{more}
"""


@dataclass
class MountedApp:
    """A process that serves its own engine."""

    process: subprocess.Popen[str]
    url: str
    admin: str
    name: str
    log: Path

    async def ask(
        self, client: aiohttp.ClientSession, steps: int = 20, tier: str = "low", **body: Any
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One streamed request, to its end: status, headers, body."""
        body = {
            "model": "m",
            "stream": True,
            "max_tokens": steps,
            "messages": [{"role": "user", "content": "hi"}],
        } | body
        async with client.post(self.url + CHAT, json=body, headers={"x-priority": tier}) as response:
            return response.status, dict(response.headers), await response.read()

    def begin(self, client: aiohttp.ClientSession, count: int, **more: Any) -> list[asyncio.Task[Any]]:
        """So many of them, at once."""
        return [asyncio.ensure_future(self.ask(client, **more)) for _ in range(count)]

    async def get(self, client: aiohttp.ClientSession, path: str) -> Any:
        """A page of the admin port."""
        async with client.get(self.admin + path) as response:
            return await response.json()

    async def post(self, client: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
        """A command to the admin port."""
        async with client.post(self.admin + path) as response:
            return response.status, await response.json()

    async def counts(self, client: aiohttp.ClientSession) -> Any:
        """What the engine itself counted."""
        async with client.get(self.url + "/counts") as response:
            return await response.json()

    async def rows(self, client: aiohttp.ClientSession) -> Mapping[str, Any]:
        """`GET /engines`, by name."""
        return {row["name"]: row for row in (await self.get(client, "/engines"))["engines"]}

    async def pool(self, client: aiohttp.ClientSession) -> Any:
        """The pool's state."""
        return (await self.get(client, "/state"))["pool"]


async def until(client: Callable[[], Any], is_so: Callable[[Any], bool], within_s: float = 60.0) -> Any:
    """Asks again and again until the answer is as wanted."""
    end_s, found = time.monotonic() + within_s, None
    while time.monotonic() < end_s:
        found = await client()
        if is_so(found):
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(found)


@contextmanager
def mounted_apps(
    folder: Path,
    names: Sequence[str],
    store: str | None = None,
    *,
    requests: int = 4,
    prefill: str = "unbounded",
    high: str = "",
    more: str = "",
    **environment: str,
) -> Iterator[list[MountedApp]]:
    """A process for each name. An empty name is not given to it."""
    policy = folder / "policy.yaml"
    policy.write_text(POLICY.format(requests=requests, prefill=prefill, high=high, more=more))
    with ExitStack() as stack:
        apps = [stack.enter_context(mounted_app(folder, name, policy, store, **environment)) for name in names]
        for app in apps:
            _wait_ready(app)
        yield apps


@contextmanager
def mounted_app(folder: Path, name: str, policy: Path, store: str | None, **environment: str) -> Iterator[MountedApp]:
    """One process, which has just begun."""
    port = free_ports(2)
    said = {"SIDECAR_ENGINE_NAME": name, "SIDECAR_STORE": store or ""}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SIDECAR_", "OTEL_"))}
    ours = {"SIDECAR_POLICY": str(policy), "SIDECAR_ADMIN_PORT": str(port + 1), "SIDECAR_LOG_LEVEL": "info"}
    command = [sys.executable, "-m", "uvicorn", "tests.fleet.mounted_app:app", "--port", str(port)]
    log = folder / f"{name or 'app'}-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=output, stderr=output, text=True,
            env={**inherited, **ours, **{key: value for key, value in said.items() if value}, **environment},
        )  # fmt: skip
    with process:
        try:
            yield MountedApp(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}", name, log)
        finally:
            process.kill()


def _wait_ready(app: MountedApp, within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    said = ""
    while time.monotonic() < end_s:
        assert app.process.poll() is None, app.log.read_text()
        try:
            with urlopen(f"{app.admin}/readyz", timeout=2) as page:
                if json.load(page)["status"] == "ready":
                    urlopen(f"{app.url}/counts", timeout=2).close()  # its own port listens last
                    return
        except OSError as error:
            said = repr(error)
        time.sleep(0.05)
    raise AssertionError(f"{said}\n{app.log.read_text()}")
