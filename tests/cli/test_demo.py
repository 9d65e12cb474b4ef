"""`sidecar demo` as a user runs it: once for real, three seconds of traffic; the rest with the runs taken out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.demo import running
from sidecar.demo.measuring import RunFigures
from tests.demo.figures import run_figures, three

DISTRIBUTIONS = ("ttft_s", "queue_wait_s", "starvation_s")
LADDER = ["critical", "high", "normal", "low", "batch"]
Play = Callable[..., RunFigures]


def test_three_seconds_of_it_show_what_admission_does(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    command = [sys.executable, "-m", "sidecar.cli", "demo", "--seconds", "3", "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "With more requests than the engine can run, high has its first token after" in ended.stdout
    assert "admission" in ended.stderr, "no progress was shown"

    runs = {run.pop("name"): run for run in json.loads(file.read_bytes())["runs"]}
    assert list(runs) == ["control", "engine", "admission"]
    for run in runs.values():
        assert run["failed"] == 0
        assert 0.5 < run["utilization"] <= 1.01
        assert list(run["tiers"]) == LADDER
        assert sum(tier["share"] for tier in run["tiers"].values()) == pytest.approx(1)
        for tier in run["tiers"].values():
            assert set(tier) == {"requests", "share", *DISTRIBUTIONS}
            for name in DISTRIBUTIONS:
                assert list(tier[name]) == ["p50", "p95", "p99"]
                assert sorted(tier[name].values()) == list(tier[name].values())
            assert tier["starvation_s"]["p99"] <= tier["queue_wait_s"]["p99"]
    counts = [{name: tier["requests"] for name, tier in run["tiers"].items()} for run in runs.values()]
    assert counts[0] == counts[1] == counts[2], "the runs had different arrivals"

    def late_s(run: str, tier: str, figure: str = "ttft_s") -> float:
        # Not the median: the queue takes half of these three seconds to form.
        return float(runs[run]["tiers"][tier][figure]["p95"])

    # On an idle machine 0.2 s against 0.9 s; a busy one adds to both.
    assert late_s("admission", "high") < late_s("control", "high") / 1.5
    assert late_s("admission", "high", "queue_wait_s") < late_s("control", "high", "queue_wait_s") / 2
    # At equal priority a request waits only its turn.
    assert late_s("control", "batch", "starvation_s") < 0.1


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], None]:
    """Replaces the servers, and the playing of a run by what the test gives."""

    @contextmanager
    def servers(_: Path) -> Iterator[dict[str, int]]:
        yield dict.fromkeys(("control", "engine", "admission"), 1)

    def replace(play: Play) -> None:
        monkeypatch.setattr(running, "servers", servers)
        monkeypatch.setattr(running, "play_run", play)

    return replace


def figures_of(run: running.Run, *_: Any) -> RunFigures:
    return {figures.name: figures for figures in three()}[run.name]


def test_json_on_standard_output_is_alone_there(
    no_servers: Callable[[Play], None], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    no_servers(figures_of)
    assert main(["demo", "--json", "-"]) == 0
    out, error = capfdbinary.readouterr()
    assert [run["name"] for run in json.loads(out)["runs"]] == ["control", "engine", "admission"]
    assert b"its floor holds" in error


def test_a_failed_request_is_a_failed_demo(
    no_servers: Callable[[Play], None], capsys: pytest.CaptureFixture[str]
) -> None:
    no_servers(lambda run, *_: run_figures(run.name, failed=1))
    assert main(["demo"]) == 1
    assert "1 failed" in capsys.readouterr().out


def test_every_run_gets_the_same_arrivals(no_servers: Callable[[Play], None]) -> None:
    played = []

    def play(run: running.Run, _: int, arrivals: Any, *__: Any) -> RunFigures:
        played.append((run.name, arrivals))
        return figures_of(run)

    no_servers(play)
    assert main(["demo", "--seed", "4", "--seconds", "1"]) == 0
    assert [name for name, _ in played] == ["control", "engine", "admission"]
    assert played[0][1] == played[1][1] == played[2][1]


def test_a_file_that_cannot_be_written_is_said_so_before_anything_runs(
    no_servers: Callable[[Play], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(*_: Any) -> RunFigures:
        raise AssertionError("it ran")

    no_servers(play)
    assert main(["demo", "--json", str(tmp_path / "missing" / "demo.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_a_time_that_nobody_can_play_is_said_so(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", f"--seconds={seconds}"])
    assert "write seconds" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    assert "sidecar demo --json demo.json" in capsys.readouterr().out
