"""A real Prometheus scrapes a real `sidecar serve` under overload, and answers what the dashboard and the rules ask."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.otel.files import OF_GAIN, OF_GUARD, OF_SIZES, dashboard, queries, rules
from tests.otel.overload import CALLED_FOR, POOL, STORE_LOST, Overloaded, fired, overloaded
from tests.otel.test_reference import EVERYWHERE, METRICS

pytestmark = pytest.mark.long

SELECTOR = re.compile(r"\b(admission_\w+)((?:\{[^}]*\})?)(?=[\s\[)]|$)")
GROUPING = re.compile(r"\b(?:by|on|group_left|without) ?\([^)]*\)")


OF_ENGINES = re.compile(
    r"admission_(engine_(?!up|preemptions|time_|prediction_error_)|replays|prefix|prompt_tokens|no_engine_fits)"
)
"""Metrics of a pool of several engines, which `test_engine_metrics` asks for."""


@pytest.fixture(scope="module")
def overload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overloaded]:
    """It is over when a test sees it; Prometheus still answers for the time when it was at its height."""
    with overloaded(tmp_path_factory.mktemp("overload")) as seen:
        yield seen


def for_this_pool(expression: str, pool: str = POOL) -> str:
    """As Grafana fills it in, but for a range that fits the test's short load."""
    filled = expression.replace("$pool", pool)
    return filled.replace("$__rate_interval", "4s").replace("$__range", "10s")


def test_every_query_of_the_dashboard_finds_data(overload: Overloaded) -> None:
    of_others = (OF_ENGINES, OF_GAIN, OF_GUARD, OF_SIZES)
    asked = {name: for_this_pool(each) for name, each in queries() if not any(of.search(each) for of in of_others)}
    assert len(asked) > 50
    assert {name: each for name, each in asked.items() if not overload.prometheus.query(each, overload.at_s)} == {}


def test_the_pools_to_choose_from_are_those_that_there_are(overload: Overloaded) -> None:
    definition = next(
        variable["definition"] for variable in dashboard()["templating"]["list"] if "definition" in variable
    )
    selector, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", definition).groups()  # type: ignore[union-attr]
    assert overload.prometheus.values(label, selector) == [POOL]


def elsewhere(expression: str) -> bool:
    """True if another test has the series of a rule."""
    return bool(OF_ENGINES.search(expression) or OF_GUARD.search(expression))


def test_every_series_that_a_rule_asks_for_is_there(overload: Overloaded) -> None:
    expressions = [GROUPING.sub("", rule.expression) for rule in rules() if not elsewhere(rule.expression)]
    asked = {"".join(match) for expression in expressions for match in SELECTOR.findall(expression)}
    assert len(asked) > 10
    assert {each for each in asked if not seen(overload, each)} == set()


def test_every_recording_rule_has_recorded(overload: Overloaded) -> None:
    recorded = [rule.name for rule in rules() if not rule.is_alert and not OF_GUARD.search(rule.expression)]
    assert recorded
    assert [name for name in recorded if not seen(overload, name)] == []


def seen(overload: Overloaded, selector: str) -> bool:
    """Whether there was a number in such a series at any time, the loss of the store included. A quantile of nothing,
    as of first tokens while the engine is gone, is none.
    """
    return bool(overload.prometheus.query(f"max_over_time({selector}[5m])", overload.lost_s))


def test_the_alerts_that_this_overload_calls_for_fire_and_no_others(overload: Overloaded) -> None:
    # On a machine that is busy enough the store answers too late, and counts as lost.
    assert fired(overload.prometheus, overload.at_s) - {(STORE_LOST, "")} == CALLED_FOR


def test_a_lost_store_is_reported(overload: Overloaded) -> None:
    assert (STORE_LOST, "") in fired(overload.prometheus, overload.lost_s)


def test_an_alert_tells_its_story_in_words(overload: Overloaded) -> None:
    """Of those that are still there: a template that cannot be filled in says so in its text."""
    alerts = overload.prometheus.alerts()
    assert alerts
    for alert in alerts:
        reported = alert["annotations"]
        assert POOL in reported["summary"]
        assert not re.search(r"<error|<no value>|\{\{", " ".join(reported.values()))


def test_a_slow_bucket_leads_to_a_trace(overload: Overloaded) -> None:
    for histogram in ("queue_wait", "starvation", "time_to_first_token"):
        exemplars = overload.prometheus.exemplars(f"admission_{histogram}_seconds_bucket")
        assert exemplars, histogram
        assert all(re.fullmatch("[0-9a-f]{32}", exemplar["labels"]["trace_id"]) for exemplar in exemplars)


def scraped(overload: Overloaded) -> dict[str, set[str]]:
    """The labels of every metric that there is, by its name. Of all its series: one without a tier lacks that label."""
    found: dict[str, set[str]] = {}
    for sample in overload.prometheus.query('last_over_time({__name__=~"admission_.+"}[1m])', overload.lost_s):
        found.setdefault(sample.labels["__name__"], set()).update(set(sample.labels) - EVERYWHERE)
    return found


def test_the_metrics_are_those_that_are_scraped_with_their_labels(overload: Overloaded) -> None:
    found = {
        name: labels
        for name, labels in scraped(overload).items()
        if not name.endswith(("_seconds_sum", "_count")) and not OF_SIZES.match(name)
    }
    assert found == {name: {label.replace(".", "_") for label in reported.labels} for name, reported in METRICS.items()}


def test_the_metrics_are_of_the_kind_that_is_listed(overload: Overloaded) -> None:
    families = {name: family[0]["type"] for name, family in overload.prometheus.families().items()}
    # The name of a family has neither of the suffixes; older formats keep that of counters.
    found = {name: families.get(name, families.get(re.sub("_(bucket|total)$", "", name))) for name in METRICS}
    assert found == {name: reported.kind for name, reported in METRICS.items()}
