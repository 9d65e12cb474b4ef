"""Admission control for LLM engines: an ASGI middleware, a proxy, and leases for code of one's own.

Priority tiers, reserved tokens, lending of idle capacity, and ranks that rise with the wait, so that no request waits
forever.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sidecar.context import Granted, granted
from sidecar.version import __version__

if TYPE_CHECKING:
    from sidecar.app import AdmissionMiddleware as AdmissionMiddleware
    from sidecar.composition.connections import connect as connect
    from sidecar.composition.connections import connect_threads as connect_threads
    from sidecar.leases import LeasePreempted as LeasePreempted

_MODULES = {
    "AdmissionMiddleware": "sidecar.app",
    "LeasePreempted": "sidecar.leases",
    "connect": "sidecar.composition.connections",
    "connect_threads": "sidecar.composition.connections",
}
__all__ = [
    "AdmissionMiddleware",
    "Granted",
    "LeasePreempted",
    "__version__",
    "connect",
    "connect_threads",
    "granted",
]


def __getattr__(name: str) -> Any:
    """Imports each of these when it is asked for: a command that does not serve need not load them."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'sidecar' has no attribute {name!r}")
