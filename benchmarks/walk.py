"""Our own files that one streamed chat request passes, and its moves between them.

    python -m benchmarks.walk [--check]

prints the files in the order of the walk, in `sidecar serve` from the client's socket to the engine's and back, and in
a Starlette app that mounts the middleware. A move is a call or a return that goes from one of our files to another,
through whatever lies between. `--check` exits with 1 where a walk is longer than its budget in benchmarks/budgets.json.

It needs no quiet machine: what a timer does meanwhile only adds moves. So the request is repeated until its shortest
walk has come several times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from benchmarks.instructions.budgets import FILE
from benchmarks.instructions.proxied import Engine
from benchmarks.load import post
from benchmarks.overhead import BODY, HEADERS
from benchmarks.overhead_apps import ANSWER, CHUNK
from sidecar import AdmissionMiddleware
from sidecar.composition.serving import ServeSettings, Serving, load_policy
from sidecar.policy.compiler import load, shipped_policies
from sidecar.server.listeners import listening
from sidecar.server.server import End, serve_on, wait_first

OWN = str(Path(__file__).parents[1] / "sidecar") + os.sep
TIMES, MOST = 3, 100
"""So often the shortest walk must have come, among so many walks."""
CHUNKS = 3
ROUNDS_AFTER = 50
"""Of the event loop, after the client has the last byte: the request is settled by then."""
REQUEST = post("/v1/chat/completions", BODY.replace(b"{", b'{"stream": true, ', 1), HEADERS)


@dataclass
class Walk:
    """The files of one request, in the order in which it first came to each, and how often it moved between two."""

    files: list[str] = field(default_factory=list)
    moves: int = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """See `sys.setprofile`."""
        if event not in {"call", "return"} or (here := _own(frame)) is None:
            return
        if here not in self.files:
            self.files.append(here)
        there = frame.f_back
        while there is not None and (name := _own(there)) is None:
            there = there.f_back
        self.moves += there is not None and name != here


def _own(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    return name.removeprefix(OWN) if name.startswith(OWN) else None


@contextmanager
def walking() -> Iterator[Walk]:
    """Follows what runs in this thread. What ran before the block and goes on in it is followed from its next call."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def length(walk: Walk) -> tuple[int, int]:
    """What makes one walk shorter than another."""
    return walk.moves, len(walk.files)


def is_certain(walks: Sequence[Walk]) -> bool:
    """Whether the shortest of these is the request's own."""
    lengths = [length(walk) for walk in walks]
    return len(walks) >= MOST or (bool(walks) and lengths.count(min(lengths)) >= TIMES)


async def shortest(port: int, chunk: Callable[[], None], end: Callable[[], None]) -> Walk:
    """The shortest walk of several streams over one connection. `chunk` has the engine send a chunk, `end` the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    walks: list[Walk] = []
    while not is_certain(walks):
        with walking() as walk:
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            for _ in range(CHUNKS):
                chunk()
                await reader.readuntil(b"\n\n\r\n")
            end()
            await reader.readuntil(b"0\r\n\r\n")
            for _ in range(ROUNDS_AFTER):
                await asyncio.sleep(0)
        if b" 200 " not in head:
            raise RuntimeError(f"the answer was {head!r}")
        walks.append(walk)
    writer.close()
    return min(walks, key=length)


async def served(policy: Path) -> Walk:
    """In `sidecar serve`."""
    engine = Engine(ANSWER, CHUNK)
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        serving = Serving(
            ServeSettings(url, str(policy), "127.0.0.1", 0, "127.0.0.1", 0, 0.0), load_policy(str(policy))
        )
        ready, end = asyncio.Event(), End()
        with listening("127.0.0.1", 0) as clients, listening("127.0.0.1", 0) as admin:
            running = asyncio.ensure_future(
                serve_on(serving.served, clients, admin, end=end, grace_s=0, on_ready=ready.set)
            )
            await wait_first(ready.wait(), running)
            walk = await shortest(clients.getsockname()[1], engine.send_chunk, engine.end_stream)
            end.first.set()
            await running
    return walk


async def mounted(policy: Path) -> Walk:
    """In a Starlette app that streams, behind uvicorn."""
    parts: asyncio.Queue[bytes] = asyncio.Queue()

    async def stream() -> AsyncIterator[bytes]:
        while part := await parts.get():
            yield part

    async def chat(request: Request) -> StreamingResponse:
        await request.json()
        return StreamingResponse(stream(), media_type="text/event-stream")

    app = Starlette(
        routes=[Route("/v1/chat/completions", chat, methods=["POST"])],
        middleware=[Middleware(AdmissionMiddleware, load(policy))],
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, http="httptools"))
    running = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    walk = await shortest(port, lambda: parts.put_nowait(CHUNK), lambda: parts.put_nowait(b""))
    server.should_exit = True
    await running
    return walk


def walks() -> dict[str, Walk]:
    """Both walks, under the shipped policy for an engine that is asked nothing before."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policies"
        shutil.copytree(shipped_policies(), policy)
        shared = policy / "policy.yaml"
        shared.write_text(shared.read_text().replace("engine: tensorrt-llm", "engine: vllm"))
        return {"mounted": asyncio.run(mounted(policy)), "served": asyncio.run(served(policy))}


def exceeded(walk: Walk, budget: Mapping[str, int]) -> bool:
    """Whether a walk is longer than its budget."""
    return len(walk.files) > budget["files"] or walk.moves > budget["moves"]


def main() -> int:
    """Walks, prints, compares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a walk exceeds its budget")
    is_checked = parser.parse_args().check
    budgets, code = json.loads(FILE.read_text())["walk"], 0
    for name, walk in walks().items():
        if not is_checked:
            print(*walk.files, "", sep="\n")
        budget = budgets[name]
        print(f"{name}: {len(walk.files)} files, {walk.moves} moves; budget {budget['files']} and {budget['moves']}")
        if exceeded(walk, budget):
            print(f"BUDGET EXCEEDED: the walk {name}; `python -m benchmarks.walk` prints it", file=sys.stderr)
            code = 1
    return code if is_checked else 0


if __name__ == "__main__":
    sys.exit(main())
