"""`Retry-After` of an engine's response (RFC 9110, section 10.2.3)."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

WITHOUT_S = 1.0
"""Where an engine does not say when it takes requests again. It is full for steps, which take less."""
MOST_S = 60.0
"""An engine that says more is asked again by then: a mistaken header does not take it out for an hour."""


def retry_after_s(value: bytes | None, now: datetime | None = None) -> float:
    """Seconds until the engine takes requests again, from `WITHOUT_S` to `MOST_S`, by the header's value.

    A value that is missing, cannot be read or lies in the past counts as `WITHOUT_S`. `now` is for tests.
    """
    text = "" if value is None else value.decode("latin-1").strip()
    found = _seconds(text)
    if found is None:
        found = _until(text, now or datetime.now(timezone.utc))
    return WITHOUT_S if found is None else max(WITHOUT_S, min(MOST_S, found))


def _seconds(text: str) -> float | None:
    """Whole seconds, as the standard has them, or with decimals, as some servers send them."""
    if not text.isascii() or not text.replace(".", "", 1).isdigit():
        return None
    found = float(text)
    return found if math.isfinite(found) else MOST_S


def _until(text: str, now: datetime) -> float | None:
    try:
        date = parsedate_to_datetime(text)
        return (date.replace(tzinfo=date.tzinfo or timezone.utc) - now).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
