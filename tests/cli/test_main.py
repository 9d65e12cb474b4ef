"""Every command with the streams that users have: closed, full, in another encoding, interrupted."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from sidecar.cli import COMMANDS, main
from sidecar.policy.compiler import shipped_policies
from tests.support.in_process import complaint, ran

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
def test_a_command_that_is_none_names_the_nearest(typed: str, said: str) -> None:
    assert f"{typed!r} is no command; {said}" in complaint(typed, code=2)


def test_every_help_has_an_example_and_the_commands_own_words() -> None:
    for name in COMMANDS:
        ended = ran(name, "--help")
        assert (name, ended.returncode) == (name, 0)
        assert f"\nexample:\n  sidecar {name}" in ended.stdout
        assert [line for line in ended.stdout.splitlines() if len(line) > 120] == []


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"{SIDECAR} check {POLICIES} >&-", 0, ""),
        (f"{SIDECAR} check nothing 2>&-", 1, ""),
        (f"{SIDECAR} keys hash <&-", 1, "no key was given"),
        (f"{SIDECAR} top --admin http://127.0.0.1:9 <&-", 1, "no answer from http://127.0.0.1:9: connection refused; "),
        (f"{SIDECAR} check {POLICIES} > /dev/full", 1, "cannot write to standard output: No space left on device"),
    ],
)
def test_a_stream_that_is_closed_or_full_is_no_defect(line: str, code: int, said: str) -> None:
    if "/dev/full" in line and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    ended = _shell(line)
    assert (ended.returncode, "Traceback" in ended.stderr, said in ended.stderr) == (code, False, True), ended.stderr


def test_a_path_that_the_terminals_encoding_lacks_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(POLICIES, tmp_path / "\u65e5")
    monkeypatch.chdir(tmp_path)
    for encoding in ("ascii", "latin-1"):
        for command in ("check \u65e5", "check \u65e5 --json -", "check nothing-\u65e5", "explain \u65e5 --path /v1/x"):
            streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
            with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
                code = main(command.split())
                streams[1].flush()
            assert code == (1 if "nothing" in command else 0)
            written = [stream.buffer.getvalue().decode(encoding) for stream in streams]
            assert "\\u65e5" in "".join(written) or command.startswith("explain")


@pytest.mark.long
def test_a_process_in_the_c_locale_escapes_it_too(tmp_path: Path) -> None:
    shutil.copytree(POLICIES, tmp_path / "\u65e5")
    ended = _shell(f"{SIDECAR} check \u65e5", tmp_path, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr


def test_a_path_that_is_no_text_is_escaped_and_its_json_is_json(tmp_path: Path) -> None:
    try:
        shutil.copytree(POLICIES, tmp_path / "b\udcff")
    except OSError:
        pytest.skip("this file system has no such names")
    text, figures = _shell(f"{SIDECAR} check $'b\\xff' --json {tmp_path}/j", tmp_path), tmp_path / "j"
    assert text.stdout.startswith("b\\udcff/policy.yaml: engine ")
    assert json.loads(figures.read_text())["files"][0] == "b\udcff/policy.yaml"


@pytest.mark.parametrize(
    "command",
    [
        "top --admin {url}",
        pytest.param("observed --admin {url}", marks=pytest.mark.long),
        "explain --request 1 --admin {url}",
        "doctor --upstream {url}",
        pytest.param("init --upstream {url}", marks=pytest.mark.long),
        "replay burst:1 --upstream {url}",
    ],
)
def test_ctrl_c_ends_a_command_that_waits_without_a_traceback(command: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and answers nothing
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        argv = [sys.executable, "-m", "sidecar.cli", *command.format(url=url).split()]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(argv, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
            try:
                with silent.accept()[0]:
                    process.send_signal(signal.SIGINT)
                    _, said = process.communicate(timeout=60)
            finally:
                process.kill()
    assert (process.returncode, said) == (130, b"")


def test_ctrl_c_while_a_key_is_awaited_ends_it_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def read(self, _: int | None = None) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    ended = ran("keys", "hash")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_server_imports_nothing_that_draws_for_people() -> None:
    imports = (
        "import sidecar.cli.serve, sidecar.cli.serve_check, sidecar.composition.serving, sidecar.workers.supervisor"
    )
    drawn = "{'rich', 'jinja2', 'pygments'} & {*sys.modules}"
    code = f"import sys; {imports}; import sidecar; sidecar.AdmissionMiddleware; print({drawn})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


ADMIN_COMMANDS = {
    "top": "/overview", "observed": "/observed", "explain --request 1": "/requests/1", "engines list": "/engines",
    "tenants list": "/tenants?after=", "usage": "/usage?",
}  # fmt: skip
STRANGERS = {
    "": "no answer from {url}: ",
    "SSH-2.0-OpenSSH_9.6\r\n": "no answer from {url}: ",
    "HTTP/1.0 404 Not Found\r\n\r\n": "{url} answers, but has no {path} (404): is it the admin port?",
    "HTTP/1.0 200 OK\r\n\r\n<html>": "{url}{path} is not what this version of sidecar reads",
    'HTTP/1.0 503 No\r\n\r\n{"error": {"code": "no_worker", "message": "no worker serves"}}': "no worker serves\n",
}


@pytest.mark.parametrize("answer", STRANGERS, ids=["nothing", "ssh", "404", "html", "starting"])
def test_a_port_that_has_no_answer_to_give_is_said_in_a_line_by_every_command(answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"

        def serve() -> None:
            for _ in ADMIN_COMMANDS:
                with other.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(answer.encode())

        threading.Thread(target=serve, daemon=True).start()
        for command, path in ADMIN_COMMANDS.items():
            ended = ran(*command.split(), "--admin", url)
            assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
            assert ended.stderr.startswith(f"sidecar {command.split()[0]}: ")
            assert STRANGERS[answer].format(url=url, path=path) in ended.stderr


def test_a_file_that_cannot_be_written_is_said_before_anything_is_asked_or_sent(tmp_path: Path) -> None:
    """Nothing answers at any of these addresses."""
    target, nobody = str(tmp_path / "missing" / "file"), "http://127.0.0.1:9"
    asking = [f"{command} --admin {nobody} --json" for command in ADMIN_COMMANDS if command.split()[0] not in _SHORT]
    replay = [f"replay burst --upstream {nobody} {option}" for option in ("--json", "--report", "--requests")]
    for command in (*asking, *replay, f"doctor --upstream {nobody} --json", "demo --json", "simulate burst --report"):
        ended = ran(*command.split(), target)
        assert ended.returncode == (2 if command.startswith("doctor") else 1), command
        assert ended.stderr == f"sidecar {command.split()[0]}: cannot write {target}: No such file or directory\n"
    for command in (f"check {POLICIES} --json", f"explain {POLICIES} --path /v1/models --json"):
        ended = ran(*command.split(), target)
        assert (ended.returncode, ended.stderr) == (1, f"{target}: cannot be written (No such file or directory)\n")


_SHORT = ("top", "explain")
"""Commands that are done in a moment: they find out when they write."""
