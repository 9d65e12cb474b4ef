"""The suite runs under nohup and in the background of a shell, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IGNORING = 'trap "" HUP INT QUIT; exec "$@"'
STARTS = """
import os, signal, subprocess, sys
asks = "import signal; print([signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3)])"
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGINT)
print(subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True).stdout)
"""


def _ran(code: str) -> str:
    command = ["sh", "-c", IGNORING, "sh", sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("code", "ignored"),
    [(STARTS, "[True, True, True]"), (f"import tests.conftest\n{STARTS}", "[False, False, False]")],
    ids=["without the suite's configuration", "with it"],
)
def test_what_a_test_starts_has_the_default_of_signals_that_the_suite_ignores(code: str, ignored: str) -> None:
    assert ignored == _ran(code)
