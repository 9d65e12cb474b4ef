"""`sidecar top` as a user runs it: in a real terminal, in a pipe, and before a port that is none."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from sidecar.cli import main
from tests.cluster.views import overview
from tests.support.in_process import complaint, output
from tests.support.pages import PageServer, serving_pages

ENTERS, LEAVES = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def admin() -> Iterator[PageServer]:
    """An admin port with an overview that a test can change."""
    with serving_pages({"/overview": (200, msgspec.json.encode(overview()).decode())}) as server:
        yield server


class Terminal:
    """A pseudo-terminal in which the command runs."""

    def __init__(self, *arguments: str, rows: int = 40, columns: int = 100, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.text = ""
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        environment = {"TERM": "xterm-256color", "PYTHONUTF8": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sidecar.cli", "top", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env={**inherited, **environment}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,  # noqa: PLW1509 - a terminal of its own
        )  # fmt: skip

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def until(self, words: str, within_s: float = 10.0) -> str:
        """Reads until something was written; returns what came since the last time, and forgets it."""
        end_s = time.monotonic() + within_s
        while words not in self.text:
            assert time.monotonic() < end_s, f"no {words!r} in {self.text!r}"
            if select.select([self._master], [], [], 0.05)[0]:
                self.text += os.read(self._master, 65536).decode("utf-8", "replace")
        read, self.text = self.text, ""
        return read

    def ends(self) -> tuple[int, str]:
        """Its exit code and the rest of what it wrote; the terminal is as it was found."""
        code = self.process.wait(10)
        while select.select([self._master], [], [], 0.1)[0]:
            self.text += os.read(self._master, 65536).decode("utf-8", "replace")
        assert termios.tcgetattr(self._slave) == self.before
        return code, self.text


@contextmanager
def terminal(*arguments: str, **settings: object) -> Iterator[Terminal]:
    opened = Terminal(*arguments, **settings)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened._master)
        os.close(opened._slave)


def test_it_draws_in_a_terminal_of_its_own_until_q(admin: PageServer) -> None:
    with terminal("--admin", admin.url, "--interval", "200ms") as screen:
        drawn = screen.until("batch starves: its oldest request")
        assert ENTERS in drawn
        assert "\x1b[1;31m" in drawn  # the headline, in red
        calm = msgspec.structs.replace(overview(), headline="No request waits.", starving=None)
        admin.by_path["/overview"] = (200, msgspec.json.encode(calm).decode())
        screen.until("No request waits.")
        screen.press(b"q")
        code, rest = screen.ends()
        assert (code, rest.count(LEAVES)) == (0, 1)


@pytest.mark.parametrize(
    ("how", "code"), [(b"\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["ctrl-c", "kill", "hang-up"]
)
def test_however_it_is_ended_the_terminal_is_as_before(
    admin: PageServer, how: bytes | signal.Signals, code: int
) -> None:
    with terminal("--admin", admin.url, "--interval", "1m") as screen:
        screen.until("batch")
        if isinstance(how, bytes):
            screen.press(how)
        else:
            screen.process.send_signal(how)
        ended, rest = screen.ends()
        assert ended == code
        assert rest.endswith(f"\x1b[?25h{LEAVES}")
        assert "Traceback" not in rest


def test_it_follows_the_windows_size_at_once_and_says_what_does_not_fit(admin: PageServer) -> None:
    with terminal("--admin", admin.url, "--interval", "1m", rows=40, columns=140) as screen:
        assert "WAITS, 5 MIN" in screen.until("LAST REFUSALS")
        screen.resize(8, 60)
        drawn = screen.until("more lines: a taller window shows them)")
        assert "WAITS, 5 MIN" not in drawn
        assert drawn.rpartition("\x1b[H")[2].count("\r\n") == 7


def test_a_sidecar_that_goes_away_is_said_and_looked_for_again(admin: PageServer) -> None:
    with terminal("--admin", admin.url, "--interval", "200ms") as screen:
        screen.until("batch starves")
        page = admin.by_path.pop("/overview")
        drawn = screen.until("trying again")
        assert "batch starves" in drawn + screen.until("batch starves")  # the last that was seen stays
        admin.by_path["/overview"] = page
        for _ in range(20):
            if "trying again" not in screen.until("LAST REFUSALS"):
                break
        else:
            raise AssertionError("it still says that there is trouble")
        screen.press(b"q")
        assert screen.ends()[0] == 0


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colors_it_has_none(admin: PageServer, environment: dict[str, str]) -> None:
    with terminal("--admin", admin.url, "--once", **environment) as screen:
        code, text = screen.ends()
        assert code == 0
        assert "batch starves" in text
        assert "\x1b" not in text


def test_in_a_pipe_it_prints_one_plain_picture(admin: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--admin", admin.url]) == 0
    said = capsys.readouterr()
    assert "batch starves" in said.out
    assert "\x1b" not in said.out
    assert said.err == ""


def test_json_is_the_overview_itself(admin: PageServer, tmp_path: Path) -> None:
    assert json.loads(output("top", "--admin", f"{admin.url}/", "--json", "-")) == json.loads(
        admin.by_path["/overview"][1]
    )
    path = tmp_path / "overview.json"
    assert "batch starves" in output("top", "--admin", admin.url, "--json", path)
    assert json.loads(path.read_text()) == json.loads(admin.by_path["/overview"][1])


@pytest.mark.parametrize(
    "arguments", [["--admin", "localhost:9464"], ["--admin", "ftp://x"], ["--interval", "1ms"], ["--interval", "soon"]]
)
def test_a_wrong_argument_is_said_so(arguments: list[str]) -> None:
    assert f"argument {arguments[0]}" in complaint("top", *arguments, code=2)
