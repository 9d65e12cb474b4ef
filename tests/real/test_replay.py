"""`sidecar replay` against real engines: the built-in burst by the engine's own priority, and a control."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from sidecar.cli import main
from tests.real.lab import dynamo, vllm

pytestmark = pytest.mark.engine


@contextmanager
def vllm_by_priority() -> Iterator[str]:
    with vllm(scheduling="priority") as engine:
        yield engine.url


@pytest.mark.parametrize("engine", [vllm_by_priority, dynamo])
def test_priority_is_seen_in_the_replay_and_not_in_its_control(
    engine: Callable[[], AbstractContextManager[str]], tmp_path: Path
) -> None:
    figures, report = tmp_path / "figures.json", tmp_path / "report.html"
    with engine() as url:
        line = ["replay", "burst:60", "--upstream", url, "--by", "priority", "--control", "--max-output", "16"]
        assert main([*line, "--json", str(figures), "--report", str(report)]) == 0
    played, control = json.loads(figures.read_text())["runs"]
    assert played["correlation"]["high"] < -0.6
    assert abs(control["correlation"]["value"]) < 0.5
    assert "<svg" in report.read_text()
