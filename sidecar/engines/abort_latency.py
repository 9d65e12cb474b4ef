"""Abort latency: how long an engine may compute on for a request whose connection is closed.

Until then the request's room is not free. Each engine's file has its own figure, with the place in the engine's source
that it was read from; this module says which one applies, and from when it counts.
"""

from __future__ import annotations

from typing import NamedTuple

from sidecar.engines.dialect import Dialect


class AbortLatency(NamedTuple):
    """`seconds` count from the disconnect, or, where that is false, from the end of the app's call for the request.

    A reverse proxy closes its connection to the engine at the end of its call. An engine in this process hears of the
    disconnect itself, and the app's call may end before or after the abort.
    """

    seconds: float
    is_from_disconnect: bool

    def due_us(self, now_us: int, disconnected_us: int | None) -> int:
        """When the engine has aborted a request whose call ends now. Without a disconnect the last argument is None."""
        since_us = disconnected_us if self.is_from_disconnect and disconnected_us is not None else now_us
        return since_us + round(self.seconds * 1e6)


def abort_latency(dialect: Dialect, written_s: float | None, *, is_proxied: bool) -> AbortLatency:
    """The latency of an engine: as the policy has it (`written_s`), or else the engine's own."""
    if written_s is not None:
        return AbortLatency(written_s, not is_proxied)
    if not is_proxied and dialect.aborts_in_its_call:
        return AbortLatency(0.0, is_from_disconnect=True)
    return AbortLatency(dialect.abort_latency_s, not is_proxied)
