"""A failure of telemetry: logged once, and never raised, as all of it runs on the path of requests."""

from __future__ import annotations

import logging
from contextlib import suppress


class FirstFailure:
    """Logs the exception being handled, the first time only: a defect must not write a line a request."""

    def __init__(self, logger: logging.Logger, consequence: str) -> None:
        self._logger = logger
        self._message = f"{consequence} without, and further failures are not logged"
        self._is_logged = False

    def __call__(self) -> None:
        """An exception is being handled."""
        if not self._is_logged:
            self._is_logged = True
            with suppress(Exception):  # a handler of the log may have raised the first one
                self._logger.exception(self._message)
