"""Server of one emulated engine: its socket, its signals, and its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from sidecar.tools.emulator.app import Emulator
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.engine import EmulatedEngine
from sidecar.tools.emulator.shutdown import allowed_s, drain

_BACKLOG = 2048  # uvicorn's own default


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its port and refuses connections until it listens. Raises OSError.

    It names its protocol: asyncio turns Nagle's algorithm off for no other.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    config: EmulatorConfig, listener: socket.socket, answers: Callable[[], object], startup_delay_s: float = 0.0
) -> None:
    """Serves until SIGTERM or Ctrl-C. Calls `answers` once it does.

    During the delay connections are refused, as while a real engine loads its model: they bind their port early, and
    listen late (vLLM: `create_server_socket` before the engine; TensorRT-LLM: `launch_server`).
    """
    with listener:
        time.sleep(startup_delay_s)
        listener.listen(_BACKLOG)
        answers()
        EngineServer(Emulator(config)).run(sockets=[listener])


class EngineServer(uvicorn.Server):
    """Uvicorn, with the engine's own way to stop on SIGTERM. Ctrl-C ends everything at once, whatever runs."""

    def __init__(self, emulator: Emulator) -> None:
        limit_s = allowed_s(emulator.config)
        super().__init__(
            uvicorn.Config(
                emulator.app,
                ws="none",  # else uvicorn loads a library for them, where one is installed
                access_log=False,
                log_level="warning",
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=None if limit_s is None else max(1, round(limit_s)),
            )
        )
        self._engine: EmulatedEngine = emulator.engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn inside its loop."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal's handler, between any two instructions."""
        del frame
        if self._loop is None:
            self.should_exit = True
        elif sig == signal.SIGTERM:
            self._loop.call_soon_threadsafe(self._drain)
        else:
            self._loop.call_soon_threadsafe(self._end)

    def _drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(drain(self._engine))
            self._draining.add_done_callback(lambda _: setattr(self, "should_exit", True))

    def _end(self) -> None:
        self._engine.is_stopping = True
        self._engine.cut_all()
        self.force_exit = self.should_exit  # the second time
        self.should_exit = True
