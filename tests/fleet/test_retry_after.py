"""`Retry-After` as engines, and rude ones, write it."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from sidecar.fleet.routing import retry_after_s

NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=timezone.utc)


def test_seconds_and_dates_within_bounds() -> None:
    seconds = {
        None: 1.0,
        b"": 1.0,
        b"5": 5.0,
        b" 7 ": 7.0,
        b"2.5": 2.5,
        b"0": 1.0,
        b"3600": 60.0,
        b"9" * 400: 60.0,
        b"-5": 1.0,
        b"nan": 1.0,
        b"inf": 1.0,
        b"1e9": 1.0,
        b"1.2.3": 1.0,
        b".": 1.0,
        b"soon": 1.0,
        "\u0665".encode(): 1.0,
        b"\xff\xfe": 1.0,
        b"Sun, 22 Nov 2026 12:00:09 GMT": 9.0,
        b"Sun, 22 Nov 2026 12:00:09": 9.0,
        b"Sunday, 22-Nov-26 12:00:09 GMT": 9.0,
        b"Sun Nov 22 12:00:09 2026": 9.0,
        b"Sun, 22 Nov 2026 11:00:00 GMT": 1.0,
        b"Sun, 22 Nov 2099 12:00:00 GMT": 60.0,
        b"Sun, 99 Nov 2026 12:00:00 GMT": 1.0,
    }
    assert {value: retry_after_s(value, NOW) for value in seconds} == pytest.approx(seconds)


def test_a_date_is_compared_with_the_present() -> None:
    assert retry_after_s(b"Sun, 22 Nov 2099 12:00:00 GMT") == 60.0
