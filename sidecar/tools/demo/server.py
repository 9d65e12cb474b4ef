"""Server process of a demo run: an emulated TensorRT-LLM, alone or with the middleware mounted, or a sidecar before it.

`python -m sidecar.tools.demo.server page|admission|alone|slo|slo-page POLICY [POOL ENGINE]` listens on two free ports
of loopback and prints them: that of the API, and that of the admin pages. There, `GET /demo/log` gives the engine's
record of every request, which the demo joins with its clients' results. `page` is `admission` with the live page; `slo`
and `slo-page` are the same before the engine of the second scene. The process ends when its standard input does.

With POOL and ENGINE it is one of several replicas before the same engine, and runs what `sidecar serve` runs. It takes
the store from `SIDECAR_STORE`, and prints one line that says why where that cannot hold the pool. No argument holds the
store's address: it may contain a password, and every user of the machine can read arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, replace

import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admin.app import admin_app
from sidecar.admin.auth import Access, AdminGuard
from sidecar.app import AdmissionMiddleware
from sidecar.engines import TensorRtLlm
from sidecar.events import StoreState
from sidecar.policy.model import Policy
from sidecar.policy.store import STORE_VARIABLE, store_address
from sidecar.pools import Pool
from sidecar.proxy.proxy import ReverseProxy
from sidecar.server import server
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel

LOG_PATH = "/demo/log"
HOST = "127.0.0.1"
GRACE_S = 0.5
"""When a demo is over no request is under way; when it is broken off no client waits for one."""
STORE_WITHIN_S = 2.0
"""Some attempts to reach the store: where many processes start at once, the first may be too slow."""

# A step of a full batch takes 46 ms, so 156 sequences give about 3,500 tokens a second: 110 requests of this size, and
# little enough work for the emulator that two cores are idle most of the time.
STEP_S = 0.030
STEP_S_PER_SEQUENCE = 0.0001
PREFILL_TOKENS_PER_STEP = 4096
SLO_STEP_S, SLO_STEP_S_PER_SEQUENCE = 0.020, 0.0015
"""Of the second scene: 20 ms a token alone, 60 ms among 26, 210 ms where it is full."""
TOKENS_PER_CHUNK = 4
"""As TensorRT-LLM's `stream_interval`; the first token still travels alone. With a chunk for every token the servers
need most of a core, and on a busy machine the demo measures that machine."""


WAITING_IN_ENGINE = 4
"""Requests of the pool that wait in the engine: about as many as end in one step. Without them a place that becomes
free is empty for a step, until the next request has come: 3% of the engine is idle (`waiting` of `capacity`)."""


def slots(policy: Policy) -> int:
    """The requests that the engine runs at once."""
    return policy.rules.requests - WAITING_IN_ENGINE


def emulated_engine(policy: Policy) -> Emulator:
    """An engine that holds the tokens of the policy's pool, and the requests except those that wait in it."""
    return _emulator(policy, slots(policy), STEP_S, STEP_S_PER_SEQUENCE, TOKENS_PER_CHUNK)


def slo_engine(policy: Policy) -> Emulator:
    """The engine of the second scene."""
    return _emulator(policy, policy.rules.requests, SLO_STEP_S, SLO_STEP_S_PER_SEQUENCE, tokens_per_chunk=1)


def _emulator(
    policy: Policy, sequences: int, step_s: float, step_s_per_sequence: float, tokens_per_chunk: int
) -> Emulator:
    steps = StepModel(
        max_sequences=sequences,
        chunk_tokens=PREFILL_TOKENS_PER_STEP,
        kv_tokens=policy.rules.tokens,
        step_us=step_s * 1e6,
        step_us_per_sequence=step_s_per_sequence * 1e6,
    )
    return Emulator(EmulatorConfig(engine=TensorRtLlm, tokens_per_chunk=tokens_per_chunk, steps=steps))


def with_log(emulator: Emulator, app: ASGIApp) -> ASGIApp:
    """Adds the engine's record to an app."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != LOG_PATH:
            await app(scope, receive, send)
            return
        body = msgspec.json.encode([asdict(served) for served in emulator.engine.log])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return logged


def end_with_parent() -> None:
    """Ends this process with the demo that started it, also where the demo had no time to: its pipe is our input."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def admin_pages(middleware: AdmissionMiddleware, *, has_page: bool) -> ASGIApp:
    """The admin port's app, with the live page or without. Only this machine reaches it, so it needs no token."""
    controller = middleware.controller
    routes = middleware.observability.routes if has_page else ()
    pages = admin_app(state=controller.state, readiness=controller.readiness, notices=controller.notices, routes=routes)
    return AdminGuard(pages, Access())


async def serve(app: ASGIApp, admin: ASGIApp, middleware: AdmissionMiddleware | None) -> None:
    """Serves both on free ports until it is terminated. Prints the ports, that of `app` first."""
    controller = None if middleware is None else middleware.controller
    served = server.Served(app, admin)
    if controller is not None:
        served = replace(served, drain=controller.drain, drained=controller.drained)
    await server.serve(served, address=(HOST, 0), admin=(HOST, 0), grace_s=GRACE_S, announce=_say_port)


def _say_port(line: str) -> None:
    say(line.rpartition(":")[2])


def say(line: str) -> None:
    """A line for the demo, which reads it at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _serve_replica(middleware: AdmissionMiddleware, admin: ASGIApp) -> None:
    if reason := await _why_not_shared(middleware.controller.pool):
        say(f"the store {store_address(os.environ[STORE_VARIABLE])} cannot be used: {reason}")
        await middleware.controller.pool.close()
        return
    await serve(middleware, admin, middleware)


async def _why_not_shared(pool: Pool) -> str | None:
    """Connects. None when the store has answered, otherwise what it is that does not work, in one line."""
    logging.disable(logging.WARNING)  # every replica would say it; the demo does so once
    deadline_s = time.monotonic() + STORE_WITHIN_S
    await pool.open()
    while pool.status.state is not StoreState.SHARED:
        if time.monotonic() > deadline_s:
            return pool.status.reason
        await asyncio.sleep(0.1)
    logging.disable(logging.NOTSET)
    return None


def main(kind: str, policy_path: str, pool: str = "demo", engine: str | None = None) -> None:
    """Serves until it is terminated."""
    from sidecar.policy.compiler import load

    end_with_parent()
    has_page, policy = kind.endswith("page"), load(policy_path)
    if engine is not None:
        shared = replace(policy, pool=pool, usage_days=0)  # the store keeps nothing of the demo
        middleware = AdmissionMiddleware(ReverseProxy(engine), shared, is_shown=has_page)
        server.run(_serve_replica(middleware, admin_pages(middleware, has_page=has_page)))
        return
    policy = replace(policy, store=None, pool=pool)  # a pool in a store is none for a demo to play with
    emulator = slo_engine(policy) if kind.startswith("slo") else emulated_engine(policy)
    if kind == "alone":
        server.run(serve(emulator.app, with_log(emulator, Starlette()), None))
        return
    middleware = AdmissionMiddleware(emulator.app, policy, is_shown=has_page, retry_handlers=True)
    server.run(serve(middleware, with_log(emulator, admin_pages(middleware, has_page=has_page)), middleware))


if __name__ == "__main__":
    main(*sys.argv[1:5])
