"""The reference in otel/README.md: nothing in it that does not exist, and nothing that exists left out."""

from __future__ import annotations

import re
from typing import NamedTuple

from sidecar.telemetry import semconv
from tests.otel.files import NAMES, OTEL
from tests.support.nesting import refused_by_nesting

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


def test_every_name_of_ours_is_listed_and_every_name_listed_is_ours() -> None:
    reported = set(re.findall(r"`(admission\.[a-z_.]+)", README))
    assert reported == NAMES


def test_no_attribute_is_also_the_beginning_of_another() -> None:
    of_spans = README.partition("## Attributes")[2].partition("## Metrics")[0]
    names = re.findall(r"`(admission\.[\w.<>]+)`", of_spans)
    labels = [
        label
        for table in (METRICS, ENGINE_METRICS, SIZE_METRICS, GAIN_METRICS)
        for _, of in table.values()
        for label in of
    ]
    assert {semconv.ADMISSION_TIER, semconv.ADMISSION_AHEAD_RULES_PREFIX + "<tier>"} <= {*names}
    assert refused_by_nesting([*names, *labels]) == {semconv.ADMISSION_ENGINE}  # as it has been from the beginning
    assert refused_by_nesting([*names, "admission.ahead.tokens"]) > {"admission.ahead.tokens"}
