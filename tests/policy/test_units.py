from __future__ import annotations

import re
from fractions import Fraction

import pytest

from sidecar.policy import units
from sidecar.policy.units import Ambiguous
from tests.support.each import each


@each(
    ("written", "expected"),
    [("10%", Fraction(1, 10)), ("0%", Fraction(0)), ("100%", Fraction(1)), ("33.3%", Fraction(333, 1000))],
)
def test_a_share_is_an_exact_fraction(written: str, expected: Fraction) -> None:
    assert expected == units.share(written)


@each(
    ("written", "message"),
    [
        (20, '"20" is not a share; write "20%"'),
        (0.2, '"0.2" is not a share; write "20%"'),
        ("-5%", '"-5%" is not a share; write "20%"'),
        ("120%", '"120%" is more than the whole pool; write "100%" or less'),
        (None, 'nothing is written here; write a share such as "20%"'),
        ([20], 'a list is not a share; write "20%"'),
        ("9" * 5000 + "%", f'"{"9" * 57}..." is not a share; write "20%"'),
        ("\N{ARABIC-INDIC DIGIT FIVE}%", '"\N{ARABIC-INDIC DIGIT FIVE}%" is not a share; write "20%"'),
    ],
)
def test_what_is_no_share_is_refused_with_what_would_be_one(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        units.share(written)


@each(
    ("written", "seconds"),
    [("500ms", Fraction(1, 2)), ("2s", 2), ("5m", 300), ("1h", 3600), ("1.5s", Fraction(3, 2)), ("0s", 0)],
)
def test_a_duration_is_seconds(written: str, seconds: Fraction) -> None:
    assert seconds == units.duration_s(written)


def test_a_number_without_a_unit_is_not_a_duration() -> None:
    with pytest.raises(ValueError, match='"30" is not a duration; write "30s", "30ms", "30m" or "30h"'):
        units.duration_s(30)


@each("written", ["0.4us", "0.0004ms"])
def test_a_time_that_would_be_rounded_to_nothing_is_refused(written: str) -> None:
    said = f'"{written}" is less than a microsecond, and times are counted in those; write "1us"'
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        units.duration_s(written)


@each(("written", "expected"), [("10k", 10_000), ("2M", 2_000_000), ("1.5k", 1500), (160, 160)])
def test_a_count_is_a_whole_number(written: object, expected: int) -> None:
    assert expected == units.count(written)


@each("written", ["1e3", "0.5", -1, "400 thousand", "2m", True, "", 10**18])
def test_what_is_no_count_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="; write "):
        units.count(written)


@each(("written", "expected"), [("8MiB", 8 * 2**20), ("512KiB", 2**19), (1000, 1000), ("1B", 1)])
def test_a_size_is_bytes(written: object, expected: int) -> None:
    assert expected == units.size_bytes(written)


def test_a_decimal_megabyte_is_refused_rather_than_guessed() -> None:
    with pytest.raises(ValueError, match='"8MB" is not a size; write "8MiB"'):
        units.size_bytes("8MB")


def test_an_ambiguous_word_says_what_yaml_makes_of_it() -> None:
    with pytest.raises(ValueError, match=r"^010 without quotes means 8 in YAML; write a count such as 400k"):
        units.count(Ambiguous("010", "8"))


def test_yes_is_neither_true_nor_false() -> None:
    with pytest.raises(ValueError, match='"yes" is neither true nor false; write true'):
        units.flag(Ambiguous("yes", "true"))
