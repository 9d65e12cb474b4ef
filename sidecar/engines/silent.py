"""No engine priority at all: admission orders the requests, and the engine serves them as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidecar.engines.dialect import Forward, Priority, Stated
from sidecar.payload import Payload
from sidecar.policy.policy import Api


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
