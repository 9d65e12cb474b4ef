"""The demo's processes: they end with the demo, however it ends, and what does not start is said."""

from __future__ import annotations

import pytest

from sidecar.tools.demo import runs
from sidecar.tools.demo.runs import CannotStart, Sharing, commands


def test_a_server_ends_when_the_demo_was_killed() -> None:
    with runs._start(["emulate", "--engine", "vllm", "--port", "0"], None) as server:
        assert runs._read_port(server) > 0
        server.stdin.close()  # what the kernel does for a process that was killed
        server.wait(10)


def test_a_server_that_does_not_start_is_said_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotStart, match="its error is above"), commands([["serve", "--policy", "no policy"]]):
        raise AssertionError("it started")
    assert "no policy" in capfd.readouterr().err


def test_two_demos_never_share_a_pool() -> None:
    first, second = (Sharing(3, "redis://127.0.0.1").pool for _ in range(2))
    assert first != second
