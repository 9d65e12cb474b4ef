"""An app of a user's own under the servers that people run it with, as commands in a folder of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.middleware import write_policy

WITHIN_S = 60.0
"""A server's start takes a second on an idle machine; a busy one takes many."""
APP = """\
import asyncio
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from sidecar import AdmissionMiddleware

app = FastAPI()
app.add_middleware(AdmissionMiddleware, policy="policy.yaml")


@app.post("/v1/chat/completions")
async def chat(body: dict):
    if body.get("stream"):
        return StreamingResponse(pieces(), media_type="text/event-stream")
    await asyncio.sleep(body.get("temperature", 0))
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}


async def pieces():
    for _ in range(300):
        yield 'data: {"choices": []}\\n\\n'
        await asyncio.sleep(0.1)
"""


def write_app(folder: Path, app: str = APP, more: str = "") -> None:
    """Writes `main.py` and its policy."""
    (folder / "main.py").write_text(app)
    write_policy(folder, more=more)


class Command:
    """A command that runs; `said` is everything that it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return "".join(self._lines)

    def until(self, pattern: str, count: int = 1) -> str:
        """Waits until what it has written matches so often."""
        ends_s = time.monotonic() + WITHIN_S
        while len(re.findall(pattern, self.said)) < count:
            assert time.monotonic() < ends_s, f"no {pattern!r} in:\n{self.said}"
            assert self.process.poll() is None, f"it ended without {pattern!r}:\n{self.said}"
            time.sleep(0.05)
        return self.said

    def ended(self) -> str:
        """Waits until it has ended by itself: everything that it has written."""
        self.process.wait(WITHIN_S)
        self._reader.join(WITHIN_S)
        return self.said

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, not to its children."""
        self.process.send_signal(number)

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.append(line)


@contextmanager
def running(folder: Path, *arguments: str, **variables: str) -> Iterator[Command]:
    """Runs `python -m ARGUMENTS` there; at the end of the block it, and all that it started, is killed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR_", "OTEL_", "WEB_"))}
    environment = {**kept, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder), **variables}
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Command(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
