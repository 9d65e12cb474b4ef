"""A real Prometheus scrapes a sidecar whose engines work, break and die: metrics, panels and alerts by engine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import aiohttp
import pytest

from sidecar.engines.view import STATES
from tests.fleet.served import ServedFleet, served_fleet
from tests.otel.files import RULES, queries, rules
from tests.otel.overload import KNOWN_AFTER_S, hurried
from tests.otel.test_prometheus import GROUPING, OF_ENGINES, SELECTOR, for_this_pool
from tests.otel.test_reference import ENGINE_METRICS, EVERYWHERE
from tests.support.prometheus import Prometheus, prometheus
from tests.support.redis_servers import until

pytestmark = pytest.mark.long

PATIENCE_S = 180.0
"""At most: it takes some seconds on a machine that is not busy."""
ENOUGH = (
    "up == 1",
    "count(admission_prompt_tokens_total > 0) == 3",
    "sum(admission_prefix_tokens_predicted_total) > 0",
)
"""What is there when the load has been long enough, beside what panels and rules ask for."""


class Scraped:
    """A Prometheus, the sidecar that it scrapes, and the Unix time at which its load was there."""

    def __init__(self, server: Prometheus, fleet: ServedFleet, at_s: float) -> None:
        self.server = server
        self.fleet = fleet
        self.at_s = at_s

    def fired(self) -> set[tuple[str, str]]:
        """The alerts that fire, each with its engine."""
        found = self.server.query('ALERTS{alertstate="firing"}', time.time() - KNOWN_AFTER_S)
        return {(sample.labels["alertname"], sample.labels.get("admission_engine", "")) for sample in found}

    def until_fires(self, alert: str, engine: str) -> None:
        """Waits until an alert fires."""
        until(lambda: (alert, engine) in self.fired(), f"{alert} {engine}", PATIENCE_S)

    def until_silent(self, alert: str) -> None:
        """Waits until an alert fires for no engine."""
        until(lambda: not any(name == alert for name, _ in self.fired()), f"no {alert}", PATIENCE_S)


def asked_of_engines() -> tuple[dict[str, str], set[str]]:
    """The panels about engines, and the series that rules about them ask for."""
    panels = {name: for_this_pool(each, "default") for name, each in queries() if OF_ENGINES.search(each)}
    expressions = [GROUPING.sub("", rule.expression) for rule in rules() if OF_ENGINES.search(rule.expression)]
    # What engines report of their caches is there for those that are asked to.
    return {name: each for name, each in panels.items() if "measured" not in each}, {
        "".join(match) for expression in expressions for match in SELECTOR.findall(expression)
    }


async def load(fleet: ServedFleet, server: Prometheus) -> float:
    """Requests that share prefixes, more than fit, until Prometheus knows of all. The Unix time of which it does."""
    panels, series = asked_of_engines()
    wanted = [*ENOUGH, *panels.values(), *series]
    enough = asyncio.Event()

    def missing(at_s: float) -> list[str]:
        return [each for each in wanted if not server.query(each, at_s)]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def asks(number: int) -> None:
            while not enough.is_set():
                await fleet.ask(client, text=f"You are agent {number % 3}. " * 200)

        async def watches() -> float:
            begun_s = time.time()
            at_s = begun_s - KNOWN_AFTER_S
            while unknown := await asyncio.to_thread(missing, at_s):
                assert at_s - begun_s < PATIENCE_S, unknown
                await asyncio.sleep(0.2)
                at_s = time.time() - KNOWN_AFTER_S
            enough.set()
            return at_s

        at_s, *_ = await asyncio.gather(watches(), *(asks(number) for number in range(12)))
        return at_s


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("engines")
    arguments = ("--step-ms", "5", "--kv-tokens", "20000")
    with (
        served_fleet(folder, 3, 2, *arguments) as fleet,
        prometheus(folder, [fleet.admin.removeprefix("http://")], [hurried(RULES, folder)]) as server,
    ):
        until(server.scraped, "the sidecar is scraped", PATIENCE_S)
        yield Scraped(server, fleet, asyncio.run(load(fleet, server)))


def test_every_panel_and_rule_about_engines_finds_data(scraped: Scraped) -> None:
    panels, series = asked_of_engines()
    assert len(panels) > 8
    assert {name: each for name, each in panels.items() if not scraped.server.query(each, scraped.at_s)} == {}
    assert series
    assert {each for each in series if not scraped.server.query(each, scraped.at_s)} == set()


def test_the_metrics_are_those_of_the_page_with_their_labels(scraped: Scraped) -> None:
    found: dict[str, set[str]] = {}
    selector = '{__name__=~"admission_.+", __name__!~"admission_engine_up"}'
    for sample in scraped.server.query(selector, scraped.at_s):
        if OF_ENGINES.search(sample.labels["__name__"]):
            found.setdefault(sample.labels["__name__"], set()).update(set(sample.labels) - EVERYWHERE)
    measured = "admission_prefix_tokens_measured_total"
    listed = {name: {label.replace(".", "_") for label in of.labels} for name, of in ENGINE_METRICS.items()}
    assert found == {name: labels for name, labels in listed.items() if name != measured or name in found}


def test_the_states_and_what_was_done_are_those_that_the_engines_page_has(scraped: Scraped) -> None:
    at_s = scraped.at_s
    states = {
        (sample.labels["admission_engine"], sample.labels["admission_engine_state"]): sample.value
        for sample in scraped.server.query("admission_engine_state", at_s)
    }
    assert states == {(f"e{n}", state): int(state == "ready") for n in range(3) for state in STATES}
    prompts = {
        sample.labels["admission_engine"] for sample in scraped.server.query("admission_prompt_tokens_total > 0", at_s)
    }
    assert prompts == {"e0", "e1", "e2"}
    assert scraped.server.query("sum(admission_prefix_tokens_predicted_total) > 0", at_s)


def test_the_alerts_of_one_engine_and_of_all(scraped: Scraped) -> None:
    down = {(name, engine) for name, engine in scraped.fired() if "Engine" in name}
    assert down == set()
    scraped.fleet.engines.kill(1, signal.SIGKILL)
    scraped.until_fires("AdmissionOneEngineDown", "e1")
    assert not any(name == "AdmissionEngineDown" for name, _ in scraped.fired())
    (ejected,) = scraped.server.query("admission_engine_ejections_total > 0")
    assert (ejected.labels["admission_engine"], ejected.labels["admission_reason"]) == ("e1", "refused")
    for number in (0, 2):
        scraped.fleet.engines.kill(number, signal.SIGKILL)
    scraped.until_fires("AdmissionEngineDown", "")
    scraped.until_silent("AdmissionOneEngineDown")
