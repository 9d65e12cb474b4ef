"""The reference in docs/telemetry.md: nothing in it that does not exist, and nothing that exists left out."""

from __future__ import annotations

import re
from typing import NamedTuple

from sidecar.events import StoreState
from sidecar.telemetry import semconv
from tests.otel.files import NAMES, ROOT
from tests.support.nesting import refused_by_nesting

PAGE = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
CODE = [module.read_text(encoding="utf-8") for module in sorted((ROOT / "sidecar").rglob("*.py"))]
ROW = re.compile(r"^- (`admission\.[^(:]+`)(?: \(([^)]*)\))?: ", re.MULTILINE)
EVERYWHERE = {"__name__", "job", "instance", "le", semconv.POOL.replace(".", "_")}


class Listed(NamedTuple):
    """A metric as the page lists it."""

    kind: str
    labels: frozenset[str]


def in_prometheus(name: str, kind: str, unit: str) -> str:
    """The name of its series."""
    suffix = {"counter": "_total", "histogram": "_bucket", "gauge": ""}[kind]
    return name.replace(".", "_") + ("_seconds" if unit == "s" else "") + suffix


def listed(topic: str) -> dict[str, Listed]:
    """The metrics of a list, by the names of their series."""
    text = PAGE.split(f"<!-- list: {topic} -->", 1)[1].split("<!-- end -->", 1)[0]
    found = {}
    for names, traits in ROW.findall(text):
        kind = next((one for one in ("counter", "histogram") if one in traits.split(", ")), "gauge")
        unit = "s" if "s" in traits.split(", ") else ""
        for name in re.findall(r"`([\w.]+)`", names):
            found[in_prometheus(name, kind, unit)] = Listed(kind, frozenset(re.findall(r"`([\w.]+)`", traits)))
    return found


METRICS, ENGINE_METRICS, SIZE_METRICS, GAIN_METRICS, GUARD_METRICS = map(
    listed, ("metrics", "engines", "sizes", "gain", "guard")
)


def test_every_name_of_ours_is_listed_and_every_name_listed_is_ours() -> None:
    reported = set(re.findall(r"`(admission\.[a-z_.]+)", PAGE))
    assert reported == NAMES


def test_no_attribute_is_also_the_beginning_of_another() -> None:
    of_spans = PAGE.partition("## Attributes")[2].partition("## Metrics")[0]
    names = re.findall(r"`(admission\.[\w.<>]+)`", of_spans)
    labels = [
        label
        for table in (METRICS, ENGINE_METRICS, SIZE_METRICS, GAIN_METRICS, GUARD_METRICS)
        for _, of in table.values()
        for label in of
    ]
    assert {semconv.ADMISSION_TIER, semconv.ADMISSION_AHEAD_RULES_PREFIX + "<tier>"} <= {*names}
    assert refused_by_nesting([*names, *labels]) == {semconv.ADMISSION_ENGINE}  # as it has been from the beginning
    assert refused_by_nesting([*names, "admission.ahead.tokens"]) > {"admission.ahead.tokens"}


def test_every_event_of_the_log_is_listed_and_every_one_listed_is_logged() -> None:
    written = {event for text in CODE for event in re.findall(r'"event": [^,}]*?"(\w+)"', text)}
    written |= {event for text in CODE for event in re.findall(r'"event": "\w+" if [^,}]* else "(\w+)"', text)}
    written |= {f"store_{state.value}" for state in StoreState if state is not StoreState.CONNECTING}
    section = PAGE.partition("## The log\n")[2].partition("### The access log")[0]
    named = re.findall(r"^- ((?:`\w+`(?:, )?)+): ", section, re.MULTILINE)
    assert {event for cell in named for event in re.findall(r"`(\w+)`", cell)} == written


def test_every_variable_of_the_environment_is_listed() -> None:
    read = {name for text in CODE for name in re.findall(r"\bSIDECAR_[A-Z]+(?:_[A-Z]+)*\b", text)}
    assert {name for name in read if f"`{name}`" not in PAGE} == {"SIDECAR_ADMIN_PORTS_TRIED"}  # between our processes
