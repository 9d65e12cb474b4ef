"""A fleet before `sidecar emulate --replicas`: processes that start late, are stopped, killed, and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.engines.pages import Health
from sidecar.policy.fleet import EngineAddress
from sidecar.policy.rules import UNLIMITED
from tests.cluster.replicas import started
from tests.fleet.engines import READ, fleet_of, states
from tests.support.ports import free_ports
from tests.support.waiting import open_sockets, other_tasks, until

pytestmark = pytest.mark.anyio
HEALTH = Health("/health", every_s=0.5, fail=2, rise=2)


@dataclass
class Engines:
    """Emulated engines, each with a process of its own."""

    process: subprocess.Popen[str]
    port: int
    pids: dict[int, int]

    def addresses(self) -> list[EngineAddress]:
        return [
            EngineAddress(f"e{port - self.port}", f"http://127.0.0.1:{port}", READ, UNLIMITED)
            for port in sorted(self.pids)
        ]

    def kill(self, number: int, sig: signal.Signals) -> None:
        os.kill(self.pids[self.port + number], sig)


@contextmanager
def emulated(folder: Path, count: int, port: int, *more: str) -> Iterator[Engines]:
    """Returns when all answer; with a delay, after that."""
    arguments = ("emulate", "--engine", "vllm", "--replicas", str(count), "--port", str(port), "--kv-tokens", "20000")
    with started(folder / f"engines-{port}", *arguments, *more) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        found = [re.search(r":(\d+), model.* process (\d+)", line) for line in lines]
        assert all(found), lines
        try:
            yield Engines(process, port, {int(match[1]): int(match[2]) for match in found if match})
        finally:
            for match in found:
                if match is not None:
                    _kill(int(match[2]))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.long
async def test_engines_that_are_stopped_killed_and_started_again(tmp_path: Path) -> None:
    tasks, sockets = other_tasks(), open_sockets()
    port = free_ports(3)
    with emulated(tmp_path, 3, port) as engines:
        async with fleet_of(engines.addresses(), HEALTH) as fleet:
            assert states(fleet) == {"e0#1": "ready", "e1#1": "ready", "e2#1": "ready"}
            engines.kill(1, signal.SIGSTOP)
            await until(lambda: states(fleet)["e1#1"] == "down")
            assert "was not answered within 2 s" in fleet.notices()[-1]
            engines.kill(1, signal.SIGCONT)
            await until(lambda: states(fleet)["e1#1"] == "ready")
            engines.kill(2, signal.SIGKILL)
            await until(lambda: states(fleet)["e2#1"] == "down")
            assert fleet.notices()[0].startswith("engine e2 gets no requests (down): connection refused by http://")
            again = tmp_path / "again"
            again.mkdir()
            with emulated(again, 1, port + 2):
                await until(lambda: states(fleet) == {"e0#1": "ready", "e1#1": "ready", "e2#2": "starting"})
                assert fleet.notices() == []
            await until(lambda: states(fleet)["e2#2"] == "down")
    await until(lambda: (other_tasks(), open_sockets()) == (tasks, sockets))


@pytest.mark.long
async def test_an_engine_that_loads_for_long_is_down_and_then_starts_slowly(tmp_path: Path) -> None:
    port = free_ports(1)
    addresses = [EngineAddress("a", f"http://127.0.0.1:{port}", READ, UNLIMITED)]
    async with fleet_of(addresses, HEALTH) as fleet:
        assert states(fleet) == {"a#1": "down"}
        with emulated(tmp_path, 1, port, "--startup-delay", "3s"):
            await until(lambda: states(fleet) == {"a#1": "starting"})
