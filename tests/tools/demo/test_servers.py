"""The demo's processes: they end with the demo, however it ends, and what does not start is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.policy.compiler import shipped_policies
from sidecar.tools.demo.runs import RUNS, CannotStart, Sharing, servers


def test_a_server_ends_when_the_demo_was_killed() -> None:
    command = [sys.executable, "-m", "sidecar.tools.demo.server", "alone", str(shipped_policies())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert int(server.stdout.readline()) > 0
        server.stdin.close()  # what the kernel does for a process that was killed
        server.wait(10)


def test_a_server_that_does_not_start_is_said_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(CannotStart, match="its error is above"),
        servers(RUNS[:1], tmp_path / "no policy", has_page=True),
    ):
        raise AssertionError("it started")
    assert "no policy" in capfd.readouterr().err


def test_two_demos_never_share_a_pool() -> None:
    first, second = (Sharing(3, "redis://127.0.0.1").pool for _ in range(2))
    assert first != second
