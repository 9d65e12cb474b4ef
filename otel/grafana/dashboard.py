"""Writes admission.json, the Grafana dashboard, beside itself: `python otel/grafana/dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path

import sections
from panels import DATASOURCE, Json, Section, laid_out

WRITTEN = Path(__file__).with_name("admission.json")
SCHEMA_VERSION = 39
"""Grafana 10.4's; later ones bring it up to date by themselves."""
POOLS = "label_values(admission_queue_requests, admission_pool)"


def dashboard() -> Json:
    """The whole of it."""
    panels = [
        Section(None, 6, 4, sections.now()),
        Section("Who waits, and who starves", 2, 8, sections.waiting()),
        Section("Who holds the pool", 2, 8, sections.holding()),
        Section("Who goes ahead of whom", 2, 9, sections.overtaking()),
        Section("Admitted, refused, clamped, estimated", 2, 8, sections.deciding()),
        Section("Sizes of leases", 2, 8, sections.sizing()),
        Section("Tokens in time, and the engines' speed", 2, 8, sections.gaining()),
        Section("Tenants", 2, 8, sections.tenants()),
        Section("Engines of a pool of several", 2, 8, sections.engines()),
        Section("Shared pool, policy", 2, 8, sections.operating()),
    ]
    return {
        "uid": "admission-sidecar",
        "title": "Admission",
        "description": "Who waits, who starves, and why. Written by otel/grafana/dashboard.py.",
        "tags": ["admission-sidecar", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _pool_variable()]},
        "panels": laid_out(panels),
    }


def _datasource_variable() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}


def _pool_variable() -> Json:
    return {
        "name": "pool",
        "label": "Pool",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": POOLS,
        "query": {"query": POOLS, "refId": "pool"},
        "refresh": 2,
        "sort": 1,
    }


def text() -> str:
    """What admission.json must be."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    WRITTEN.write_text(text(), encoding="utf-8")
