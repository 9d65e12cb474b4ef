"""TensorRT-LLM: a float in [0, 1], higher is more important, in the body of chat and text completions alone.

Other schemas accept the member and drop it, and builds before the field answer 400 to it. It acts only with
`scheduler_config.waiting_queue_policy: priority`. Whoever runs in the server's own process can hand the granted value
to `LLM.generate_async` instead, which serves responses and messages too (`sidecar.launchers.trtllm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from sidecar.engines.dialect import Forward, Priority, Stated, member, stated_in_body
from sidecar.engines.routes import COUNTING, OPENAI, Routes
from sidecar.payload.decode import Payload
from sidecar.policy.model import Api

_WITH_FIELD = frozenset((Api.CHAT, Api.COMPLETIONS))
DEFAULT_PRIORITY = 0.5
"""The engine's own `DEFAULT_REQUEST_PRIORITY`, for a ladder of one tier."""


ROUTES = Routes(
    generating={
        **OPENAI,
        "/v1/messages/batches": None,
        "/v1/audio/transcriptions": None,
        "/v1/images/generations": None,
        "/v1/images/edits": None,
        "/v1/videos": None,
        "/v1/videos/generations": None,
    },
    harmless=COUNTING | {"/v1/responses/{id}", "/v1/messages/batches/{id}/cancel"},
)
"""Read from trtllm-serve's `serve/openai_server.py`. `/v1/messages/batches` runs several requests of one body."""


class Route(Enum):
    """How a priority gets to the engine: in the request's body, by the app in the same process, or not at all."""

    BODY = "body"
    HANDED_OVER = "handed over"
    NONE = "none"


class TensorRtLlm:
    """The whole range is used: 1.0 for the most important tier, 0.0 for the last. Equal tiers stay exact ties: FIFO."""

    more_important_is_higher: ClassVar[bool] = True
    abort_latency_s: ClassVar[float] = 1.25
    """The server asks for a disconnect once a second (`openai_server.py`: `await_disconnected`); then the engine ends
    the step that it computes."""
    aborts_in_its_call: ClassVar[bool] = False
    """A stream's call ends with the disconnect; the task that aborts it is another, and asks up to a second later."""

    def __init__(self, route: Route = Route.BODY) -> None:
        self._route = route

    def priority(self, level: int, levels: int) -> Priority:
        """See `Dialect.priority`."""
        return DEFAULT_PRIORITY if levels < 2 else round(1 - level / (levels - 1), 3)

    def forward(self, api: Api, priority: Priority) -> Forward:
        """See `Dialect.forward`."""
        if self._route is Route.BODY and api in _WITH_FIELD:
            return member(priority)
        return Forward(is_handed_over=self._route is Route.HANDED_OVER)

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:  # noqa: ARG002  # it has no header
        """See `Dialect.asked`."""
        return stated_in_body(payload)
