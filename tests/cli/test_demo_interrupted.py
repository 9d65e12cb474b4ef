"""`sidecar demo`, broken off: it ends at once, with every process and port that it opened, and without a traceback."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.commands import command
from tests.support.redis_servers import RedisServer, first_binary

MARK = "TEST_MARK"
"""No setting of a sidecar: those are not for the demo's servers."""
ENDS_WITHIN_S = 30.0
"""A second for servers that do not end in order, and a busy machine."""
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="it reads the environment in /proc")


def marked(mark: str) -> list[int]:
    """Processes with that mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            is_dead = "\nState:\tZ" in (folder / "status").read_text()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and not is_dead:
            found.append(int(folder.name))
    return found


@contextmanager
def demo(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    mark = secrets.token_hex(8)
    with command("demo", *arguments, **{MARK: mark}) as process:
        try:
            yield process, mark
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)


def ends(process: subprocess.Popen[str], mark: str, number: signal.Signals) -> tuple[str, str]:
    """Sends the signal; gives what was printed when all processes are gone."""
    process.send_signal(number)
    out, errors = process.communicate(timeout=ENDS_WITHIN_S)
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while left := marked(mark):
        assert time.monotonic() < deadline_s, f"still running: {left}"
        time.sleep(0.05)
    return out, errors


def awaits(process: subprocess.Popen[str], errors: str) -> None:
    """Reads its standard error up to a line like that."""
    while line := process.stderr.readline():
        if re.search(errors, line):
            return
    raise AssertionError("it ended before")


@pytest.mark.parametrize("after_s", [
    0.5,
    *(pytest.param(it, marks=pytest.mark.long) for it in (0.2, 1.2)),
    *(pytest.param(it, marks=pytest.mark.soak) for it in (0.8, 1.7, 2.4)),
])  # fmt: skip
def test_while_it_starts(after_s: float) -> None:
    with demo() as (process, mark):
        time.sleep(after_s)
        _, errors = ends(process, mark, signal.SIGINT)
    assert process.returncode in (130, -signal.SIGINT)  # the latter before Python has begun to run our code
    if process.returncode == 130:
        assert errors == "" or "sent" in errors
    assert "Exception ignored" not in errors


@pytest.mark.parametrize(("line", "number", "code"), [
    pytest.param(r"control.* 0\.0 s", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.long),
    pytest.param(r"control.* [1-3]\.\d s", signal.SIGINT, 130, marks=pytest.mark.soak),
    pytest.param(r"Now on the live page", signal.SIGINT, 130, marks=pytest.mark.soak),
    pytest.param(r"admission .* [1-9]\.\d s", signal.SIGINT, 130, marks=pytest.mark.soak),
    pytest.param(r"admission .* 0\.0 s", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.soak),
])  # fmt: skip
def test_while_it_plays(line: str, number: signal.Signals, code: int) -> None:
    with demo("--seconds", "3") as (process, mark):
        awaits(process, line)
        assert len(marked(mark)) == 1 + 3 + 1
        _, errors = ends(process, mark, number)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert "Exception" not in errors


@pytest.mark.parametrize("after", [
    pytest.param(r"control.* 0\.0 s", marks=pytest.mark.long),
    pytest.param(r"Now on the live page", marks=pytest.mark.soak),
    pytest.param(r"admission .* [1-9]\.\d s", marks=pytest.mark.soak),
])  # fmt: skip
def test_replicas_end_too(after: str, tmp_path: Path) -> None:
    with RedisServer(first_binary(), tmp_path) as store:
        with demo("--seconds", "3", "--replicas", "2", "--store", store.url) as (process, mark):
            awaits(process, after)
            assert len(marked(mark)) == 1 + 3 + 2
            _, errors = ends(process, mark, signal.SIGINT)
        assert process.returncode == 130
        assert "Traceback" not in errors


@pytest.mark.long
def test_a_page_that_is_open_does_not_hold_it_up() -> None:
    with demo("--seconds", "3") as (process, mark):
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert address
        reading: Sequence[str] = ["curl", "-sN", f"{address[0]}/overview/stream"]
        with subprocess.Popen(reading, stdout=subprocess.PIPE) as page:
            assert page.stdout.readline()
            awaits(process, r"control.* 0\.0 s")
            assert len(marked(mark)) == 1 + 3 + 1
            began_s = time.monotonic()
            _, errors = ends(process, mark, signal.SIGINT)
            assert time.monotonic() - began_s < ENDS_WITHIN_S
            page.communicate(timeout=ENDS_WITHIN_S)  # it ends once what it wrote is read: a pipe holds 64 KiB
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "Exception" not in errors
