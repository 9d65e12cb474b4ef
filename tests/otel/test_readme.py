"""The reference in otel/README.md: nothing in it that does not exist, and nothing that exists left out."""

from __future__ import annotations

import re
from typing import NamedTuple

from sidecar.telemetry import semconv
from tests.otel.files import NAMES, OF_SIZES, OTEL
from tests.otel.overload import Overloaded

README = (OTEL / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(admission\.[\w.]+)` \| (counter|gauge|histogram) \| (\w*) \| (.*?) \| .+ \|$", re.MULTILINE)
EVERYWHERE = {"__name__", "job", "instance", "le", semconv.POOL.replace(".", "_")}


class Listed(NamedTuple):
    """A metric as the README tells of it."""

    kind: str
    labels: frozenset[str]


def in_prometheus(name: str, kind: str, unit: str) -> str:
    """The name of its series."""
    suffix = {"counter": "_total", "histogram": "_bucket", "gauge": ""}[kind]
    return name.replace(".", "_") + ("_seconds" if unit == "s" else "") + suffix


def listed(text: str) -> dict[str, Listed]:
    """The metrics of a table, by the names of their series."""
    return {
        in_prometheus(name, kind, unit): Listed(kind, frozenset(re.findall(r"`([\w.]+)`", labels)))
        for name, kind, unit, labels in ROW.findall(text)
    }


ENGINES = "### The engines of a pool of several"
SIZES = "### The sizes of leases"
GAIN = "### Service gain"
_BEFORE, _, _AFTER = README.partition(ENGINES)
_ENGINES, _, _REST = _AFTER.partition(SIZES)
_SIZES, _, _GAIN = _REST.partition(GAIN)
METRICS, ENGINE_METRICS, SIZE_METRICS = listed(_BEFORE), listed(_ENGINES), listed(_SIZES)
GAIN_METRICS = listed(_GAIN)


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


def test_every_name_of_ours_is_listed_and_every_name_listed_is_ours() -> None:
    reported = set(re.findall(r"`(admission\.[a-z_.]+)", README))
    assert reported == NAMES
