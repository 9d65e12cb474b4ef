"""The dashboard's file: written by its script, and complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from typing import Any

import yaml

from tests.otel.files import DASHBOARD, OTEL, dashboard, panels, queries, unknown
from tests.support.each import each

PANELS = panels()


def of(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def test_the_file_in_the_repository_is_what_the_script_writes() -> None:
    code = "import dashboard, sys; sys.stdout.write(dashboard.text())"
    folder = OTEL / "grafana"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, check=True, env={"PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert ended.stdout == DASHBOARD.read_bytes(), "run `python otel/grafana/dashboard.py`"


@each("panel", PANELS, ids=of)
def test_a_panel_has_a_unit_says_what_it_shows_and_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"].endswith(".")
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert 'admission_pool="$pool"' in target["expr"]
        assert target["legendFormat"]


@each("panel", PANELS, ids=of)
def test_a_histogram_is_shown_with_its_exemplars(panel: dict[str, Any]) -> None:
    asked = [target["exemplar"] for target in panel["targets"] if "_bucket" in target["expr"]]
    assert any(asked) == bool(asked)


def test_the_queries_name_metrics_and_labels_that_exist() -> None:
    asked = dict(queries())
    assert len(asked) > 50
    assert {name: unknown(expression) for name, expression in asked.items() if unknown(expression)} == {}


@each("panel", PANELS, ids=of)
def test_a_legend_names_labels_that_its_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        kept = re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", target["expr"])))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(kept)


def test_no_panel_covers_another_and_every_number_and_title_is_there_once() -> None:
    everything = dashboard()["panels"]
    for one, other in combinations((panel["gridPos"] for panel in everything), 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in everything)


def test_the_pool_and_the_data_source_can_be_chosen() -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["pool"]["query"]["query"] == variables["pool"]["definition"]
    assert unknown(variables["pool"]["definition"]) == set()
    assert json.loads(DASHBOARD.read_text(encoding="utf-8"))["uid"] == "admission-sidecar"


def test_the_data_sources_lead_from_an_exemplar_to_its_trace() -> None:
    written = (OTEL / "grafana" / "provisioning" / "datasources" / "admission.yaml").read_text(encoding="utf-8")
    sources = {source["type"]: source for source in yaml.safe_load(written)["datasources"]}
    # The label that our exemplars have; a test of `/metrics` sees it come in.
    ways = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert ways == [{"name": "trace_id", "datasourceUid": sources["tempo"]["uid"]}]


def test_the_dashboard_is_loaded_from_the_folder_that_a_variable_names() -> None:
    written = (OTEL / "grafana" / "provisioning" / "dashboards" / "admission.yaml").read_text(encoding="utf-8")
    (provider,) = yaml.safe_load(written)["providers"]
    assert provider["type"] == "file"
    assert provider["options"] == {"path": "${ADMISSION_DASHBOARDS}"}
    assert "ADMISSION_DASHBOARDS=$PWD/otel/grafana" in (OTEL / "README.md").read_text(encoding="utf-8")
