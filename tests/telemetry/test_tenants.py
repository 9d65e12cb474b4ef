"""Which tenants are named in metrics: never too many, and no count is lost, reported twice or taken back."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.telemetry.metrics.tenants import LOOK_EVERY_US, OTHER, SHOWN, TenantLabels, shown_tenants

NAMES = ["acme", "globex", "initech", "umbrella", "hooli", OTHER]
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.integers(1, 10_000), st.sampled_from([0, 1, LOOK_EVERY_US // 2, LOOK_EVERY_US])
    ),
    max_size=60,
)


def admitted(tenants):
    return {name: counts.admitted for name, counts in tenants.series().items()}


@given(shown=st.integers(0, 4), requests=REQUESTS)
def test_every_request_is_in_one_series_and_no_series_shrinks(shown, requests):
    tenants, at_us, before = TenantLabels(shown), 1_000_000, {}
    highest: Counter[str] = Counter()  # every series as it was when it was last reported, however long ago
    for number, (name, tokens, later_us) in enumerate(requests, start=1):
        at_us += later_us
        tenant = tenants.note_request(name, tokens, at_us)
        changed = admitted(tenants)
        tenant.counts.admitted += 1
        reported = admitted(tenants)

        assert len(reported) <= 2 * shown + 1
        assert sum(reported[name] - changed[name] for name in reported) == 1
        assert all(reported[series] >= highest[series] for series in reported)
        for series in set(changed) - set(before):
            assert (
                changed[series] == highest[series]
            )  # 0 for one that was never there: what it had before is in `other`
        gone = {series: highest[series] for series in highest if series not in reported}
        assert sum(reported.values()) + sum(gone.values()) == number
        highest.update({series: reported[series] - highest[series] for series in reported})
        before = reported


@given(requests=REQUESTS)
def test_a_reader_that_comes_in_time_misses_nothing(requests):
    """It adds up what each series grew by, as Prometheus' `increase` does: a series that is new grew from 0."""
    tenants, at_us, seen, total = TenantLabels(2), 1_000_000, Counter(), 0
    for name, tokens, later_us in requests:
        at_us += min(later_us, LOOK_EVERY_US // 2)
        tenants.note_request(name, tokens, at_us).counts.admitted += 1
        if later_us:  # a reading
            for series, value in admitted(tenants).items():
                total += value - seen[series]
                seen[series] = value
    for series, value in admitted(tenants).items():
        total += value - seen[series]
    assert total == len(requests)


def test_a_tenant_that_grows_takes_the_place_of_the_smallest_and_starts_at_nothing():
    tenants = TenantLabels(2)
    for name, tokens in (("acme", 500), ("globex", 100), ("initech", 150)):
        tenants.note_request(name, tokens, 0).counts.admitted += 1
    assert admitted(tenants) == {"acme": 1, "globex": 1, OTHER: 1}

    tenants.note_request("initech", 5_000, 1).counts.admitted += 1
    assert tenants.name_for("initech") == OTHER
    tenants.note_request("initech", 1, LOOK_EVERY_US + 2).counts.admitted += 1

    assert admitted(tenants) == {"acme": 1, "globex": 1, "initech": 1, OTHER: 2}
    tenants.note_request("globex", 1, LOOK_EVERY_US + 3).counts.admitted += 1
    assert admitted(tenants) == {"acme": 1, "globex": 1, "initech": 1, OTHER: 3}
    tenants.note_request("acme", 1, 2 * LOOK_EVERY_US + 3)
    assert admitted(tenants) == {"acme": 1, "initech": 1, OTHER: 3}


def test_two_that_are_alike_do_not_change_places():
    tenants = TenantLabels(1)
    for at_us in range(0, 10 * LOOK_EVERY_US, LOOK_EVERY_US):
        tenants.note_request("acme", 100, at_us)
        tenants.note_request("globex", 150, at_us)

    assert set(admitted(tenants)) == {"acme", OTHER}


def test_a_tenant_that_is_named_again_goes_on_where_it_was():
    tenants, at_us = TenantLabels(1), 0
    for name in ("acme", "globex", "globex", "acme", "acme"):
        for _ in range(8):
            at_us += LOOK_EVERY_US
            tenants.note_request(name, 1_000, at_us).counts.admitted += 1
    reported = admitted(tenants)

    assert reported["acme"] > 8
    assert sum(reported.values()) + (0 if "globex" in reported else tenants.known["globex"].own.admitted) == 40


def test_without_places_all_are_others():
    tenants = TenantLabels(0)
    tenants.note_request("acme", 1, 1).counts.refused += 1

    assert {name: counts.refused for name, counts in tenants.series().items()} == {OTHER: 1}


def test_as_many_tenants_as_places_need_no_others():
    tenants = TenantLabels(2)
    for name in ("globex", "acme"):
        tenants.note_request(name, 1, 1)

    assert admitted(tenants) == {"acme": 0, "globex": 0}


@pytest.mark.parametrize(("written", "shown"), [(None, SHOWN), ("", SHOWN), ("0", 0), (" 50 ", 50)])
def test_the_environment_says_how_many(written, shown):
    assert shown_tenants({} if written is None else {"SIDECAR_METRICS_TENANTS": written}) == shown


@pytest.mark.parametrize("written", ["many", "-1", "1.5", "501"])
def test_a_number_of_tenants_that_is_none_is_said(written):
    with pytest.raises(ValueError, match=f"SIDECAR_METRICS_TENANTS: '{written}' is no number of tenants; .* 0 to 500"):
        shown_tenants({"SIDECAR_METRICS_TENANTS": written})
