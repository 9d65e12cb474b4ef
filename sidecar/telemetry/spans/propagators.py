"""OpenTelemetry's propagators, without the names of `OTEL_PROPAGATORS` that cannot be had.

The specification of that variable wants a warning for an unknown name. The API raises while `opentelemetry.propagate`
is imported (`_load_propagators`, 1.45), and no process with such a name would start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

from opentelemetry.environment_variables import OTEL_PROPAGATORS

_log = logging.getLogger("sidecar.telemetry")


@contextmanager
def _usable_names() -> Iterator[None]:
    """The variable has only names that can be had, while the block runs. Logs the others."""
    written = os.environ[OTEL_PROPAGATORS]
    names = [name.strip() for name in written.split(",")]
    kept = [name for name in names if _can_be_had(name)]
    left_out = ", ".join(name for name in names if name not in kept)
    message = "%s: %s is not installed, and is left out; in force: %s"
    _log.warning(message, OTEL_PROPAGATORS, left_out, ", ".join(kept) or "none", extra={"event": "propagator_unknown"})
    os.environ[OTEL_PROPAGATORS] = ",".join(kept) or "none"
    try:
        yield
    finally:
        os.environ[OTEL_PROPAGATORS] = written


def _can_be_had(name: str) -> bool:
    try:
        return any(found.load()() for found in entry_points(group="opentelemetry_propagator", name=name))
    except Exception:
        return False


try:
    from opentelemetry import propagate
except Exception:  # whatever a propagator raises
    with _usable_names():
        from opentelemetry import propagate

__all__ = ["propagate"]
