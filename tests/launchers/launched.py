"""`sidecar trtllm-serve` and `sidecar sglang-serve` as processes, with the stand-ins on their path."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.redis_servers import free_port

STAND_INS = Path(__file__).parents[1] / "stand_ins" / "packages"
READY_WITHIN_S = 60.0  # a second on an idle machine; a busy one takes many
POLICY = """\
engine: {engine}
capacity: {{tokens: 100k, requests: {requests}}}
tiers:
  critical: {{}}
  high: {{}}
  normal: {{}}
  low: {{}}
  batch: {{}}
default_tier: normal
anonymous: critical
sources: [header]
endpoints:
  /v1/chat/completions: {{}}
  /v1/completions: {{}}
  /v1/responses: {{}}
  /v1/messages: {{}}
"""
BODIES: dict[str, Any] = {
    "/v1/chat/completions": lambda prompt: {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3},
    "/v1/completions": lambda prompt: {"prompt": prompt, "max_tokens": 3},
    "/v1/responses": lambda prompt: {"input": prompt, "max_output_tokens": 3},
    "/v1/messages": lambda prompt: {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3},
}
PRIORITIES = {"critical": 1.0, "high": 0.75, "normal": 0.5, "low": 0.25, "batch": 0.0}
"""TensorRT-LLM's, for the tiers of `POLICY`."""


def environment(**more: str) -> dict[str, str]:
    """Nothing of ours or of a stand-in but `more`; the stand-ins' folder is on the path."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR_", "STAND_IN_", "OTEL_"))
    }
    return {**kept, "PYTHONPATH": str(STAND_INS), "PYTHONUNBUFFERED": "1", **more}


def write_policy(folder: Path, engine: str = "tensorrt-llm", requests: int = 100, more: str = "") -> Path:
    """The policy of these tests; anonymous requests may ask for any tier."""
    path = folder / "policy.yaml"
    path.write_text(POLICY.format(engine=engine, requests=requests) + more)
    return path


def ended(*arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a `sidecar` command that must end by itself within a minute."""
    return subprocess.run(
        [sys.executable, "-m", "sidecar.cli", *arguments],
        env=environment(**(variables or {})),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ours(command: str) -> list[str]:
    """The command line of a `sidecar` command that serves the model `m`."""
    return [sys.executable, "-m", "sidecar.cli", command, "m"]


class Launched:
    """A server that answers: where, and what it has written."""

    def __init__(
        self, port: int, process: asyncio.subprocess.Process, log: Path, client: aiohttp.ClientSession
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.client = client
        self._log = log

    @property
    def log(self) -> str:
        """Standard output and error so far."""
        return self._log.read_text()

    async def post(self, path: str, tier: str | None = None, **body: Any) -> tuple[int, Mapping[str, str], str]:
        """One request: status, headers, text."""
        headers = {"x-priority": tier} if tier else {}
        async with self.client.post(f"{self.url}{path}", json={"model": "m", **body}, headers=headers) as answer:
            return answer.status, answer.headers, await answer.text()

    async def get(self, path: str) -> Any:
        """A page's JSON."""
        async with self.client.get(f"{self.url}{path}") as answer:
            return await answer.json()

    async def end(self) -> int:
        """Asks it to end, and waits at most a minute. Its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 60)


@asynccontextmanager
async def launched(
    command: Sequence[str], *arguments: str, variables: Mapping[str, str] | None = None, health: str = "/health"
) -> AsyncIterator[Launched]:
    """Runs it on a free port until the block ends. Fails with its log where it does not answer in time."""
    port = free_port()
    line = [*command, "--host", "127.0.0.1", "--port", str(port), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *line, env=environment(**(variables or {})), stdout=output, stderr=output, start_new_session=True
            )
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
            server = Launched(port, process, log, client)
            try:
                await _answers(server, health)
                yield server
            finally:
                await _killed(server)


async def many_at_once(server: Launched, priorities: Mapping[str, float]) -> dict[str, float]:
    """Every endpoint and tier, responses and messages too, whose schemas have no field; streamed and not; shuffled and
    all at the same time. Returns the priority that each prompt shall have.
    """
    cases = [
        (path, tier, stream, f"{path} {tier} {stream} {index}")
        for path in BODIES
        for tier in priorities
        for stream in (False, True)
        for index in range(4)
    ]
    random.Random(4).shuffle(cases)

    async def ask(path: str, tier: str, stream: bool, prompt: str) -> None:
        status, headers, text = await server.post(path, tier, stream=stream, **BODIES[path](prompt))
        assert (status, headers["x-admission-tier"]) == (200, tier), text
        assert text.endswith("data: [DONE]\n\n") == stream

    await asyncio.gather(*(ask(*case) for case in cases))
    return {prompt: priorities[tier] for _, tier, _, prompt in cases}


async def _answers(server: Launched, health: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + READY_WITHIN_S
    while asyncio.get_running_loop().time() < deadline_s and server.process.returncode is None:
        try:
            async with server.client.get(f"{server.url}{health}") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError(f"it does not answer (exit code {server.process.returncode}):\n{server.log}")


async def _killed(server: Launched) -> None:
    """With every process that it has started: they are one group."""
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    await server.process.wait()
