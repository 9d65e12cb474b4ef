"""No engine priority at all: admission orders the requests, and the engine serves them as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidecar.engines.dialect import Forward, Priority, Stated
from sidecar.engines.routes import CANCEL, COUNTING, OPENAI, Routes
from sidecar.payload.decode import Payload
from sidecar.policy.model import Api

ROUTES = Routes(
    generating={
        **OPENAI,
        "/v1/chat/completions/batch": None,
        "/v1/messages/batches": None,
        "/inference/v1/generate": None,
        "/v1/classify": None,
        "/v1/score": None,
        "/v1/rerank": None,
        "/v2/rerank": None,
        "/v2/embed": None,
        "/v2/chat": None,
        "/v1/audio/transcriptions": None,
        "/v1/audio/translations": None,
        "/v1/audio/speech": None,
        "/v1/images/generations": None,
        "/v1/images/edits": None,
        "/v1/videos": None,
    },
    harmless=COUNTING | {CANCEL},
)
"""Of an engine that is not known: the paths that have one meaning everywhere. `/generate` may be an app's own."""


class Silent:
    """`engine: none`. The app still finds the level in the request's scope."""

    more_important_is_higher: ClassVar[bool] = False
    abort_latency_s: ClassVar[float] = 4.5
    """Not known: that of the slowest engine that is."""
    aborts_in_its_call: ClassVar[bool] = True
    """An app that is mounted is its own engine: the end of its call is all that says when it has ended its work."""

    def priority(self, level: int, levels: int) -> Priority:  # noqa: ARG002  # the level speaks for itself
        """See `Dialect.priority`."""
        return level

    def forward(self, api: Api, priority: Priority) -> Forward:  # noqa: ARG002  # nothing is forwarded
        """See `Dialect.forward`."""
        return Forward()

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:  # noqa: ARG002  # nor asked for
        """See `Dialect.asked`."""
        return None
