"""What the launchers' tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from sidecar.cli import main
from sidecar.launchers.checks import TRIED_VARIABLE
from tests.launchers.launched import STAND_INS

Refusal = Callable[..., str]
_LEFT_BEHIND = ("tensorrt_llm", "sglang", "sidecar.launchers.sglang_app")


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refusal]:
    """Runs a launcher, in this process, that must not start anything; returns the one line that it says."""
    for name in [*os.environ, "SIDECAR_POLICY", "SIDECAR_PROCESSES", TRIED_VARIABLE]:
        if name.startswith("SIDECAR_"):
            monkeypatch.setenv(name, "")  # so that what the launcher sets is undone, too
            monkeypatch.delenv(name)

    def run(*arguments: str, installed: bool = True) -> str:
        if installed:
            monkeypatch.syspath_prepend(str(STAND_INS))
        assert main(arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("sidecar: ")
        return line.removeprefix("sidecar: ")

    yield run
    for module in [name for name in sys.modules if name.startswith(_LEFT_BEHIND)]:
        del sys.modules[module]
