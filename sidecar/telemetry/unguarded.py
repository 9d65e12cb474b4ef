"""Log lines of requests that were refused because the policy does not guard their path."""

from __future__ import annotations

import logging

from sidecar.events import UnguardedRequest
from sidecar.telemetry.logs.request_log import RequestLog


class UnguardedLog:
    """Writes a line for each refusal, as many a second as of other refusals."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def note(self, request: UnguardedRequest) -> None:
        """Writes it, or leaves it out."""
        if request.is_refused:
            fields: dict[str, object] = {"event": "refused", "code": request.code, "route": request.route}
            arguments = (request.code, request.message)
            self._log.write_bounded(logging.WARNING, "a request was refused: %s: %s", arguments, fields)
