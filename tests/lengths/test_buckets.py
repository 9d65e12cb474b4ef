"""Buckets: few, readable, and whatever clients send, no more."""

from __future__ import annotations

import itertools
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from sidecar.lengths import estimator
from sidecar.lengths.estimator import bucket_for
from sidecar.payload.traits import EFFORTS, NO_TRAITS, Traits

BUCKETS = [
    (NO_TRAITS, None, "plain"),
    (NO_TRAITS, 1000, "max 1k"),
    (Traits(effort="high", tools=True), 2000, "tools, effort high, max 4k"),
    (Traits(tools=True, tool_choice="auto"), None, "tools"),
    (Traits(tools=True, tool_choice="none"), None, "plain"),
    (Traits(tools=True, tool_choice="required"), None, "tools forced"),
    (Traits(tools=True, tool_choice="named"), None, "tools forced"),
    (Traits(tool_choice="required"), None, "plain"),
    (Traits(format=True, stop=True), 64, "format, stop, max 64"),
    (Traits(effort="none"), None, "effort none"),
]


def test_a_bucket_says_what_its_requests_have_in_common() -> None:
    assert [(traits, most, bucket_for(traits, most)) for traits, most, _ in BUCKETS] == BUCKETS


SIZES = [
    *((most, "max 64") for most in (0, 1, 64)),
    *((most, "max 256") for most in (65, 256)),
    (257, "max 1k"),
    (1024, "max 1k"),
    (4096, "max 4k"),
    (16_384, "max 16k"),
    (65_536, "max 64k"),
    (65_537, "max more"),
    (2**31 - 1, "max more"),
]


def test_sizes_are_classes_by_the_factor_four() -> None:
    assert [(most, bucket_for(NO_TRAITS, most)) for most, _ in SIZES] == SIZES


@given(
    st.builds(Traits, st.none() | st.text(), st.booleans(), st.none() | st.text(), st.booleans(), st.booleans()),
    st.none() | st.integers(0, 2**31 - 1),
)
def test_no_client_makes_a_new_bucket(traits: Traits, most: int | None) -> None:
    assert bucket_for(traits, most) in every_bucket()


@cache
def every_bucket() -> set[str]:
    flags = (False, True)
    choices = (None, "none", "auto", "required", "named")
    return {
        bucket_for(Traits(*one), most)
        for one in itertools.product([None, *EFFORTS], flags, choices, flags, flags)
        for most in (None, 1, 100, 1000, 4000, 16_000, 60_000, 10**6)
    }


def test_there_are_some_hundred_buckets_and_nothing_else_is_remembered() -> None:
    assert len(every_bucket()) == 768
    for number in range(5000):
        bucket_for(Traits(effort=f"e{number}", tool_choice=f"c{number}"), number * 1000)
    assert estimator._name.cache_info().currsize <= 768
