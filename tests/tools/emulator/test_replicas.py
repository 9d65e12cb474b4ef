"""Several engines, a process each: who answers where, and who survives whom."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sidecar.cli import main
from tests.support.commands import command
from tests.support.http import fetch
from tests.support.in_process import complaint
from tests.support.ports import free_ports
from tests.support.redis_servers import until


class Engine(NamedTuple):
    url: str
    process: int

    def page(self, path: str = "/_emulator") -> Any:
        return fetch(self.url + path).json

    def complete(self, tokens: int) -> float:
        """Seconds that one request took."""
        begun_s = time.monotonic()
        assert fetch(f"{self.url}/v1/completions", {"prompt": "x", "max_tokens": tokens}).status == 200
        return time.monotonic() - begun_s

    @property
    def is_gone(self) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", int(self.url.rsplit(":", 1)[1]))) != 0


@contextmanager
def engines(count: int, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Engine]]]:
    arguments = ["emulate", "--engine", "vllm", "--replicas", str(count), "--port", "0", *flags]
    with command(*arguments) as process:
        yield process, dict(greeting(line_of(process)) for _ in range(count))


def is_bound(port: int) -> bool:
    with socket.socket() as mine:
        try:
            mine.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def line_of(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline()


def greeting(line: str) -> tuple[str, Engine]:
    found = re.match(r"(engine-\d+): emulated vllm on (http://127\.0\.0\.1:\d+), .*, process (\d+)\n", line)
    assert found, line
    return found[1], Engine(found[2], int(found[3]))


def test_each_has_its_name_its_port_its_process_and_its_own_state() -> None:
    with engines(3) as (_, found):
        assert sorted(found) == ["engine-1", "engine-2", "engine-3"]
        assert len({engine.process for engine in found.values()}) == 3
        found["engine-2"].complete(1)
        pages = {name: engine.page() for name, engine in found.items()}
        assert {name: page["name"] for name, page in pages.items()} == {name: name for name in found}
        assert [pages[name]["counts"]["finished"] for name in sorted(found)] == [0, 1, 0]
        assert all(pages[name]["process"] == engine.process for name, engine in found.items())


@pytest.mark.long
def test_one_that_is_killed_is_reported_and_the_others_run_on() -> None:
    with engines(3) as (process, found):
        os.kill(found["engine-2"].process, signal.SIGKILL)
        said = line_of(process)
        assert said == (
            f"engine-2: {found['engine-2'].url} was killed by SIGKILL (process {found['engine-2'].process}); "
            "2 of 3 engines run\n"
        )
        assert found["engine-2"].is_gone
        assert found["engine-1"].complete(1)
        assert found["engine-3"].complete(1)
        os.kill(found["engine-1"].process, signal.SIGTERM)
        assert "engine-1" in (said := line_of(process))
        assert "ended with exit code 0" in said
        os.kill(found["engine-3"].process, signal.SIGKILL)
        assert "0 of 3 engines run" in line_of(process)
        assert process.wait(10) == 1


@pytest.mark.long
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_all(sig: signal.Signals) -> None:
    with engines(2) as (process, found):
        process.send_signal(sig)
        assert process.wait(10) == 0
        assert all(engine.is_gone for engine in found.values())
        assert process.stderr.read() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_while_they_start_ends_all_without_a_traceback() -> None:
    with command("emulate", "--engine", "vllm", "--replicas", "2", "--port", "0", "--startup-delay", "60s") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: len(children.read_text().split()) == 2, "never started them")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()


def test_they_end_with_the_process_that_started_them() -> None:
    with engines(2) as (process, found):
        process.kill()
        until(lambda: all(engine.is_gone for engine in found.values()), "no engine outlives the command")


@pytest.mark.long
def test_speed_is_for_all_or_for_each() -> None:
    with engines(2, "--speed", "1,0.25", "--step-ms", "10") as (_, found):
        fast, slow = found["engine-1"], found["engine-2"]
        assert slow.complete(50) / fast.complete(50) == pytest.approx(4, rel=0.35)


def test_it_refuses_connections_while_it_starts_and_has_its_port_all_the_same() -> None:
    port = free_ports(1)
    with command("emulate", "--engine", "vllm", "--port", str(port), "--startup-delay", "1500ms") as process:
        engine = Engine(f"http://127.0.0.1:{port}", 0)
        until(lambda: is_bound(port), "it bound its port")
        assert engine.is_gone
        assert engine.url in line_of(process)
        assert engine.page()["now"]["requests"] == 0


def test_a_port_in_the_row_that_is_taken_starts_none(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports(2) + 1
    with socket.create_server(("127.0.0.1", port)):
        assert main(["emulate", "--engine", "vllm", "--replicas", "2", "--port", str(port - 1)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--replicas", "0"], "--replicas must be between 1 and 64"),
        (["--replicas", "3", "--speed", "1,2"], "--speed has 2 factors for 3 engines"),
        (["--replicas", "2", "--port", "65535"], "need ports above 65535"),
        (["--speed", "0"], "speed must be above 0"),
        (["--block-size", "16"], "needs prefix_cache"),
    ],
)
def test_figures_that_do_not_fit_are_refused(flags: list[str], why: str) -> None:
    assert why in complaint("emulate", "--engine", "vllm", *flags, code=2)
