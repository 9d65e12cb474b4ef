"""Says at the end how much was tried."""

from __future__ import annotations

import pytest

from tests.fuzz.scale import IS_FULL, VARIABLE, tried


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if IS_FULL and tried:
        terminalreporter.section(f"fuzzing, {VARIABLE}={IS_FULL}")
        for what, count in tried.items():
            terminalreporter.write_line(f"{count:8,}  {what}")
        terminalreporter.write_line(f"{tried.total():8,}  cases")
