"""Limit that a server puts on requests by itself: it acts before admission, and knows no tier.

Read as far as it can be: from uvicorn 0.54 (`server.py`), which uvicorn's workers for gunicorn use too, and from
granian's command line (2.8). Hypercorn, daphne and gunicorn's own worker have none.
"""

from __future__ import annotations

import logging
import signal

from sidecar.server.workers import written_for_granian

_NOTICE = (
    "the server's own limit (%s) acts before admission and knows no tier: %s; leave it out, or set it above all that "
    "may run and wait"
)
_log = logging.getLogger("sidecar.mounted")


def report_own_limit() -> None:
    """Logs the limit of the server, where it is known to have one."""
    limit = _uvicorn_limits() or _granian_limits()
    if limit is not None:
        _log.warning(_NOTICE, *limit, extra={"event": "server_limit"})


def _uvicorn_limits() -> tuple[str, str] | None:
    """SIGTERM is handled by a method of uvicorn's server, which has its configuration."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    most = getattr(getattr(server, "config", None), "limit_concurrency", None)
    if not isinstance(most, int):
        return None
    return f"limit_concurrency={most}", f"beyond {most} connections or requests uvicorn answers 503"


def _granian_limits() -> tuple[str, str] | None:
    written = written_for_granian("backpressure")
    return (f"backpressure={written}", f"beyond {written} requests the next wait unseen") if written else None
