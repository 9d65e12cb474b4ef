"""A real Prometheus scrapes a sidecar that learns output lengths: the metrics and the panels of the sizes of leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import aiohttp
import pytest

from tests.cluster.replicas import CHAT
from tests.fleet.served import POLICY, ServedFleet, served_fleet
from tests.otel.files import OF_SIZES, queries
from tests.otel.overload import KNOWN_AFTER_S
from tests.otel.test_prometheus import for_this_pool
from tests.otel.test_readme import EVERYWHERE, SIZE_METRICS
from tests.support.prometheus import Prometheus, prometheus
from tests.support.redis_servers import until

pytestmark = pytest.mark.long

PATIENCE_S = 30.0
LEAST_S, MOST_S = 8.0, 80.0
"""Of the load: what is learned in it, and a rate of it, are known after the one on an idle machine."""
OUTPUT = 40
LEARNING = POLICY.replace("capacity: {{tokens: 20k, requests: {requests}}}", "capacity: {{from: engine, learn: full}}")


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
            await asyncio.sleep(LEAST_S)
            at_s = time.time() - KNOWN_AFTER_S
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
    folder = tmp_path_factory.mktemp("sizes")
    arguments = ("--step-ms", "5", "--output-tokens", str(OUTPUT))
    with (
        served_fleet(folder, 2, 8, *arguments, template=LEARNING) as fleet,
        prometheus(folder, [fleet.admin.removeprefix("http://")], []) as server,
    ):
        until(server.scraped, "the sidecar is scraped", PATIENCE_S)
        known = (
            "up == 1",
            "admission_lease_overlap",
            "rate(admission_output_answers_total[4s]) > 0",
            "admission_output_answers_total > 50",
        )
        yield server, asyncio.run(load(fleet, server, *known))


def test_the_metrics_are_those_of_the_readme_with_their_labels(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped
    found: dict[str, set[str]] = {}
    for sample in server.query('{__name__=~"admission_.+"}', at_s):
        if OF_SIZES.match(sample.labels["__name__"]):
            found.setdefault(sample.labels["__name__"], set()).update(set(sample.labels) - EVERYWHERE)
    assert found == {name: {label.replace(".", "_") for label in of.labels} for name, of in SIZE_METRICS.items()}


def test_every_panel_about_lease_sizes_finds_data(scraped: tuple[Prometheus, float]) -> None:
    server, at_s = scraped
    asked = {name: for_this_pool(each, "default") for name, each in queries() if OF_SIZES.search(each)}
    assert len(asked) > 8
    assert {name: each for name, each in asked.items() if not server.query(each, at_s)} == {}


def test_the_figures_are_those_of_what_ran(scraped: tuple[Prometheus, float]) -> None:
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
