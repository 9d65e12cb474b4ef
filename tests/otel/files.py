"""The files of otel/ as data, and the metrics and labels that our code has names for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sidecar.cluster.sampler import FIGURES
from sidecar.telemetry import semconv
from sidecar.telemetry.metrics.histograms import DURATIONS

ROOT = Path(__file__).parents[2]
OTEL = ROOT / "otel"
RULES, RULES_TEST = OTEL / "prometheus" / "rules.yaml", OTEL / "prometheus" / "rules_test.yaml"
DASHBOARD = OTEL / "grafana" / "admission.json"
ALERTS_GUIDE = ROOT / "docs" / "who-starves.md"

NAMES = {value for value in vars(semconv).values() if isinstance(value, str) and value.startswith("admission.")}
NAMES |= {figure.name for figure in (*FIGURES, *DURATIONS)}
IN_PROMETHEUS = {name.replace(".", "_") for name in NAMES}
"""Names of metrics and of labels alike: Prometheus keeps no record of which is which."""
OF_SIZES = re.compile(r"admission_(lease_|output_|engine_preemptions)")
"""Metrics of the sizes of leases, which `test_measured_metrics` asks for."""
OF_GAIN = re.compile(r"admission_(gain_|slo_requests|engine_time_|engine_prediction_error_)")
"""Metrics of service gain, which `test_measured_metrics` asks for."""
OF_GUARD = re.compile(r"admission_(guard_|slo_hold)")
"""Metrics of guarded tiers, which `test_measured_metrics` asks for."""
SUFFIXES = ("", "_total", "_seconds", "_seconds_bucket", "_seconds_total")
_TOKEN = re.compile(r"\badmission_\w+")


class Rule(NamedTuple):
    """An alert or a recording rule."""

    name: str
    expression: str
    is_alert: bool
    written: dict[str, Any]


@cache
def rules() -> tuple[Rule, ...]:
    """All rules of rules.yaml, in order."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return tuple(
        Rule(rule["alert"] if "alert" in rule else rule["record"], rule["expr"], "alert" in rule, rule)
        for group in groups
        for rule in group["rules"]
    )


def alerts() -> list[Rule]:
    """The alerts of rules.yaml."""
    return [rule for rule in rules() if rule.is_alert]


def dashboard() -> dict[str, Any]:
    """The dashboard as it is in the repository."""
    return dict(json.loads(DASHBOARD.read_text(encoding="utf-8")))


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, headings left out."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Every expression of the dashboard, after its panel's title and its letter there."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def unknown(expression: str) -> set[str]:
    """What an expression names that our code does not."""
    known = {name + suffix for name in IN_PROMETHEUS for suffix in SUFFIXES}
    recorded = {rule.name for rule in rules() if not rule.is_alert}
    words = set(_TOKEN.findall(re.sub("|".join(map(re.escape, recorded)), "", expression)))
    return words - known
