"""`sidecar serve` with engines, before emulated engines that each have a process of their own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.cluster.replicas import CHAT, address, started
from tests.support.ports import free_ports

POLICY = """\
engine: vllm
engines:
  static: [{static}]
  capacity: {{tokens: 20k, requests: {requests}}}
  health: {{path: /health, every: 200ms, fail: 2, rise: 1}}
  drain_timeout: 20s
tiers:
  high: {{}}
  low: {{}}
default_tier: high
anonymous: high
endpoints: {{/v1/chat/completions: {{}}}}
"""


@dataclass
class Engines:
    """Emulated engines, each with a process of its own."""

    process: subprocess.Popen[str]
    port: int
    pids: dict[int, int]

    def kill(self, number: int, sig: signal.Signals) -> None:
        os.kill(self.pids[self.port + number], sig)


@contextmanager
def emulated(folder: Path, count: int, port: int, *more: str) -> Iterator[Engines]:
    """Returns when all answer; with a delay, after that."""
    arguments = ("emulate", "--engine", "vllm", "--replicas", str(count), "--port", str(port), "--kv-tokens", "20000")
    with started(folder / f"engines-{port}", *arguments, *more) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        found = [re.search(r":(\d+), model.* process (\d+)", line) for line in lines]
        assert all(found), lines
        try:
            yield Engines(process, port, {int(match[1]): int(match[2]) for match in found if match})
        finally:
            for match in found:
                if match is not None:
                    _kill(int(match[2]))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@dataclass
class ServedFleet:
    """A sidecar's addresses, and its engines, called `e0`, `e1` and so on."""

    process: subprocess.Popen[str]
    url: str
    admin: str
    engines: Engines

    async def ask(self, client: aiohttp.ClientSession, output: int = 20, text: str = "hello", **headers: str) -> Any:
        """A streamed request. Returns its response, read to its end."""
        body = {"model": "m", "stream": True, "max_tokens": output, "messages": [{"role": "user", "content": text}]}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with client.post(self.url + CHAT, json=body, headers=sent) as response:
            await response.read()
            return response

    async def rows(self, client: aiohttp.ClientSession) -> Mapping[str, Any]:
        """`GET /engines`, by name."""
        async with client.get(f"{self.admin}/engines") as response:
            return {row["name"]: row for row in (await response.json())["engines"]}

    async def in_flight(self, client: aiohttp.ClientSession, count: int) -> None:
        """Waits until so many requests are at the engines."""
        for _ in range(1000):
            if sum(row["in_flight"] for row in (await self.rows(client)).values()) >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(await self.rows(client))

    async def until(self, client: aiohttp.ClientSession, name: str, state: str, within_s: float = 60.0) -> Any:
        """Waits until an engine is in a state. Returns its row."""
        for _ in range(round(within_s / 0.1)):
            row = (await self.rows(client)).get(name)
            if row is not None and row["state"] == state:
                return row
            await asyncio.sleep(0.1)
        raise AssertionError(await self.rows(client))


@contextmanager
def served_fleet(
    folder: Path, count: int = 2, requests: int = 4, *more: str, template: str = POLICY, **environment: str
) -> Iterator[ServedFleet]:
    """A sidecar before so many engines. `more` are arguments of `sidecar emulate`."""
    port = free_ports(count)
    with emulated(folder, count, port, *more) as engines:
        static = ", ".join(f"{{name: e{n}, url: 'http://127.0.0.1:{port + n}'}}" for n in range(count))
        policy, log = folder / "policy.yaml", folder / "sidecar"
        policy.write_text(template.format(static=static, requests=requests))
        arguments = ("serve", "--policy", str(policy), "--port", "0", "--admin-port", "0")
        with started(log, *arguments, **environment) as process:
            url = address(process, log)
            yield ServedFleet(process, url, address(process, log), engines)
