"""Hours of a week, as a policy writes them: `mon-fri 08:00-18:00 Europe/Berlin`.

Days or times may be left out, and not both. Times after midnight belong to the day on which they begin. The wall clock
of the zone counts: a time that a change of the clock leaves out comes as much later as the clock was put forward, and
of one that comes twice the first counts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, time, timedelta, timezone, tzinfo
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

from sidecar.policy import fields as of
from sidecar.policy import units
from sidecar.policy.declared import given
from sidecar.policy.problems import quoted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from sidecar.policy.tenant import Limits
    from sidecar.policy.tier import Tier

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MIN = 24 * 60
_EXAMPLE = "mon-fri 08:00-18:00 Europe/Berlin"
_LIKE = f"write it like {quoted(_EXAMPLE)}, {quoted('sat,sun UTC')} or {quoted('22:00-06:00 UTC')}"
_TIMES = r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)"
_PARTS = re.compile(rf"(?:([^\d\s]\S*) )?(?:{_TIMES} )?(\S+)", re.ASCII)
"""Days, times and a zone; days or times may be left out."""
_UTC = "UTC"
_NO_ZONES = (
    f"this system knows no time zone but {_UTC}; install its package tzdata, or the package tzdata for the sidecar's "
    "Python"
)

_MOST_HOURS = 20
WEEKS_S = (1_768_176_000, 1_783_900_800)
"""The begins of a week in January and one in July of 2026. A zone has one time in each."""

E = TypeVar("E")
R = TypeVar("R", "Tier", "Limits")


class Hours(str):
    """Hours of a week, and their text. `days` count from Monday, 0; `begin` and `end` are minutes of the day."""

    days: frozenset[int]
    begin: int
    end: int
    zone: tzinfo

    def spans(self, at_s: float, days: int = 8) -> Iterator[tuple[float, float]]:
        """Begins and ends, in Unix seconds: of those that may have begun, and of those of so many days after today."""
        today = datetime.fromtimestamp(at_s, self.zone).date()
        for day in (today + timedelta(days=later) for later in range(-1, days + 1)):
            if day.weekday() in self.days:
                midnight = datetime.combine(day, time())
                begin, end = (midnight + timedelta(minutes=minutes) for minutes in (self.begin, self.end))
                yield begin.replace(tzinfo=self.zone).timestamp(), end.replace(tzinfo=self.zone).timestamp()

    def cover(self, at_s: float) -> bool:
        """True if they count then."""
        return any(begin_s <= at_s < end_s for begin_s, end_s in self.spans(at_s, 0))


ByHours = Mapping[Hours, E]
"""Changes by hours, in the order of the file: records whose fields are None where they are as at other times."""


def first_covering(entries: Iterable[Hours], at_s: float) -> Hours | None:
    """The first hours that cover a time, which count; None where none cover it."""
    return next((hours for hours in entries if hours.cover(at_s)), None)


def changes_text(entry: DataclassInstance) -> str:
    """Changes in some hours as a sentence lists them."""
    changes = given(entry).items()
    return ", ".join(
        f"{name} {of.percent(it) if isinstance(it, Fraction) else format(it, ',')}" for name, it in changes
    )


def record_at(record: R, time_s: float) -> R:
    """A record that has `hours`, with what they say at a time, in Unix seconds."""
    hours = first_covering(record.hours, time_s)
    return record if hours is None else replace(record, **given(record.hours[hours]))


def covering(all_hours: Iterable[Hours], at_s: float) -> frozenset[Hours]:
    """The hours that cover a time."""
    return frozenset(hours for hours in all_hours if hours.cover(at_s))


def borders_s(all_hours: Iterable[Hours], at_s: float) -> list[float]:
    """The times after `at_s`, of a week, at which some hours begin or end."""
    return sorted({border for hours in all_hours for span in hours.spans(at_s) for border in span if border > at_s})


@lru_cache(maxsize=1024)  # many tenants have the same hours
def never_counting(all_hours: tuple[Hours, ...]) -> list[Hours]:
    """Hours in the order of a file, of which those do not count that others before them cover at all times."""
    times_s = (at_s for week_s in WEEKS_S for at_s in borders_s(all_hours, week_s))
    counting = {first_covering(all_hours, at_s) for at_s in times_s}
    return [hours for hours in all_hours if hours not in counting]


def read_hours(value: object) -> Hours:
    """Hours in their text. Raises ValueError."""
    found = Hours(units.text(value, "hours", _EXAMPLE))
    parts = _PARTS.fullmatch(" ".join(found.split()))
    if parts is None or parts[1] is parts[2] is None:
        raise ValueError(f"{quoted(found)} are no hours; {_LIKE}")
    days, *times, zone = parts.groups()
    found.days = frozenset(range(7) if days is None else _read_days(days))
    hour, minute, end_hour, end_minute = map(int, (0, 0, 24, 0) if times[0] is None else times)
    found.begin, found.end, found.zone = hour * 60 + minute, end_hour * 60 + end_minute, _read_zone(zone)
    if found.begin == found.end or found.end > _DAY_MIN:
        raise ValueError(f"{quoted(found)} are no hours: they begin and end at two times from 00:00 to 24:00")
    if found.end < found.begin:
        found.end += _DAY_MIN
    return found


def _read_days(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in _DAYS or (dash and last not in _DAYS):
            raise ValueError(f"{quoted(part)} are no days; write {', '.join(_DAYS)}, or from one to another: mon-fri")
        begin = _DAYS.index(first)
        length = (_DAYS.index(last) - begin) % 7 if dash else 0
        yield from ((begin + later) % 7 for later in range(length + 1))


def _read_zone(name: str) -> tzinfo:
    if name == _UTC:
        return timezone.utc
    import zoneinfo  # only for hours of another zone

    with suppress(zoneinfo.ZoneInfoNotFoundError, OSError, ValueError):
        return zoneinfo.ZoneInfo(name)
    if not (known := zoneinfo.available_timezones()):
        raise ValueError(_NO_ZONES)
    near = difflib.get_close_matches(name[:60], known, n=1)
    raise ValueError(f"{quoted(name)} is no time zone; {f'did you mean {quoted(near[0])}?' if near else _LIKE}")


class HoursNow(NamedTuple):
    """Changes that count now, by tier and tenant, and the next time at which others count, in UTC."""

    now: Mapping[str, str]
    next_change: str | None

    def __str__(self) -> str:
        now = "; ".join(f"{name}: {what}" for name, what in self.now.items()) or "none of them"
        return f"hours that count now: {now}; the next change is at {self.next_change}"


HoursText = Annotated[Hours, of.Reads(read_hours, of.schema(f"Days and hours, with their zone: {_EXAMPLE}."))]


def not_too_many(written: ByHours[E] | None) -> ByHours[E]:
    """Changes by hours, also where none are written. Raises ValueError for too many."""
    if written is not None and len(written) > _MOST_HOURS:
        raise ValueError(f"{len(written)} hours are more than anyone keeps in mind; write {_MOST_HOURS} or fewer")
    return written or {}
