"""Peers side by side: our own part of the comparison runs, and its report and its page are made from the kept run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import none, ours, report
from benchmarks.peers.cost import Cost
from benchmarks.peers.scenarios import SCENARIOS
from benchmarks.peers.setting import Figure

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "peers.json"


def values(figures: list[Figure]) -> dict[str, float | None]:
    return {one.name: one.value for one in figures}


def test_our_proxy_keeps_to_the_engines_tokens_where_no_gateway_does_not() -> None:
    found = values([*SCENARIOS["tokens"].play(ours.OURS, True)])
    assert 9_000 <= (found["most tokens at the engine"] or 0) <= 10_000
    assert (found["refused (4xx)"], found["failed"]) == (0, 0)
    straight = values([*SCENARIOS["tokens"].play(none.NONE, True)])
    assert (straight["most tokens at the engine"] or 0) > 10_000


@pytest.mark.soak
def test_the_command_prints_its_report_and_adds_to_its_file(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    words = ["--only", "cost", "--peer", "ours", "--quick", "--json", str(file)]
    line = [sys.executable, "-m", "benchmarks.peers", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "our proxy with admission" in done.stdout
    assert json.loads(file.read_text())["cost"]["our proxy alone"]["request_us"] > 0


def test_a_cost_above_what_is_asked_is_missed_and_one_below_is_not() -> None:
    document = report.empty("")
    smg, dear, cheap = Cost((100.0,), (10.0,)), Cost((151.0,), (8.1,)), Cost((150.0,), (8.0,))
    report.add_cost(document, {"smg": smg, "dear": dear, "cheap": cheap}, "smg")
    assert len(report.missed(document, "dear")) == 2
    assert report.missed(document, "cheap") == []


def test_a_peer_that_was_not_played_has_words_in_place_of_figures() -> None:
    document = report.empty("")
    document["peers"] = {"ours": "ours", "smg": "smg"}
    report.add(document, "window", "calls", {"ours": [Figure("calls answered of 27", 3.0, "")]})
    assert "| has none over HTTP |" in report.markdown(document)


def test_the_page_has_the_table_of_the_kept_run() -> None:
    kept = json.loads(KEPT.read_text())
    assert report.markdown(kept) in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert KEPT.with_suffix(".txt").read_text(encoding="utf-8") == report.text(kept)
