"""TensorRT-LLM: a float in [0, 1], higher is more important, in the body of chat and text completions alone.

Other schemas accept the member and drop it, and builds before the field answer 400 to it. It acts only with
`scheduler_config.waiting_queue_policy: priority`. For responses and messages the app can read the granted value from
the request's scope and hand it to `LLM.generate_async` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidecar.engines.dialect import Forward, Priority, Stated, member, stated_in_body
from sidecar.payload import Payload
from sidecar.policy.policy import Api

_WITH_FIELD = frozenset((Api.CHAT, Api.COMPLETIONS))
DEFAULT_PRIORITY = 0.5
"""The engine's own `DEFAULT_REQUEST_PRIORITY`, for a ladder of one tier."""


class TensorRtLlm:
    """The whole range is used: 1.0 for the most important tier, 0.0 for the last. Equal tiers stay exact ties: FIFO."""

    more_important_is_higher: ClassVar[bool] = True

    def priority(self, level: int, levels: int) -> Priority:
        """See `Dialect.priority`."""
        return DEFAULT_PRIORITY if levels < 2 else round(1 - level / (levels - 1), 3)

    def forward(self, api: Api, priority: Priority) -> Forward:
        """See `Dialect.forward`."""
        return member(priority) if api in _WITH_FIELD else Forward()

    def asked(self, payload: Payload, headers: Mapping[bytes, bytes]) -> Stated | None:  # noqa: ARG002  # it has no header
        """See `Dialect.asked`."""
        return stated_in_body(payload)
