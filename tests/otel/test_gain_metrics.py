"""A real Prometheus scrapes a sidecar that measures service gain: its metrics, and the panels about it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.fleet.served import POLICY, served_fleet
from tests.otel.files import OF_GAIN, queries
from tests.otel.test_lease_size_metrics import load
from tests.otel.test_prometheus import for_this_pool
from tests.otel.test_readme import EVERYWHERE, GAIN_METRICS
from tests.support.prometheus import Prometheus, prometheus
from tests.support.redis_servers import until

pytestmark = pytest.mark.long

PATIENCE_S = 30.0
MEASURING = POLICY.replace("high: {{}}", "high: {{slo: {{ttft: 5s, tpot: 500ms}}, gain: {{weight: 4}}}}")


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, float]]:
    """A Prometheus, and when the load was there."""
    folder = tmp_path_factory.mktemp("gain")
    with (
        served_fleet(folder, 2, 8, "--step-ms", "5", "--output-tokens", "40", template=MEASURING) as fleet,
        prometheus(folder, [fleet.admin.removeprefix("http://")], []) as server,
    ):
        until(server.scraped, "the sidecar is scraped", PATIENCE_S)
        known = (
            "up == 1",
            "rate(admission_gain_earned_total[4s]) > 0",
            "admission_slo_requests_total > 50",
            "admission_gain_earned_total > 8000",
            "admission_engine_prediction_error_between_tokens",
        )
        yield server, asyncio.run(load(fleet, server, *known))


def test_the_metrics_are_those_of_the_readme_with_their_labels(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped
    found: dict[str, set[str]] = {}
    for sample in server.query('{__name__=~"admission_.+"}', at_s):
        if OF_GAIN.match(sample.labels["__name__"]):
            found.setdefault(sample.labels["__name__"], set()).update(set(sample.labels) - EVERYWHERE)
    # The store's metrics stand in the same part of the README.
    listed = {name: {label.replace(".", "_") for label in of.labels} for name, of in GAIN_METRICS.items()}
    assert found == {name: labels for name, labels in listed.items() if OF_GAIN.match(name)}


def test_every_panel_about_service_gain_finds_data(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped
    asked = {name: for_this_pool(each, "default") for name, each in queries() if OF_GAIN.search(each)}
    assert len(asked) >= 9
    assert {name: each for name, each in asked.items() if not server.query(each, at_s)} == {}


def test_the_figures_are_those_of_what_ran(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped
    outcomes = {one.labels["admission_slo"]: one.value for one in server.query("admission_slo_requests_total", at_s)}
    assert outcomes.pop("met") > 50
    assert set(outcomes.values()) == {0}
    (earned,) = server.query("admission_gain_earned_total", at_s)
    (attainable,) = server.query("admission_gain_attainable_total", at_s)
    assert earned.value == attainable.value > 50 * 40 * 4
    between = {
        one.labels["admission_engine"]: one.value
        for one in server.query("admission_engine_time_between_tokens_seconds", at_s)
    }
    assert set(between) == {"e0", "e1"}
    assert all(0.004 < seconds < 0.3 for seconds in between.values())  # a step takes 5 ms, and more on a busy machine
