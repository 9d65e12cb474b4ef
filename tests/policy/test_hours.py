"""Hours of a week: how they are written, when they begin and end, and what counts then."""

from __future__ import annotations

import zoneinfo
from contextlib import suppress
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from sidecar.policy.compiler import load
from sidecar.policy.hours import borders_s, read_hours
from sidecar.policy.model import Policy
from sidecar.policy.warnings import warnings
from tests.policy.files import SMALL, mistakes, pool, tenant
from tests.support.each import each

BERLIN = "Europe/Berlin"
WORK = f"mon-fri 08:00-18:00 {BERLIN}"


def at(text: str, zone: str = BERLIN, fold: int = 0) -> float:
    """The Unix time of a time of the wall clock."""
    return datetime.fromisoformat(text).replace(tzinfo=zoneinfo.ZoneInfo(zone), fold=fold).timestamp()


@each(
    ("text", "covered", "uncovered"),
    [
        (
            WORK,
            ["2026-11-30 08:00", "2026-12-04 17:59:59"],
            ["2026-11-30 07:59:59", "2026-11-30 18:00", "2026-12-05 12:00"],
        ),
        (f"22:00-06:00 {BERLIN}", ["2026-11-29 22:00", "2026-11-30 05:59"], ["2026-11-30 06:00", "2026-11-30 21:59"]),
        (
            f"fri 22:00-06:00 {BERLIN}",
            ["2026-12-04 22:00", "2026-12-05 05:59"],
            ["2026-12-05 22:00", "2026-12-04 05:59"],
        ),
        (f"sat,sun {BERLIN}", ["2026-11-28 00:00", "2026-11-29 23:59"], ["2026-11-27 23:59", "2026-11-30 00:00"]),
        (f"fri-mon {BERLIN}", ["2026-11-27 00:00", "2026-11-30 23:59"], ["2026-12-01 00:00", "2026-11-26 23:59"]),
        (f"wed 20:00-24:00 {BERLIN}", ["2026-12-02 23:59"], ["2026-12-03 00:00", "2026-12-02 19:59"]),
        (
            "mon,wed-thu 09:00-10:00 UTC",
            ["2026-11-30 10:30", "2026-12-03 10:00"],
            ["2026-12-01 10:30", "2026-11-30 09:30"],
        ),
        # The clock is put forward at 02:00 on 29 March: 02:30 is not there, and comes half an hour after the hour.
        (f"02:30-04:00 {BERLIN}", ["2026-03-29 03:30", "2026-03-29 03:59"], ["2026-03-29 01:59", "2026-03-29 03:29"]),
        (f"01:00-02:30 {BERLIN}", ["2026-03-29 01:59", "2026-03-29 03:29"], ["2026-03-29 03:30"]),
        (WORK, ["2026-03-27 08:00", "2026-03-30 08:00", "2026-03-30 17:59"], ["2026-03-30 07:59", "2026-03-27 07:59"]),
    ],
)
def test_hours_by_the_clock_on_the_wall(text: str, covered: list[str], uncovered: list[str]) -> None:
    hours = read_hours(text)
    assert [moment for moment in covered if not hours.cover(at(moment))] == []
    assert [moment for moment in uncovered if hours.cover(at(moment))] == []


def test_an_hour_that_comes_twice_begins_and_ends_hours_once() -> None:
    """On 25 October 2026 the clock goes from 03:00 back to 02:00."""
    first, second = at("2026-10-25 02:30"), at("2026-10-25 02:30", fold=1)
    assert second - first == 3600
    begins, ends = read_hours(f"02:30-05:00 {BERLIN}"), read_hours(f"01:00-02:30 {BERLIN}")
    assert [begins.cover(first - 1), begins.cover(first), begins.cover(second - 1), begins.cover(second)] == [
        0,
        1,
        1,
        1,
    ]
    assert [ends.cover(first - 1), ends.cover(first), ends.cover(second - 1), ends.cover(second)] == [1, 0, 0, 0]
    assert borders_s([begins], first - 1)[:2] == [first, at("2026-10-25 05:00")]


@given(
    days=some.sampled_from(["mon-fri", "sat,sun", "fri-mon", "wed", ""]),
    times=some.tuples(some.integers(0, 23), some.integers(0, 59), some.integers(0, 24), some.integers(0, 59)),
    zone=some.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC"]),
    since_s=some.integers(0, 800 * 24 * 3600),
)
def test_between_two_borders_nothing_changes(
    days: str, times: tuple[int, int, int, int], zone: str, since_s: int
) -> None:
    begin, end = times[0] * 60 + times[1], min(times[2] * 60 + times[3], 24 * 60)
    if begin == end:
        return
    hours = read_hours(f"{days} {begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02} {zone}".strip())
    now_s = at("2025-01-01 00:00", "UTC") + since_s
    borders = [now_s, *borders_s([hours], now_s)]
    for this_s, next_s in pairwise(borders[:7]):
        assert len({hours.cover(this_s + part * (next_s - this_s)) for part in (0, 0.3, 0.9)}) == 1
    assert borders[1] - now_s <= 8 * 24 * 3600


@each(
    ("written", "said"),
    [
        ("mon-fri 08:00-18:00", '"08:00-18:00" is no time zone; write it like'),
        ("08:00-18:00", "are no hours; write it like"),
        ("Europe/Berlin", "are no hours; write it like"),
        ("mon-fri 8:00-18:00 UTC", "are no hours; write it like"),
        ("mon-fri 08:00-18:00 Europe/Berlni", '"Europe/Berlni" is no time zone; did you mean "Europe/Berlin"?'),
        ("mon-fri ../../etc/passwd", '"../../etc/passwd" is no time zone'),
        ("mon-fri Europe", '"Europe" is no time zone'),
        ("mon-fry UTC", '"mon-fry" are no days; write mon, tue, wed'),
        ("Mon UTC", '"Mon" are no days'),
        ("mon- UTC", '"mon-" are no days'),
        ("08:00-08:00 UTC", "they begin and end at two times from 00:00 to 24:00"),
        ("08:00-24:30 UTC", "they begin and end at two times"),
        ("24:00-06:00 UTC", "are no hours; write it like"),
        ("mon 08:00-09:00 10:00-11:00 UTC", "are no hours"),
    ],
)
def test_what_are_no_hours(tmp_path: Path, written: str, said: str) -> None:
    found = mistakes(pool(tmp_path, SMALL.replace("batch: {}", f'batch: {{hours: {{"{written}": {{limit: 10%}}}}}}')))
    assert len(found) == 1
    assert found[0].startswith("policy.yaml:6: tiers.batch.hours")
    assert said in found[0]


@each(
    ("tiers", "said"),
    [
        (
            "batch: {reserve: 20%, hours: {sat UTC: {limit: 10%}}}",
            'sat UTC: limit: below the reserve of 20%; write "20%" or',
        ),
        ("batch: {limit: 20%, hours: {sat UTC: {reserve: 30%}}}", "sat UTC: limit: below the reserve of 30%"),
        ("batch: {hours: {sat UTC: {limit: 0%}}}", 'sat UTC: limit: "0%" admits nothing, ever'),
        ("batch: {hours: {sat UTC: {limmit: 10%}}}", 'no such key; did you mean "limit"?'),
        ("batch: {hours: {sat UTC: {limit: 10}}}", '"10" is not a share; write "10%"'),
        ("batch: {hours: {}}", "not a mapping with something in it"),
        ("batch: {hours: [sat UTC]}", "not a mapping with something in it"),
        (
            "first: {reserve: 60%}\n  batch: {reserve: 20%, hours: {sat UTC: {reserve: 50%}}}",
            "in sat UTC the reserves add up to 110% of the pool",
        ),
        (
            f'first: {{reserve: 20%, hours: {{"mon 12:00-20:00 America/New_York": {{reserve: 60%}}}}}}\n'
            f'  batch: {{reserve: 20%, hours: {{"mon 08:00-20:00 {BERLIN}": {{reserve: 50%}}}}}}',
            f"in mon 08:00-20:00 {BERLIN} and mon 12:00-20:00 America/New_York the reserves add up to 110%",
        ),
    ],
)
def test_what_cannot_count_in_some_hours_is_a_mistake(tmp_path: Path, tiers: str, said: str) -> None:
    found = mistakes(pool(tmp_path, SMALL.replace("batch: {}", tiers)))
    assert len(found) == 1, found
    assert said in found[0]


def test_tiers_that_reserve_much_at_other_times_are_no_mistake(tmp_path: Path) -> None:
    first, batch = (f"{{reserve: 20%, hours: {{{day} UTC: {{reserve: 60%}}}}}}" for day in ("sat", "sun"))
    tiers = f"first: {first}\n  batch: {batch}"
    assert mistakes(pool(tmp_path, SMALL.replace("batch: {}", tiers))) == []


def test_an_emergency_tier_has_no_hour_without_a_limit(tmp_path: Path) -> None:
    text = SMALL.replace("high: {}", "high: {always_first: true, limit: 50%, hours: {sat UTC: {limit: 100%}}}")
    (found,) = mistakes(pool(tmp_path, text))
    assert "sat UTC: limit: would let this tier take the whole pool" in found


def test_without_time_zones_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, and in the smallest containers."""
    monkeypatch.setattr("zoneinfo.ZoneInfo", _no_zone)
    monkeypatch.setattr("zoneinfo.available_timezones", set)
    of_utc = SMALL.replace("batch: {}", "batch: {hours: {sat UTC: {limit: 10%}}}")
    assert mistakes(pool(tmp_path, of_utc)) == []
    (found,) = mistakes(pool(tmp_path, of_utc.replace("UTC", "Asia/Tokyo")))
    assert "this system knows no time zone but UTC; install its package tzdata" in found


def _no_zone(name: str) -> Any:
    raise zoneinfo.ZoneInfoNotFoundError(name)


def with_hours(folder: Path) -> Policy:
    """A tier and a tenant with hours; the first that cover a time count."""
    pool(
        folder,
        SMALL.replace(
            "batch: {}",
            f'batch: {{limit: 30%, hours: {{"{WORK}": {{limit: 10%}}, mon-sun UTC: {{limit: 50%, reserve: 20%}}}}}}',
        )
        + "tenants: tenants/*.yaml\n",
    )
    keys = f"[sha256:{'0' * 64}, {{hash: sha256:{'1' * 64}, name: ci}}]"
    limits = f'{{requests_per_minute: 600, hours: {{"{WORK}": {{requests_per_minute: 60}}}}}}'
    tenant(folder, "acme", f"tenant: acme\ntier: normal\nkeys: {keys}\nlimits: {limits}\n")
    tenant(folder, "bulk", f"tenant: bulk\ntier: batch\nkeys: [sha256:{'2' * 64}]\n")
    return load(folder)


def test_what_counts_at_a_time(tmp_path: Path) -> None:
    found = with_hours(tmp_path)
    work, evening = found.at(at("2026-11-30 12:00")), found.at(at("2026-11-30 20:00"))
    assert [found.tiers[2].limit, work.tiers[2].limit, evening.tiers[2].limit] == [
        Fraction(3, 10),
        Fraction(1, 10),
        Fraction(1, 2),
    ]
    assert [work.tiers[2].reserve, evening.tiers[2].reserve] == [0, Fraction(1, 5)]
    assert [work.rules.tiers[2].limit[0], evening.rules.tiers[2].limit[0]] == [100, 500]
    assert [one.limits.requests_per_minute for one in work.tenants.values()] == [60, 60, None]
    assert [one.limits.requests_per_minute for one in evening.tenants.values()] == [600, 600, None]
    assert [one.key_name for one in work.tenants.values()] == [None, "ci", None]
    assert work.named["acme"].limits.requests_per_minute == 60
    assert work.as_written == evening.as_written == found.as_written == found
    assert work.generation == found.generation


def test_what_is_said_of_a_time(tmp_path: Path) -> None:
    now = with_hours(tmp_path).hours_at(at("2026-11-30 12:00"))
    assert str(now) == (
        f"hours that count now: tier batch: limit 10% ({WORK}); tenant acme: requests_per_minute 60 ({WORK}); "
        "the next change is at 2026-11-30T17:00:00+00:00"
    )
    later = with_hours(tmp_path).hours_at(at("2026-12-04 18:00"))
    assert later.next_change == "2026-12-07T07:00:00+00:00"  # the midnights of mon-sun change nothing
    assert load(pool(tmp_path)).hours_at(0) is None


def test_check_warns_of_what_is_so_in_some_hours(tmp_path: Path) -> None:
    text = SMALL.replace("batch: {}", f'batch: {{reserve: 5%, hours: {{"{WORK}": {{reserve: 85%}}}}}}')
    found = [str(one) for one in warnings(load(pool(tmp_path, text)))]
    (one,) = [line for line in found if "is reserved" in line]
    assert f"tiers: in {WORK}: 85% of the pool is reserved, so priorities hardly matter" in one


def test_check_warns_of_hours_that_never_count(tmp_path: Path) -> None:
    in_order = (WORK, "tue 09:00-10:00 Europe/Berlin", "tue 17:00-19:00 Europe/Berlin")
    hours = ", ".join(f'"{one}": {{limit: 10%}}' for one in in_order)
    path = pool(tmp_path, SMALL.replace("batch: {}", f"batch: {{hours: {{{hours}}}}}") + "tenants: tenants/*.yaml\n")
    limits = f'{{hours: {{mon-sun Europe/Berlin: {{requests_per_minute: 60}}, "{WORK}": {{max_output_tokens: 5}}}}}}'
    tenant(tmp_path, "acme", f"tenant: acme\ntier: normal\nkeys: [sha256:{'0' * 64}]\nlimits: {limits}\n")
    found = [one for one in warnings(load(path)) if "never counts" in one.message]
    assert [one.path for one in found] == [f"tiers.batch.hours.{in_order[1]}", f"tenants.acme.limits.hours.{WORK}"]
    assert "hours before it cover all of it; write it before them" in found[0].message


@given(some.text(max_size=40))
def test_any_text_is_hours_or_a_sentence(text: str) -> None:
    with suppress(ValueError):
        assert borders_s([read_hours(text)], 1.8e9)


def test_a_year_of_borders_is_a_list_without_gaps() -> None:
    hours, now_s = read_hours(WORK), at("2026-01-01 00:00")
    met = []
    while now_s < at("2027-01-01 00:00"):
        now_s = borders_s([hours], now_s)[0]
        met.append(datetime.fromtimestamp(now_s, zoneinfo.ZoneInfo(BERLIN)))
    assert {(moment.hour, moment.minute) for moment in met} == {(8, 0), (18, 0)}
    assert {moment.weekday() for moment in met} == set(range(5))
    assert max(later - earlier for earlier, later in pairwise(met)) <= timedelta(hours=63)
