"""What a scraper is answered with. Known before the SDK is there, and without it."""

from __future__ import annotations

from typing import Protocol


class NotScraped(Exception):
    """There are no metrics here. The message is a sentence that says why, and what would be right."""


class Text(Protocol):
    """Writes all metrics down."""

    def text(self, accept: str | None) -> tuple[bytes, str]:
        """The metrics, in the format that the Accept header asks for, and its content type."""


class Scrape:
    """The metrics of this process for `GET /metrics`, as soon as `configure_from_environment` was given this."""

    def __init__(self) -> None:
        self._text: Text | None = None
        self._reason = "metrics are not set up yet; try again in a moment"

    def opened(self, text: Text) -> None:
        """From now on there are metrics."""
        self._text = text

    def refused(self, reason: str) -> None:
        """There will be none, for a reason that is a sentence."""
        self._reason = reason

    def text(self, accept: str | None) -> tuple[bytes, str]:
        """See `Text.text`. Raises NotScraped. Takes milliseconds, and not in the event loop that a pool lives in."""
        if self._text is None:
            raise NotScraped(self._reason)
        return self._text.text(accept)
