"""A real tracing backend, Arize Phoenix: started, asked for the spans it stored, and photographed.

It is a program of its own (150 packages, 0.9 GB) and is kept out of our environment: `sh .ci/phoenix` installs it into
`~/.cache/tracing-lab`, and SIDECAR_TRACING_LAB names another folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.photograph import browser

READY_WITHIN_S = 120.0
"""It takes 10 s on an idle machine with two cores."""
PROJECT = "default"
PAGE = 100
WIDTH, HEIGHT = 1760, 880
DRAWER = ".drawer"
"""What has the trace, beside the list of all of them."""
REMEMBERED = {
    "react-resizable-panels:trace-details-layout": '{"trace-tree":36,"span-details":64}',
    "arize-phoenix-theme": "light",
}
"""How the page is laid out: the tree is given room enough to draw each span's time as a bar."""
WIDEN = """
for (let step = 0; step < 30; step++)
    document.querySelector('.drawer__resize-handle').dispatchEvent(
        new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}));
"""
"""Pulls the drawer with the trace as far as it goes, by its own keys."""
SETTLES_S = 1.0


class NotInstalled(RuntimeError):
    """The backend is not on this machine."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A span as Phoenix gives it back. `parent_id` is None for a root; times are Unix seconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_s: float
    end_s: float
    status: str
    attributes: Mapping[str, Any]

    @property
    def length_s(self) -> float:
        """How long its bar is."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Phoenix:
    """A running one. `url` is its page, its API, and where it takes OTLP over HTTP; `grpc_url` over gRPC."""

    url: str
    grpc_url: str

    def spans(self) -> Sequence[Stored]:
        """Everything that it has stored so far."""
        found: list[Stored] = []
        cursor: str | None = ""
        while cursor is not None:
            page = self._get(f"/v1/projects/{PROJECT}/spans?limit={PAGE}" + (f"&cursor={cursor}" if cursor else ""))
            found += map(_stored, page["data"])
            cursor = page["next_cursor"]
        return found

    def settled_spans(self, enough: int, within_s: float = 30.0) -> Sequence[Stored]:
        """The same when at least `enough` are there and no more come. Raises RuntimeError where they do not come."""
        end_s, before = time.monotonic() + within_s, -1
        while time.monotonic() < end_s:
            spans = self.spans() if self._has_project() else ()
            if len(spans) >= enough and len(spans) == before:
                return spans
            before = len(spans)
            time.sleep(1)
        raise RuntimeError(f"Phoenix has {before} spans after {within_s:g} s; {enough} were sent")

    def page_of(self, trace_id: str) -> str:
        """The address of a trace's page."""
        projects = self._get("/v1/projects")["data"]
        (project_id,) = (project["id"] for project in projects if project["name"] == PROJECT)
        return f"{self.url}/projects/{project_id}/traces/{trace_id}"

    def _has_project(self) -> bool:
        return any(project["name"] == PROJECT for project in self._get("/v1/projects")["data"])

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
            return json.load(response)


def program() -> Path:
    """Raises NotInstalled, with the command that changes it."""
    chosen = os.environ.get("SIDECAR_TRACING_LAB")
    folder = Path(chosen) if chosen else Path.home() / ".cache" / "tracing-lab"
    found = folder / "phoenix" / "bin" / "phoenix"
    if not found.exists():
        raise NotInstalled(f"no {found}; `sh .ci/phoenix` installs it")
    return found


@contextlib.contextmanager
def phoenix() -> Iterator[Phoenix]:
    """Starts it with an empty store, and ends it. Raises NotInstalled, or RuntimeError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="phoenix-") as store:
        port, grpc_port = _free_port(), _free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PHOENIX_"))}
        environment |= {
            "PHOENIX_WORKING_DIR": store,
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(port),
            "PHOENIX_GRPC_PORT": str(grpc_port),
            "PHOENIX_TELEMETRY_ENABLED": "false",
        }
        log = Path(store) / "log.txt"
        with log.open("wb") as output:
            process = subprocess.Popen([program(), "serve"], env=environment, stdout=output, stderr=output)
        try:
            _wait_for(f"http://127.0.0.1:{port}/healthz", process, log)
            yield Phoenix(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{grpc_port}")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


async def picture_of(page: str, span: str, shown: str) -> bytes:
    """A trace as its page shows it, with the span called `span` chosen, as PNG.

    It is taken when the text `shown` is there. Raises NoBrowser, or TimeoutError where the page does not come to that.
    """
    row = f"Array.from(document.querySelectorAll('[data-testid=trace-tree] [role=button]')).find({_names(span)})"
    async with browser(WIDTH, HEIGHT) as tab:
        await tab.open(page.split("/projects/", maxsplit=1)[0])  # what the page remembers belongs to its origin
        await tab.until("document.readyState === 'complete' && location.protocol === 'http:'")
        for key, value in REMEMBERED.items():
            await tab.run(f"localStorage.setItem({json.dumps(key)}, {json.dumps(value)})")
        await tab.open(page)
        await tab.until(f"{row} !== undefined")
        await tab.run(WIDEN)
        await tab.run(f"{row}.click()")
        await tab.until(f"document.body.innerText.includes({json.dumps(shown)})")
        await asyncio.sleep(SETTLES_S)
        return await tab.photograph(DRAWER)


def _names(span: str) -> str:
    return f"row => row.innerText.split('\\n')[0].trim() === {json.dumps(span)}"


def _stored(span: Mapping[str, Any]) -> Stored:
    return Stored(
        name=span["name"],
        trace_id=span["context"]["trace_id"],
        span_id=span["context"]["span_id"],
        parent_id=span["parent_id"],
        start_s=datetime.fromisoformat(span["start_time"]).timestamp(),
        end_s=datetime.fromisoformat(span["end_time"]).timestamp(),
        status=span["status_code"],
        attributes=span["attributes"],
    )


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + READY_WITHIN_S
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"Phoenix did not start within {READY_WITHIN_S:g} s:\n{log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
