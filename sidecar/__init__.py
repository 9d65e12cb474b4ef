"""Admission-control middleware and proxy for LLM engines.

Priority tiers, reserved tokens, lending of idle capacity, and ranks that rise with the wait, so that no request waits
forever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.context import Granted, granted
from sidecar.version import __version__

if TYPE_CHECKING:
    from sidecar.app import AdmissionMiddleware as AdmissionMiddleware

__all__ = ["AdmissionMiddleware", "Granted", "__version__", "granted"]


def __getattr__(name: str) -> Any:
    """Imports the middleware when it is asked for: a command that does not serve need not load it."""
    if name == "AdmissionMiddleware":
        from sidecar.app import AdmissionMiddleware

        return AdmissionMiddleware
    raise AttributeError(f"module 'sidecar' has no attribute {name!r}")
