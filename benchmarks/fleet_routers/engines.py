"""Emulated engines that are killed and come back, and taps that record what reaches them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.fleet_routers import emulated_engine

READY_WITHIN_S = 60.0
REFUSAL = {"error": {"message": "The request queue is full.", "type": "overloaded", "code": 503}}
HOP = frozenset({"connection", "content-length", "host", "transfer-encoding"})


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, below those that the system gives to clients."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports between 20000 and 32000")


class Engines:
    """Emulated engines of one dialect on fixed ports, a process each, as an asynchronous context."""

    def __init__(self, engine: str, count: int) -> None:
        self._engine = engine
        self._ports = free_ports(count)
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]

    async def __aenter__(self) -> Engines:
        await self.start_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in range(len(self.urls)):
            self.kill(number)

    def kill(self, number: int) -> None:
        """Kill -9, if it runs."""
        process = self._processes[number]
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            self._processes[number] = None

    async def start_all(self) -> None:
        """Starts those that do not run, and returns when all answer."""
        for number in range(len(self.urls)):
            self._start(number)
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(aiohttp.ClientError):
                await self.states()
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the emulated engines did not answer within {READY_WITHIN_S:g} s")

    def _start(self, number: int) -> None:
        if self._processes[number] is None:
            self._processes[number] = subprocess.Popen(
                [sys.executable, "-m", emulated_engine.__name__, self._engine, str(self._ports[number])],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # uvicorn minds the routers' gRPC
            )

    async def states(self) -> Sequence[Mapping[str, Any]]:
        """`/_emulator` of each. Raises ClientError where one does not answer."""
        async with aiohttp.ClientSession() as session:

            async def state(url: str) -> Mapping[str, Any]:
                async with session.get(f"{url}/_emulator") as response:
                    found: Mapping[str, Any] = await response.json()
                    return found

            return await asyncio.gather(*map(state, self.urls))

    async def used(self) -> int:
        """How many have had a request since they were started."""
        return sum(state["most"]["requests"] > 0 for state in await self.states())


@dataclass(frozen=True, slots=True)
class Received:
    """One request with a body, as it reached the engine."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class Tap:
    """A proxy before one engine. `overloaded` makes it answer every POST with 503; `refused` counts those."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.requests: list[Received] = []
        self.overloaded = False
        self.refused = 0
        self.url = ""

    @property
    def generating(self) -> Sequence[Received]:
        """The requests that ask for tokens."""
        return [one for one in self.requests if not one.path.endswith(("/render", "/tokenize"))]

    async def open(self) -> None:
        """Begins to listen."""
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, shutdown_timeout=0.1).start()

    async def close(self) -> None:
        """Ends all connections."""
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if request.method == "POST":
            headers = {name.lower(): value for name, value in request.headers.items()}
            self.requests.append(Received(request.path, headers, json.loads(raw or b"{}")))
            if self.overloaded:
                self.refused += not request.path.endswith(("/render", "/tokenize"))
                return web.json_response(REFUSAL, status=503, headers={"retry-after": "1"})
        sent = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        async with self._session.request(
            request.method, f"{self._engine}{request.path_qs}", data=raw or None, headers=sent
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
