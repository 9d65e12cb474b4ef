"""Limit that a server puts on requests by itself: it acts before admission, and knows no tier.

Read where the server keeps it, as far as it can be: from uvicorn 0.54 (`lifespan/on.py`), which uvicorn's workers for
gunicorn use too, and from granian 2.8 (`server/common.py`). Hypercorn, daphne and gunicorn's own worker have none.
"""

from __future__ import annotations

import asyncio
import logging

from sidecar.server.workers import supervisor_on_stack, written_for_granian

_SAID = (
    "the server's own limit (%s) acts before admission and knows no tier: %s; leave it out, or set it above all that "
    "may run and wait"
)
_log = logging.getLogger("sidecar.mounted")


def report_own_limit() -> None:
    """Logs the limit of the server, where it is known to have one. Called in the task of the server's lifespan."""
    limit = _of_uvicorn() or _of_granian()
    if limit is not None:
        _log.warning(_SAID, *limit, extra={"event": "server_limit"})


def _of_uvicorn() -> tuple[str, str] | None:
    """Uvicorn runs the lifespan as a task, by a method of an object that has its configuration."""
    task = asyncio.current_task()
    frame = getattr(None if task is None else task.get_coro(), "cr_frame", None)
    config = None if frame is None else getattr(frame.f_locals.get("self"), "config", None)
    most = getattr(config, "limit_concurrency", None)
    if not isinstance(most, int):
        return None
    return f"limit_concurrency={most}", f"beyond {most} connections or requests uvicorn answers 503"


def _of_granian() -> tuple[str, str] | None:
    server = supervisor_on_stack()
    most = getattr(server, "backpressure", None)
    if isinstance(most, int):  # without the option it is the backlog, shared among the processes
        written = str(most) if most < getattr(server, "backlog", 0) // getattr(server, "workers", 1) else ""
    else:
        written = written_for_granian("backpressure") or ""
    return (f"backpressure={written}", f"beyond {written} requests the next wait unseen") if written else None
