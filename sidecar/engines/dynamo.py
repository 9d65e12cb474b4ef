"""Dynamo: a 32-bit integer, higher is more important, worth that many seconds of head start in the router's queue.

A top-level `priority` is a 400 there, and so is an unknown key inside `nvext`. The header overrides the body and needs
no rewriting. It acts only in `--router-mode kv` with queueing on. The value is never negated for the backend: Dynamo
does that itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidecar.engines.dialect import Forward, Priority, Stated, agent_hints, header, spread, stated_in_header
from sidecar.engines.routes import CANCEL, COUNTING, OPENAI, Routes
from sidecar.payload.decode import Payload
from sidecar.policy.model import Api

HEADER = b"x-dynamo-request-priority"
STEP, MOST = 5, 30
"""Seconds of head start between tiers, and over the whole ladder: a few dozen seconds outrank any sensible queue."""


ROUTES = Routes(
    generating={
        **OPENAI,
        "/generate": None,
        "/inference/v1/generate": None,
        "/v1/classify": None,
        "/v1/score": None,
        "/v1/rerank": None,
        "/v1/batches": None,
        "/v1/audio/transcriptions": None,
        "/v1/audio/speech": None,
        "/v1/images/generations": None,
        "/v1/images/edits": None,
        "/v1/videos": None,
        "/v1/videos/generations": None,
    },
    harmless=COUNTING | {CANCEL, "/v1/tokenize", "/v1/detokenize"},
)
"""Read from the frontend's `lib/llm/src/http/service/`."""


class Dynamo:
    """0 for the last tier (the router takes negative values as 0), 5 seconds more for each above it."""

    more_important_is_higher: ClassVar[bool] = True
    abort_latency_s: ClassVar[float] = 0.25
    """The frontend cancels the request's context when the connection closes, and the worker aborts. Not for a request
    that a disaggregated worker decodes: it aborts with the first token."""
    aborts_in_its_call: ClassVar[bool] = False
    """The frontend is not Python: it is never mounted."""

    def priority(self, level: int, levels: int) -> Priority:
        """See `Dialect.priority`."""
        return spread(level, levels, STEP, MOST)

    def forward(self, api: Api, priority: Priority) -> Forward:  # noqa: ARG002  # the header serves every API
        """See `Dialect.forward`."""
        return header(HEADER, priority)

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:
        """See `Dialect.asked`."""
        by_header = stated_in_header(HEADER, headers)
        hints = None if by_header is not None else agent_hints(payload)
        if hints is None or hints.priority is None:
            return by_header
        return Stated(hints.priority, "nvext.agent_hints.priority")
