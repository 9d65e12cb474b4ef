"""The supervisor of `sidecar serve --workers N`: it holds the ports, the store where it is its own, and the workers."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from sidecar.admin.auth import Access, AdminGuard
from sidecar.composition.serving import ServeSettings, new_proxy, upstreams
from sidecar.composition.stores import (
    TAKE_OVER_VARIABLE,
    find_store,
    new_records,
    refuse_uncounted_budgets,
    takes_over_a_store,
)
from sidecar.policy.model import Policy
from sidecar.policy.store import STORE_VARIABLE
from sidecar.server import CannotServe
from sidecar.server.certificate import new_certificate
from sidecar.server.listeners import listening, sharing, socket_address
from sidecar.server.server import Signals, refuse_own_addresses, serving_pages, wait_first
from sidecar.server.unix_address import MOST_BYTES, socket_path
from sidecar.telemetry.logs.setup import LogSettings
from sidecar.workers.crew import Crew
from sidecar.workers.own_store import OwnStore
from sidecar.workers.pages import WorkerPages

_LONGEST_NAME = "worker-64.sock"


def _check_system(workers: int) -> None:
    """Raises CannotServe where the system cannot have several processes serve one port."""
    # Elsewhere the option is missing, or one of the processes gets all connections.
    if not sys.platform.startswith("linux") or not hasattr(socket, "SO_REUSEPORT"):
        raise CannotServe(
            f"--workers {workers} needs Linux, which divides the connections to one port among processes "
            "(SO_REUSEPORT); leave it out, or run replicas on ports of their own (docs/many-replicas.md)"
        )


async def supervise(
    settings: ServeSettings,
    policy: Policy,
    workers: int,
    *,
    access: Access,
    log: LogSettings,
    announce: Callable[[str], None],
) -> None:
    """Serves by so many `workers` until SIGTERM or SIGINT. `access` is that of the admin port.

    Raises CannotServe where that cannot begin or go on, and ValueError for settings that cannot be.
    """
    _check_system(workers)
    has_store = find_store(policy, os.environ) is not None
    settings = _checked(settings, policy)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_private_folder())
        clients, listener = stack.enter_context(_reserved(settings.host, settings.port))
        admin = stack.enter_context(listening(settings.admin_host, settings.admin_port))
        refuse_own_addresses(upstreams(settings.upstream, policy), (clients, admin))
        environment = dict(os.environ)
        environment.pop(TAKE_OVER_VARIABLE, None)
        crew = Crew(settings, workers, log, environment, folder, listener=listener)
        stack.push_async_callback(crew.close)
        signals = Signals(crew.reload)
        stack.enter_context(signals.caught())
        kept: list[asyncio.Task[None]] = []
        if not has_store and not policy.is_bare:
            store = OwnStore(folder)
            environment[STORE_VARIABLE] = store.url
            kept.append(await stack.enter_async_context(store.running()))
        async with serving_pages(AdminGuard(WorkerPages(crew), access), admin):
            try:
                kept += crew.start()
                await wait_first(*kept, crew.all_serving.wait(), signals.first.wait())
                if crew.all_serving.is_set():
                    announce(f"sidecar: proxy on {socket_address(clients, has_tls=settings.tls_cert is not None)}")
                    announce(f"sidecar: admin on {socket_address(admin)}")
                    kept_in = "the store" if has_store else "a Valkey of their own"
                    do = "pass every request" if policy.is_bare else f"share one pool in {kept_in}"
                    announce(f"sidecar: {workers} workers {do}")
                await wait_first(*kept, signals.first.wait())
            finally:
                await crew.end(settings.grace_s, signals.second)


def _checked(settings: ServeSettings, policy: Policy) -> ServeSettings:
    """The settings, with what the environment says. Raises ValueError for those that no worker could begin with."""
    new_proxy(settings.upstream, policy)
    new_certificate(settings.tls_cert, settings.tls_key)
    new_records(policy, os.environ)
    refuse_uncounted_budgets(policy, os.environ)
    store = find_store(policy, os.environ)
    takes_over = takes_over_a_store(os.environ, store, takes_over=settings.takes_over_pool)
    return msgspec.structs.replace(settings, takes_over_pool=takes_over)


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for sockets, that only this user can enter, while the block runs. Raises CannotServe.

    Where this process is killed, a worker removes it.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="sidecar-workers-", ignore_cleanup_errors=True)
    except OSError as error:
        reason = "the workers' sockets need a folder, and none can be made"
        raise CannotServe(f"{reason} ({error.strerror}); set TMPDIR to a folder that can be written") from None
    with folder as path:
        if len(os.fsencode(Path(path) / _LONGEST_NAME)) > MOST_BYTES:
            raise CannotServe(f"the path of a socket in {path} would be too long; set TMPDIR to a shorter folder")
        yield Path(path)


@contextmanager
def _reserved(host: str, port: int) -> Iterator[tuple[socket.socket, Callable[[], socket.socket]]]:
    """The clients' address, bound for as long as the block runs, and what makes a worker's socket of it.

    Unix sockets are not divided: the workers accept on this one. Raises CannotServe where another process has it.
    """
    with listening(host, port) as bound:
        if socket_path(host) is not None:
            yield bound, bound.dup
            return
    # Only now: a socket that shares its port would be bound beside those of another command with workers.
    with sharing(host, port) as bound:
        yield bound, partial(sharing, host, bound.getsockname()[1])
