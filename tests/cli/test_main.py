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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sidecar.cli import COMMANDS, main
from sidecar.policy.compiler import shipped_policies
from tests.support.in_process import ran

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


def test_a_reader_of_a_help_that_ends_early_gets_no_traceback() -> None:
    assert _shell(f"{SIDECAR} replay --help | true").stderr == ""


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


def test_a_port_that_is_another_programs_is_said_to_be_none_of_ours() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        for command, said in (
            ("top", "answers, but has no /overview (404): is it the admin port?"),
            ("observed", "answers, but has no /observed (404): is it the admin port?"),
            ("explain --request 1", "answers, but has no /requests/1 (404): is it the admin port?"),
        ):
            ended = ran(*command.split(), "--admin", f"http://127.0.0.1:{server.server_port}")
            assert (ended.returncode, said in ended.stderr, ended.stderr.count("\n")) == (1, True, 1), ended.stderr
        server.shutdown()


def test_a_server_imports_nothing_that_draws_for_people() -> None:
    imports = "import sidecar.cli.serve, sidecar.cli.serve_check, sidecar.serving, sidecar.workers.supervisor"
    drawn = "{'rich', 'jinja2', 'pygments'} & {*sys.modules}"
    code = f"import sys; {imports}; import sidecar; sidecar.AdmissionMiddleware; print({drawn})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
