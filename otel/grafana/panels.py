"""Grafana's panels as JSON, with what all of ours have in common: the data source, a unit, and a description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Of a dashboard, in Grafana's own columns."""

PROMISED, RESERVE, LENT = "promised", "reserve", "lent"
"""Words at the end of a legend that change how the line is drawn."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what its series are called. `exemplar` asks for the traces behind a histogram."""

    expression: str
    legend: str
    exemplar: bool = False


def graph(title: str, description: str, unit: str, queries: Sequence[Query], *, stacked: bool = False) -> Json:
    """Lines over time. A name has the same color in every panel; what was promised or reserved is dashed."""
    custom: Json = {"lineWidth": 1, "fillOpacity": 0, "showPoints": "never", "spanNulls": False}
    if stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults: Json = {"unit": unit, "color": {"mode": "palette-classic-by-name"}, "custom": custom}
    if not any(query.legend.endswith(LENT) for query in queries):  # which is drawn below zero
        defaults["min"] = 0
    overrides = [_dashed(PROMISED), _dashed(RESERVE), _downwards(LENT)]
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel("timeseries", title, description, queries) | {
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": options,
    }


def figure(title: str, description: str, unit: str, expression: str) -> Json:
    """One figure, large: how it stands now. A series that does not exist yet counts nothing."""
    return _panel("stat", title, description, [Query(expression, title)]) | {
        "fieldConfig": {"defaults": {"unit": unit, "noValue": "0", "color": {"mode": "thresholds"}}, "overrides": []},
        "options": {"graphMode": "area", "colorMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}},
    }


def table(title: str, description: str, unit: str, key: Sequence[str], queries: Sequence[Query]) -> Json:
    """One line for each `key` (labels), one column for each query, which is headed by its legend."""
    panel = _panel("table", title, description, queries)
    for target in panel["targets"]:
        target |= {"format": "table", "instant": True, "range": False}
    values = [f"Value #{target['refId']}" for target in panel["targets"]] if len(queries) > 1 else ["Value"]
    headings = {value: query.legend for value, query in zip(values, queries, strict=True)}
    order = {name: place for place, name in enumerate([*key, *headings])}
    return panel | {
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"align": "auto"}}, "overrides": []},
        "options": {"showHeader": True},
        "transformations": [
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {"excludeByName": {"Time": True}, "renameByName": headings, "indexByName": order},
            },
        ],
    }


@dataclass(frozen=True, slots=True)
class Section:
    """Panels below a heading, of one height, so many side by side."""

    heading: str | None
    side_by_side: int
    height: int
    panels: Sequence[Json]


def laid_out(sections: Sequence[Section]) -> list[Json]:
    """The panels of all sections, each with its place and number."""
    placed: list[Json] = []
    top = 0
    for section in sections:
        if section.heading is not None:
            placed.append(_row(section.heading) | _place(0, top, WIDTH, 1))
            top += 1
        width = WIDTH // section.side_by_side
        for number, panel in enumerate(section.panels):
            line, column = divmod(number, section.side_by_side)
            placed.append(panel | _place(column * width, top + line * section.height, width, section.height))
        top += -(-len(section.panels) // section.side_by_side) * section.height
    return [panel | {"id": number} for number, panel in enumerate(placed, 1)]


def _row(title: str) -> Json:
    return {"type": "row", "title": title, "collapsed": False, "panels": []}


def _place(x: int, y: int, width: int, height: int) -> Json:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(kind: str, title: str, description: str, queries: Sequence[Query]) -> Json:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
            "exemplar": query.exemplar,
            "editorMode": "code",
            "range": True,
        }
        for number, query in enumerate(queries)
    ]
    return {"type": kind, "title": title, "description": description, "datasource": DATASOURCE, "targets": targets}


def _dashed(word: str) -> Json:
    style = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}
    not_stacked = {"id": "custom.stacking", "value": {"mode": "none"}}
    return {"matcher": {"id": "byRegexp", "options": f"/{word}$/"}, "properties": [style, not_stacked]}


def _downwards(word: str) -> Json:
    properties = [{"id": "custom.transform", "value": "negative-Y"}]
    return {"matcher": {"id": "byRegexp", "options": f"/{word}$/"}, "properties": properties}
