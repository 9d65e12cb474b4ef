"""Commands, and what they talk to, in the test's own process: without the start of a Python for each."""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from pathlib import Path
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

from sidecar.admin.app import admin_app
from sidecar.app import AdmissionMiddleware
from sidecar.cli import emulate, main
from sidecar.composition.serving import new_proxy
from sidecar.policy.compiler import load_files
from sidecar.policy.reload import PolicyFiles
from sidecar.tools.emulator import Emulator
from tests.support.serving import serving

T = TypeVar("T")


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `sidecar ARGUMENTS` printed, and its exit code."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(arguments)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def output(*arguments: object, code: int = 0) -> str:
    """What `sidecar ARGUMENTS` printed on standard output before it ended with `code`."""
    ended = ran(*map(str, arguments))
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def complaint(*arguments: object, code: int = 1) -> str:
    """The same of standard error."""
    ended = ran(*map(str, arguments))
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stderr


@contextmanager
def in_thread(entered: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """The block of `entered` in an event loop of its own, in a thread."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(entered) as value:
        yield value


@contextmanager
def emulated_engine(*arguments: str) -> Iterator[str]:
    """The engine of `sidecar emulate ARGUMENTS`, on a free port where they name none: its address."""
    with in_thread(serving_engine(*arguments)) as url:
        yield url


@asynccontextmanager
async def serving_engine(*arguments: str) -> AsyncIterator[str]:
    """The same in this event loop."""
    parser = argparse.ArgumentParser()
    emulate.configure(parser)
    args = parser.parse_args(["--port", "0", *arguments])
    (config,) = emulate._configs(args)
    async with serving(Emulator(config).app, port=args.port) as served:
        yield served.url


@contextmanager
def served_sidecar(policy: Path, upstream: str | None = None) -> Iterator[tuple[str, str]]:
    """A sidecar: its address for clients, and that of its admin port."""
    with in_thread(serving_sidecar(policy, upstream)) as urls:
        yield urls


@asynccontextmanager
async def serving_sidecar(path: Path, upstream: str | None = None) -> AsyncIterator[tuple[str, str]]:
    """The same in this event loop."""
    policy = load_files(path).policy
    files = PolicyFiles(str(path))
    middleware = AdmissionMiddleware(new_proxy(upstream, policy), policy, files=files, is_shown=True)
    controller = middleware.controller
    pages = admin_app(
        state=controller.state,
        readiness=controller.readiness,
        notices=controller.notices,
        routes=middleware.observability.routes,
    )
    async with serving(middleware) as served, serving(pages, lifespan="off") as admin:
        yield served.url, admin.url


async def start_failure(app: Any) -> str | None:
    """What a server is told whose app does not start; None where it starts. It is ended again."""
    asked: asyncio.Queue[Any] = asyncio.Queue()
    told: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    running = asyncio.ensure_future(app(scope, asked.get, told.put))
    await asked.put({"type": "lifespan.startup"})
    answer = await told.get()
    await asked.put({"type": "lifespan.shutdown"})
    await asyncio.gather(running, return_exceptions=True)  # it raises where it did not start
    return answer["message"] if answer["type"] == "lifespan.startup.failed" else None
