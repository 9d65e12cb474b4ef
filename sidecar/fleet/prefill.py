"""The prompt of one attempt: it counts at its engine until the first byte of the answer.

An answer that is not streamed has no first byte before its end. Its un-prefilled tokens would block the engine for as
long as it generates, so the pool stops to count them when its first token should be there (`engines.speed`).
"""

from __future__ import annotations

import asyncio

from sidecar.admission.intake import SizedRequest
from sidecar.engines.speed import EngineSpeed
from sidecar.pools import Lease

LONGEST_S = 60.0


class Prefill:
    """The prefill of an attempt that begins now. Call `end` where no first byte comes; it may be repeated."""

    __slots__ = ("_call", "_lease", "_speed", "_timer")

    def __init__(self, speed: EngineSpeed, request: SizedRequest, uncached: int, lease: Lease, now_us: int) -> None:
        streams, tenant = request.payload.stream, request.classification.tenant.name
        self._speed = speed
        self._call = speed.sent(tenant, uncached, now_us, streams=streams)
        self._lease = lease
        self._timer: asyncio.TimerHandle | None = None
        if not streams:
            in_s = min(LONGEST_S, self._call.predicted_us / 1e6)
            self._timer = asyncio.get_running_loop().call_later(in_s, lease.prefilled)

    def first_byte(self, now_us: int, *, is_served: bool) -> None:
        """The answer's first byte is there. An error teaches nothing of the engine's speed."""
        self._lease.prefilled()
        self._speed.first_token(self._call, now_us, is_sample=is_served and self._timer is None)
        self.end(now_us)

    def end(self, now_us: int) -> None:
        """The attempt is over, or its prompt is computed."""
        self._speed.ended(self._call, now_us)
        if self._timer is not None:
            self._timer.cancel()
