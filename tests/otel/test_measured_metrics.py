"""A real Prometheus scrapes a sidecar that learns output lengths, measures service gain and holds an SLO: the metrics
and the panels of these."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping

import aiohttp
import pytest

from tests.cluster.replicas import CHAT
from tests.fleet.served import POLICY, ServedFleet, served_fleet
from tests.otel.files import OF_GAIN, OF_GUARD, OF_SIZES, queries, rules
from tests.otel.overload import KNOWN_AFTER_S
from tests.otel.test_prometheus import for_this_pool
from tests.otel.test_reference import EVERYWHERE, GAIN_METRICS, GUARD_METRICS, SIZE_METRICS, Listed
from tests.support.each import each
from tests.support.prometheus import Prometheus, prometheus
from tests.support.redis_servers import until

pytestmark = pytest.mark.long

PATIENCE_S = 30.0
MOST_S = 80.0
OUTPUT = 40
MEASURING = POLICY.replace(
    "capacity: {{tokens: 20k, requests: {requests}}}", "capacity: {{from: engine, learn: full}}"
).replace("high: {{}}", "high: {{slo: {{ttft: 5s, tpot: 500ms, hold: 97%}}, gain: {{weight: 4}}}}")
ENOUGH = (
    "up == 1",
    "admission_output_answers_total > 50",
    "admission_slo_requests_total > 50",
    "admission_gain_earned_total > 8000",
    'admission_guard_requests_total{admission_slo="met"} > 50',
    *(rule.expression for rule in rules() if OF_GUARD.search(rule.expression) and not rule.is_alert),
    "admission_engine_prediction_error_between_tokens",
)
"""What is there when the load has been long enough, beside what the panels show."""


def panels_about(subject: re.Pattern[str]) -> dict[str, str]:
    return {name: for_this_pool(each, "default") for name, each in queries() if subject.search(each)}


async def load(fleet: ServedFleet, server: Prometheus, *known: str) -> float:
    """Streams of the engine's own length, which no maximum cuts short, until Prometheus has an answer to each of
    `known`. The Unix time of which it has them."""
    enough = asyncio.Event()
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    body["stream_options"] = {"include_usage": True}
    async with aiohttp.ClientSession() as client:

        async def asks() -> None:
            while not enough.is_set():
                async with client.post(fleet.url + CHAT, json=body) as response:
                    assert response.status == 200
                    await response.read()

        def is_known(at_s: float) -> bool:
            return all(server.query(each, at_s) for each in known)

        async def watches() -> float:
            begun_s = time.time()
            at_s = begun_s - KNOWN_AFTER_S
            while not await asyncio.to_thread(is_known, at_s):
                assert at_s - begun_s < MOST_S, known
                await asyncio.sleep(0.2)
                at_s = time.time() - KNOWN_AFTER_S
            enough.set()
            return at_s

        at_s, *_ = await asyncio.gather(watches(), *(asks() for _ in range(8)))
        return at_s


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, float]]:
    """A Prometheus, and when the load was there."""
    folder = tmp_path_factory.mktemp("measured")
    arguments = ("--step-ms", "5", "--output-tokens", str(OUTPUT))
    with (
        served_fleet(folder, 2, 8, *arguments, template=MEASURING) as fleet,
        prometheus(folder, [fleet.admin.removeprefix("http://")], []) as server,
    ):
        until(server.scraped, "the sidecar is scraped", PATIENCE_S)
        shown = [*panels_about(OF_SIZES).values(), *panels_about(OF_GAIN).values(), *panels_about(OF_GUARD).values()]
        yield server, asyncio.run(load(fleet, server, *ENOUGH, *shown))


@each(("subject", "of_the_page"), [(OF_SIZES, SIZE_METRICS), (OF_GAIN, GAIN_METRICS), (OF_GUARD, GUARD_METRICS)])
def test_the_metrics_are_those_of_the_page_with_their_labels(
    scraped: tuple[Prometheus, float], subject: re.Pattern[str], of_the_page: Mapping[str, Listed]
) -> None:
    server, at_s = scraped
    found: dict[str, set[str]] = {}
    for sample in server.query('{__name__=~"admission_.+"}', at_s):
        if subject.match(sample.labels["__name__"]):
            found.setdefault(sample.labels["__name__"], set()).update(set(sample.labels) - EVERYWHERE)
    listed = {name: {label.replace(".", "_") for label in of.labels} for name, of in of_the_page.items()}
    assert found == {name: labels for name, labels in listed.items() if subject.match(name)}


@each(("subject", "least"), [(OF_SIZES, 9), (OF_GAIN, 9), (OF_GUARD, 5)])
def test_every_panel_finds_data(scraped: tuple[Prometheus, float], subject: re.Pattern[str], least: int) -> None:
    server, at_s = scraped
    asked = panels_about(subject)
    assert len(asked) >= least
    assert {name: each for name, each in asked.items() if not server.query(each, at_s)} == {}


def test_the_sizes_are_those_of_what_ran(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped

    def values(name: str) -> dict[str, float]:
        return {one.labels.get("admission_engine", ""): one.value for one in server.query(name, at_s)}

    assert values("admission_lease_quantile") == {"e0": 0.9, "e1": 0.9}
    assert values("admission_lease_quantile_raised") == {"e0": 0, "e1": 0}
    assert values("admission_engine_preemptions_total") == {"e0": 0, "e1": 0}
    assert all(0 < overlap <= 1 for overlap in values("admission_lease_overlap").values())
    # Every answer has 40 tokens, which counts as 48: the upper edge of its bin.
    (answers,) = server.query("admission_output_answers_total", at_s)
    assert answers.labels["admission_output_ratio"] == "1"
    assert answers.labels["admission_tenant"] == "anonymous"
    assert answers.value > 50


def test_the_guard_counts_what_ran(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped
    counted = {one.labels["admission_slo"]: one.value for one in server.query("admission_guard_requests_total", at_s)}
    assert counted["met"] > 50
    assert counted["missed"] == 0
    (hold,), (vain,) = (server.query(name, at_s) for name in ("admission_slo_hold", "admission_guard_in_vain"))
    assert (hold.value, hold.labels["admission_tier"], vain.value) == (0.97, "high", 0)


def test_the_gain_is_that_of_what_ran(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped
    outcomes = {one.labels["admission_slo"]: one.value for one in server.query("admission_slo_requests_total", at_s)}
    assert outcomes.pop("met") > 50
    assert set(outcomes.values()) == {0}
    (earned,) = server.query("admission_gain_earned_total", at_s)
    (attainable,) = server.query("admission_gain_attainable_total", at_s)
    assert earned.value == attainable.value > 50 * OUTPUT * 4
    between = {
        one.labels["admission_engine"]: one.value
        for one in server.query("admission_engine_time_between_tokens_seconds", at_s)
    }
    assert set(between) == {"e0", "e1"}
    assert all(0.004 < seconds < 0.3 for seconds in between.values())  # a step takes 5 ms, and more on a busy machine
