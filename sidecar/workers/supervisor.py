"""The supervisor of `sidecar serve --workers N`: it holds the ports, the store where it is its own, and the workers."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sidecar.admin.auth import Access, AdminGuard
from sidecar.composition.serving import ServeSettings, new_proxy, upstreams
from sidecar.composition.stores import find_store, new_records, refuse_uncounted_budgets, takes_over_a_store
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


class WorkersPlan(NamedTuple):
    """App to serve, and the number of `workers`. `access` is that of the admin port."""

    settings: ServeSettings
    workers: int
    log: LogSettings
    policy: Policy
    access: Access


def check_system(workers: int) -> None:
    """Raises CannotServe where the system cannot have several processes serve one port."""
    # Elsewhere the option is missing, or one of the processes gets all connections.
    if not sys.platform.startswith("linux") or not hasattr(socket, "SO_REUSEPORT"):
        raise CannotServe(
            f"--workers {workers} needs Linux, which divides the connections to one port among processes "
            "(SO_REUSEPORT); leave it out, or run replicas on ports of their own (docs/many-replicas.md)"
        )


async def supervise(plan: WorkersPlan, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. Raises CannotServe where that cannot begin or go on, and ValueError for settings
    that cannot be.
    """
    has_store = _check(plan)
    settings = plan.settings
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_private_folder())
        clients, listener = stack.enter_context(_reserved(settings.host, settings.port))
        admin = stack.enter_context(listening(settings.admin_host, settings.admin_port))
        refuse_own_addresses(upstreams(settings.upstream, plan.policy), (clients, admin))
        environment = dict(os.environ)
        store = None if has_store or plan.policy.is_bare else OwnStore(folder)
        if store is not None:
            environment[STORE_VARIABLE] = store.url
        crew = Crew(settings, plan.workers, plan.log, environment, folder, listener=listener)
        signals = Signals(crew.reload)
        stack.enter_context(signals.caught())
        if store is not None:
            stack.push_async_callback(store.stop)
            await store.start(crew.fail)
        stack.push_async_callback(crew.close)
        async with serving_pages(AdminGuard(WorkerPages(crew), plan.access), admin):
            crew.start()
            await wait_first(crew.all_serving.wait(), crew.failed.wait(), signals.first.wait())
            if crew.all_serving.is_set():
                announce(f"sidecar: proxy on {socket_address(clients, has_tls=settings.tls_cert is not None)}")
                announce(f"sidecar: admin on {socket_address(admin)}")
                kept = "the store" if has_store else "a Valkey of their own"
                do = "pass every request" if plan.policy.is_bare else f"share one pool in {kept}"
                announce(f"sidecar: {plan.workers} workers {do}")
            await wait_first(crew.failed.wait(), signals.first.wait())
            await crew.end(settings.grace_s, signals.second)
    if crew.failure is not None:
        raise CannotServe(crew.failure)


def _check(plan: WorkersPlan) -> bool:
    """True if the settings name a store. Raises ValueError for settings that no worker could begin with."""
    new_proxy(plan.settings.upstream, plan.policy)
    new_certificate(plan.settings.tls_cert, plan.settings.tls_key)
    store = find_store(plan.policy, os.environ)
    new_records(plan.policy, os.environ)
    refuse_uncounted_budgets(plan.policy, os.environ)
    takes_over_a_store(os.environ, store, takes_over=plan.settings.takes_over_pool)
    return store is not None


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
