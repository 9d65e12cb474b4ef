"""Server of one emulated engine: its socket, its signals, and what SIGTERM does, which differs by engine.

| engine | new requests | running ones | by default for |
|---|---|---|---|
| vLLM | 500, while `/health` stays 200 | run on, then an error event; without time to run they end under a 200 | 0 s |
| SGLang | served; `/health` is 503 | run on | as long as they take |
| TensorRT-LLM | no connection | run on | as long as they take |
| Dynamo | no connection | run on, then the connection breaks | 5 s |

vLLM 0.32 was watched while it stopped, with --shutdown-timeout and without. SGLang:
`TokenizerManager.sigterm_watchdog`; it looks every five seconds, here at once. TensorRT-LLM: `OpenAIServer.__call__`
leaves signals to uvicorn.
Dynamo: DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS; how it breaks the streams was not read.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Mapping
from types import FrameType

import uvicorn

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator.app import Emulator
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.engine import EmulatedEngine

_BACKLOG = 2048  # uvicorn's own default
DEFAULT_S: Mapping[type[Engine], float | None] = {TensorRtLlm: None, Vllm: 0.0, Sglang: None, Dynamo: 5.0}
"""How long each lets requests run after SIGTERM; None is without an end."""


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


def allowed_s(config: EmulatorConfig) -> float | None:
    """How long this engine lets them run."""
    return DEFAULT_S[config.engine] if config.shutdown_timeout_s is None else config.shutdown_timeout_s


async def drain(engine: EmulatedEngine) -> None:
    """Returns when the server may close: its listening sockets first, then every connection that has no request."""
    engine.is_stopping = True
    if engine.config.engine in (TensorRtLlm, Dynamo):
        return
    limit_s = allowed_s(engine.config)
    if limit_s == 0:
        engine.cut_all()
        return
    try:
        await asyncio.wait_for(engine.idle(), limit_s)
    except asyncio.TimeoutError:
        engine.fail_all()
