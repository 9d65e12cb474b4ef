"""The endpoint `GET /metrics`: the text that a scraper gets. It exists before the SDK is set up, and without it."""

from __future__ import annotations

from typing import Protocol


class MetricsUnavailable(Exception):
    """This process has no metrics to scrape. The message is a sentence with the reason and the remedy."""


class MetricsText(Protocol):
    """Writes all metrics as text."""

    def text(self, accept: str | None) -> tuple[bytes, str]:
        """The metrics, in the format that the Accept header asks for, and its content type."""


class MetricsEndpoint:
    """The metrics of this process for `GET /metrics`, as soon as `configure_from_environment` was given this."""

    def __init__(self) -> None:
        self._source: MetricsText | None = None
        self._reason = "metrics are not set up yet; try again in a moment"

    def open(self, source: MetricsText) -> None:
        """From now on there are metrics."""
        self._source = source

    def close(self, reason: str) -> None:
        """There will be none, for a reason that is a sentence, unless the endpoint is opened."""
        self._reason = reason

    def text(self, accept: str | None) -> tuple[bytes, str]:
        """See `MetricsText.text`. Raises MetricsUnavailable. Takes milliseconds; not for a pool's event loop."""
        if self._source is None:
            raise MetricsUnavailable(self._reason)
        return self._source.text(accept)
