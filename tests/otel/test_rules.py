"""The alert rules: promtool's own tests of them, and what it does not look at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.otel.files import ALERTS_GUIDE, OTEL, ROOT, RULES_TEST, Rule, alerts, panels, rules, unknown
from tests.support.each import each
from tests.support.markdown import anchors, section, table
from tests.support.prometheus import promtool

PROMETHEUS = OTEL / "prometheus"
FIRES = re.compile(r'\{alertname="(\w+)"')
PARTS = ["Meaning", "First look", "Likely causes", "What to do", "What not to do"]
PART = re.compile(r"^\*\*(.+?)\.\*\*(.*?)(?=^\*\*|\Z)", re.MULTILINE | re.DOTALL)


def of(rule: Rule) -> str:
    return rule.name


@pytest.mark.long
@pytest.mark.parametrize("command", [("check", "config"), ("test", "rules")])
def test_promtool_has_nothing_to_say_against_them(command: tuple[str, str]) -> None:
    file = "prometheus.yml" if command[0] == "check" else RULES_TEST.name
    ended = promtool(*command, file, cwd=PROMETHEUS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "SUCCESS" in ended.stdout


@pytest.mark.long
def test_promtool_finds_an_alert_that_no_longer_fires(tmp_path: Path) -> None:
    """A negative control: the tests can fail."""
    for file in ("rules.yaml", "rules_test.yaml"):
        text = (PROMETHEUS / file).read_text(encoding="utf-8")
        (tmp_path / file).write_text(text.replace("admission_store_available) == 0", "admission_store_available) == 2"))
    ended = promtool("test", "rules", "rules_test.yaml", cwd=tmp_path)
    assert ended.returncode != 0
    assert "AdmissionStoreLost" in ended.stdout + ended.stderr


def test_every_alert_is_seen_to_fire_and_to_be_silent() -> None:
    for test in yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]:
        assert any("ALERTS" in each["expr"] for each in test["promql_expr_test"]), test["name"]
    fired = set(FIRES.findall(RULES_TEST.read_text(encoding="utf-8")))
    assert fired == {alert.name for alert in alerts()}


@each("rule", rules(), ids=of)
def test_a_rule_names_metrics_and_labels_that_exist(rule: Rule) -> None:
    assert unknown(rule.expression) == set()
    assert re.search(r"admission_\w+", rule.expression)


@each("alert", alerts(), ids=of)
def test_an_alert_says_how_bad_what_to_look_at_and_where_to_read_on(alert: Rule) -> None:
    written = alert.written["annotations"]
    assert alert.written["labels"]["severity"] in {"critical", "warning"}
    assert set(written) == {"summary", "description", "runbook_url"}
    page, anchor = written["runbook_url"].split("#")
    assert ROOT / page == ALERTS_GUIDE
    assert anchor in anchors(ALERTS_GUIDE)


@each("alert", alerts(), ids=of)
def test_an_alert_tells_only_of_labels_that_it_has(alert: Rule) -> None:
    reported = set(re.findall(r"\$labels\.(\w+)", str(alert.written["annotations"])))
    recorded = "".join(rule.expression for rule in rules() if rule.name in alert.expression)
    kept = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", alert.expression + recorded))))
    assert reported
    assert reported <= kept


def test_the_panels_that_alerts_and_their_guide_name_are_on_the_dashboard() -> None:
    reported = [alert.written["annotations"]["description"] for alert in alerts()]
    text = "\n".join([ALERTS_GUIDE.read_text(encoding="utf-8"), *reported])
    named = set(re.findall(r'"([A-Z][^"]+)"', text)) - {"Admission"}
    assert "Share held" in named
    page = (ROOT / "sidecar" / "admin" / "page.html").read_text(encoding="utf-8")
    assert [name for name in named - {panel["title"] for panel in panels()} if name not in page] == []


def test_the_panels_that_an_operator_is_asked_to_read_are_on_the_dashboard() -> None:
    rows = [row[0] for row in table(ALERTS_GUIDE, "Reading the dashboard")]
    text = section(ALERTS_GUIDE, "Reading the dashboard")
    named = {title for row in rows for title in row.split(", ")} | set(re.findall(r'"([A-Z][^"]+)"', text))
    assert len(rows) > 10
    assert named <= {panel["title"] for panel in panels()}


def test_the_guide_has_a_section_for_every_alert_and_no_other() -> None:
    assert list(sections()) == [alert.name for alert in alerts()]


def sections() -> dict[str, str]:
    """What the guide says of each alert."""
    found = re.findall(
        r"^## (\w+)$(.*?)(?=^## |\Z)", ALERTS_GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return dict(found)


@each("alert", alerts(), ids=of)
def test_the_guide_says_of_every_alert_what_it_means_where_to_look_why_and_what_to_do_and_not(alert: Rule) -> None:
    parts = PART.findall(sections()[alert.name])
    assert [name for name, _ in parts] == PARTS
    assert [name for name, text in parts if len(text.split()) < 5] == []
