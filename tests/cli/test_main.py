"""Every command with the streams that users have: closed, full, in another encoding, interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidecar.cli import COMMANDS, main
from sidecar.policy.compiler import shipped_policies

POLICIES = str(shipped_policies())
SIDECAR = f"{sys.executable} -m sidecar.cli"


def _shell(line: str, folder: Path | str = ".", **variables: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, as a user types it."""
    return subprocess.run(
        ["bash", "-c", line],
        check=False,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=120,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables,
    )


@pytest.mark.parametrize(("typed", "said"), [("chek", "did you mean check?"), ("xyz", "the commands are init, serve,")])
def test_a_command_that_is_none_names_the_nearest(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([typed])
    assert f"{typed!r} is no command; {said}" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example_and_the_commands_own_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert f"\nexample:\n  sidecar {name}" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"{SIDECAR} check {POLICIES} >&-", 0, ""),
        (f"{SIDECAR} check nothing 2>&-", 1, ""),
        (f"{SIDECAR} keys hash <&-", 1, "no key was given"),
        (f"{SIDECAR} keys hash < /dev/null", 1, "no key was given"),
        (f"{SIDECAR} top --admin http://127.0.0.1:9 <&-", 1, "no answer from http://127.0.0.1:9: connection refused; "),
        (f"{SIDECAR} check {POLICIES} > /dev/full", 1, "cannot write to standard output: No space left on device"),
    ],
)
def test_a_stream_that_is_closed_or_full_is_no_defect(line: str, code: int, said: str) -> None:
    if "/dev/full" in line and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    ran = _shell(line)
    assert (ran.returncode, "Traceback" in ran.stderr, said in ran.stderr) == (code, False, True), ran.stderr


@pytest.mark.parametrize("command", [f"check {POLICIES}", "replay --help", "keys new"])
def test_a_reader_that_ends_early_gets_no_traceback(command: str) -> None:
    ran = _shell(f"{SIDECAR} {command} | true")
    assert ran.stderr == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_a_path_that_the_terminals_encoding_lacks_is_escaped(tmp_path: Path, variables: dict[str, str]) -> None:
    shutil.copytree(POLICIES, tmp_path / "\u65e5")
    for command in ("check \u65e5", "check \u65e5 --json -", "check nothing-\u65e5", "explain \u65e5 --path /v1/x"):
        ran = _shell(f"{SIDECAR} {command}", tmp_path, **variables)
        assert ran.returncode == (1 if "nothing" in command else 0), ran.stderr
        assert "Traceback" not in ran.stderr


def test_a_path_that_is_no_text_is_escaped_and_its_json_is_json(tmp_path: Path) -> None:
    try:
        shutil.copytree(POLICIES, tmp_path / "b\udcff")
    except OSError:
        pytest.skip("this file system has no such names")
    ran = _shell(f"{SIDECAR} check $'b\\xff' --json -", tmp_path)
    assert json.loads(ran.stdout)["files"][0] == "b\udcff/policy.yaml"
    assert _shell(f"{SIDECAR} check $'b\\xff'", tmp_path).stdout.startswith("b\\udcff/policy.yaml: engine ")


@pytest.mark.parametrize(
    "command",
    [
        ("top", "--admin", "{url}"),
        ("observed", "--admin", "{url}"),
        ("explain", "--request", "1", "--admin", "{url}"),
        ("doctor", "--upstream", "{url}"),
        ("init", "--upstream", "{url}"),
        ("replay", "burst:1", "--upstream", "{url}"),
        ("keys", "hash"),
    ],
)
def test_ctrl_c_ends_a_command_that_waits_without_a_traceback(command: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and answers nothing
        silent.settimeout(30)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        argv = [sys.executable, "-m", "sidecar.cli", *(part.format(url=url) for part in command)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(argv, cwd=tmp_path, env=environment, **pipes) as process:
            try:
                if "{url}" in command:
                    held, _ = silent.accept()
                else:
                    held = None
                    time.sleep(5)  # until it reads its standard input
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=30)
                if held is not None:
                    held.close()
            finally:
                process.kill()
    assert (process.returncode, said) == (130, b"")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("top",), "answers, but has no /overview (404): is it the admin port?"),
        (("observed",), "answers, but has no /observed (404): is it the admin port?"),
        (("explain", "--request", "1"), "answered 404, but not as a sidecar's admin port does"),
    ],
)
def test_a_port_that_is_another_programs_is_said_to_be_none_of_ours(command: tuple[str, ...], said: str) -> None:
    server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
                          env=os.environ | {"PYTHONUNBUFFERED": "1"}) as other:  # fmt: skip
        try:
            assert other.stdout is not None
            port = other.stdout.readline().split(" port ")[1].split()[0]
            ran = _shell(f"{SIDECAR} {' '.join(command)} --admin http://127.0.0.1:{port}")
        finally:
            other.kill()
    assert ran.returncode == 1
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1
