"""Shares, durations, counts and sizes, read as people write them: "10%", "5m", "400k", "8MiB".

Every reader takes a scalar as `source` gives it and returns an exact number, or raises ValueError with the sentence
that the operator sees. Numbers are read exactly (`Fraction`), never through a float.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction

from sidecar.policy.problems import quoted

LARGEST_COUNT = 10**15
"""No pool is larger, and it leaves room below 2**53 for sums that Lua must hold exactly."""

LONGEST_S = 366 * 24 * 3600
"""A year. A longer time is a typing error."""

SHORTEST_S = Fraction(1, 1_000_000)
"""Times are counted in microseconds: less would be rounded to no time at all."""

_NUMBER = r"(\d{1,15}(?:\.\d{1,9})?)"
_SHARE = re.compile(rf"{_NUMBER}\s*%", re.ASCII)
_BARE = re.compile(_NUMBER, re.ASCII)
_DURATION = re.compile(rf"{_NUMBER}\s*(us|ms|s|m|h)", re.ASCII)
_COUNT = re.compile(rf"{_NUMBER}\s*([kKMG]?)", re.ASCII)
_SIZE = re.compile(rf"{_NUMBER}\s*(B|KiB|MiB|GiB)?", re.ASCII)
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d(?::\d\d)?)(?:\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)

_SECONDS = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}
_BYTES = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """An unquoted word that YAML readers take for something else than what stands there (`no`, `010`, `12:30`)."""

    text: str
    meaning: str

    def __str__(self) -> str:
        return self.text


def scalar(value: object, what: str, example: str) -> str:
    """The text of a scalar as it was written; what is no scalar, or is ambiguous, is refused."""
    if isinstance(value, Ambiguous):
        raise ValueError(
            f"{value.text} without quotes means {value.meaning} in YAML; write {what} such as {example}, "
            "or put text in quotes"
        )
    if value is None:
        raise ValueError(f"nothing is written here; write {what} such as {example}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError(f"{kind(value)} is not {what}; write {example}")


def kind(value: object) -> str:
    """Kind of a value, in an operator's words."""
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else "a single value"


def moment_s(text: str) -> float:
    """The Unix time of a day and a time with its zone: `2027-01-31T18:00:00Z`. Parts of a second do not count."""
    if (parts := _MOMENT.fullmatch(text)) is None:
        raise ValueError(f"{quoted(text)} is no time with its zone")
    day, clock, zone = parts.groups()
    return datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone in 'Zz' else zone}").timestamp()


def text(value: object, what: str, example: str) -> str:
    """A printable, non-empty text."""
    if isinstance(value, (bool, int, float)):
        raise ValueError(f"{scalar(value, what, example)} is not {what}; put it in quotes, or write {example}")
    found = scalar(value, what, example)
    if not found.strip() or not found.isprintable():
        raise ValueError(f"{quoted(found)} is not {what}; write {example}")
    return found


def flag(value: object) -> bool:
    """`true` or `false`, and none of YAML's other words for them."""
    if isinstance(value, bool):
        return value
    likely = "true" if str(value).lower() in {"yes", "on", "1", "true"} else "false"
    written = value.text if isinstance(value, Ambiguous) else scalar(value, "true or false", "true")
    raise ValueError(f"{quoted(written)} is neither true nor false; write {likely}")


def share(value: object) -> Fraction:
    """A part of the pool, "0%" to "100%", as an exact fraction."""
    found = _percentage(value, "20%")
    if found > 1:
        raise ValueError(f'{quoted(str(value))} is more than the whole pool; write "100%" or less')
    return found


def held_share(value: object) -> Fraction:
    """The part of requests that a tier holds to its objectives, above "0%" and below "100%"."""
    found = _percentage(value, "97%")
    if found <= 0:
        raise ValueError(f'{quoted(str(value))} holds no request to anything; write "97%", or leave it out')
    if found >= 1:
        raise ValueError(
            f'{quoted(str(value))} lets one late request shut out less important work; write "99%" or less'
        )
    return found


def _percentage(value: object, example: str) -> Fraction:
    written = scalar(value, "a share", quoted(example))
    match = _SHARE.fullmatch(written)
    if match is None:
        raise ValueError(f"{quoted(written)} is not a share; write {quoted(_as_share(written, example))}")
    return Fraction(match[1]) / 100


def _as_share(written: str, example: str) -> str:
    """The most likely meaning of `20`, or `0.2`."""
    if not _BARE.fullmatch(written):
        return example
    number = Fraction(written)
    if 0 < number < 1:
        number *= 100
    return f"{float(number):g}%" if number <= 100 else "100%"


def duration_s(value: object) -> Fraction:
    """A time in seconds, exact: none at all, or at least a microsecond."""
    written = scalar(value, "a duration", '"30s"')
    match = _DURATION.fullmatch(written)
    if match is None:
        bare = written if _BARE.fullmatch(written) else "30"
        raise ValueError(f'{quoted(written)} is not a duration; write "{bare}s", "{bare}ms", "{bare}m" or "{bare}h"')
    found = Fraction(match[1]) * _SECONDS[match[2]]
    if found > LONGEST_S:
        raise ValueError(f'{quoted(written)} is more than a year; write a shorter time such as "24h"')
    if 0 < found < SHORTEST_S:
        raise ValueError(f'{quoted(written)} is less than a microsecond, and times are counted in those; write "1us"')
    return found


def positive_duration_s(value: object) -> Fraction:
    """A time of a microsecond or more, in seconds."""
    found = duration_s(value)
    if found <= 0:
        raise ValueError(f'{quoted(str(value))} is no time at all; write a time above zero such as "30s"')
    return found


def count(value: object) -> int:
    """A whole number, 0 or more: 160, "400k", "1.5M"."""
    if type(value) is int and 0 <= value <= LARGEST_COUNT:  # what most files hold, and ten times faster
        return value
    written = scalar(value, "a count", "400k")
    match = _COUNT.fullmatch(written)
    found = Fraction(match[1]) * _THOUSANDS[match[2]] if match else None
    if found is None or found.denominator != 1:
        raise ValueError(f"{quoted(written)} is not a count; write a whole number such as 160, 400k or 2M")
    if found > LARGEST_COUNT:
        raise ValueError(f"{quoted(written)} is too large; write at most 1000000G")
    return int(found)


def positive_count(value: object) -> int:
    """A whole number, 1 or more."""
    found = count(value)
    if found == 0:
        raise ValueError("0 leaves room for nothing; write 1 or more")
    return found


def size_bytes(value: object) -> int:
    """A size in bytes, 1 or more: "8MiB", "512KiB", 1048576."""
    written = scalar(value, "a size", '"8MiB"')
    match = _SIZE.fullmatch(written)
    found = Fraction(match[1]) * _BYTES[match[2]] if match else None
    if found is None or found.denominator != 1 or not 0 < found <= LARGEST_COUNT:
        raise ValueError(f'{quoted(written)} is not a size; write "8MiB" (or KiB, GiB, or a number of bytes)')
    return int(found)


def number(value: object) -> float:
    """Any finite number, negative ones included."""
    written = scalar(value, "a number", "5")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{quoted(written)} is not a number; write one such as 5 or 0.5")
    return float(value)
