"""`sidecar serve` as a user runs it: what it prints, and what it says where it cannot begin."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.policy.compiler import shipped_policies
from tests.support.commands import command
from tests.support.http import fetch
from tests.support.in_process import complaint

POLICIES = str(shipped_policies())
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


def serving(*more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    ours = ("serve", "--upstream", NOBODY, "--policy", POLICIES, "--port", "0", "--admin-port", "0", *more)
    return command(*ours)


def line(process: subprocess.Popen[str], pattern: str) -> str:
    read = process.stdout.readline()
    found = re.fullmatch(pattern, read.strip())
    assert found, read or (process.stderr and process.stderr.read())
    return found[1]


def test_it_says_where_it_serves_answers_there_and_ends_with_0() -> None:
    with serving() as process:
        sidecar = line(process, r"sidecar: proxy on (http://127\.0\.0\.1:\d+)")
        admin = line(process, r"sidecar: admin on (http://127\.0\.0\.1:\d+)")
        not_ready = fetch(f"{admin}/readyz")
        reasons = [f"the engine does not answer: connection refused by {NOBODY}"]
        assert (not_ready.status, not_ready.json["reasons"]) == (503, reasons)
        state = fetch(f"{admin}/state").json
        assert state["pool"]["capacity"] == {"tokens": 400_000, "requests": 160}
        assert [tier["tier"] for tier in state["pool"]["tiers"]] == ["critical", "high", "normal", "low", "batch"]

        refused = fetch(f"{sidecar}/v1/models")
        assert (refused.status, refused.json["error"]["code"]) == (502, "engine_unreachable")
        named = fetch(f"{sidecar}/v1/foo", {}).headers["x-request-id"]

        for path, kind in (("/", "text/html"), ("/overview", "application/json"), ("/metrics", "text/plain")):
            assert fetch(admin + path).headers["content-type"].startswith(kind)
        assert fetch(f"{admin}/requests/nobody").status == 404

        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        logged = [json.loads(written) for written in process.stderr.read().splitlines()]
        assert [entry["event"] for entry in logged] == [
            *["policy_warning"] * 2,
            "engine_down",
            "started",
            "started",
            "engine_unreachable",
            "refused",
            "draining",
            "stopped",
        ]
        assert re.search(
            r"policy.yaml:\d+: tiers.low: accepts requests of many times its reserve", logged[0]["message"]
        )
        assert logged[5]["message"].startswith(f"engine {NOBODY}: no connection to it")
        of_it = [logged[6][name] for name in ("request_id", "route", "code", "status")]
        assert of_it == [named, "other", "not_guarded", 404]
        said = f"request {named} refused with 404 not_guarded: POST to this path is not guarded"
        assert logged[6]["message"].startswith(said)


def test_the_process_ends_soon_after_stopped_and_a_signal_meanwhile_shows_no_traceback() -> None:
    with serving("--log-format", "json") as process:
        line(process, r"sidecar: proxy on (.*)")
        line(process, r"sidecar: admin on (.*)")
        process.send_signal(signal.SIGINT)
        while '"event": "stopped"' not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        process.wait(60)
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_a_policy_of_the_environment_serves_and_the_log_can_be_text_of_errors_alone() -> None:
    serve = ("serve", "--upstream", NOBODY, "--port", "0", "--admin-port", "0")
    with command(*serve, "--log-format", "text", "--log-level", "error", SIDECAR_POLICY=POLICIES) as process:
        line(process, r"sidecar: proxy on (.*)")
        admin = line(process, r"sidecar: admin on (.*)")
        with pytest.raises(urllib.error.HTTPError) as missing:
            urllib.request.urlopen(f"{admin}/nothing-here", timeout=30)
        missing.value.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_it_serves_on_a_unix_socket_an_engine_on_another(tmp_path: Path) -> None:
    engine, own = tmp_path / "vllm.sock", tmp_path / "own.sock"
    ours = (
        "serve",
        "--upstream",
        f"unix:{engine}",
        "--policy",
        POLICIES,
        "--listen",
        f"unix:{own}",
        "--admin-port",
        "0",
    )
    with command(*ours) as process:
        assert line(process, r"sidecar: proxy on unix:(.*)") == str(own)
        line(process, r"sidecar: admin on (.*)")
        with socket.socket(socket.AF_UNIX) as client, client.makefile("rb") as answer:
            client.connect(str(own))
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert answer.read().startswith(b"HTTP/1.1 502 ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        said = process.stderr.read()
    assert f"unix:{engine}: No such file or directory" in said
    assert not own.exists()


def test_a_wrong_address_or_certificate_is_a_mistake_at_the_start(tmp_path: Path) -> None:
    ours = ["serve", "--upstream", NOBODY, "--policy", POLICIES, "--port", "0", "--admin-port", "0"]
    for more in (["--listen", "0.0.0.0:8080"], ["--listen", "unix:own.sock"]):
        assert "write unix:" in complaint(*ours, *more, code=2)
    assert f"sidecar: {tmp_path / 'no.pem'} cannot be read: No such file or directory" in complaint(
        *ours, "--tls-cert", tmp_path / "no.pem"
    )


def test_a_log_format_of_the_environment_that_is_none_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_LOG_FORMAT", "xml")
    assert (
        complaint("serve", "--upstream", NOBODY, "--policy", POLICIES)
        == "sidecar: SIDECAR_LOG_FORMAT: 'xml' is not one of json, text\n"
    )


def test_a_policy_with_mistakes_is_said_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("engine: vlm\ncapacity: {tokens: 400k, requests: 160}\ntiers:\n  high: {reserve: 20}\n")
    assert main(["serve", "--upstream", NOBODY, "--policy", str(path), "--port", "0", "--admin-port", "0"]) == 1
    said = capsys.readouterr()
    assert f"{path}:1: engine:" in said.err
    assert f"{path}:4: tiers.high.reserve:" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_that_is_taken_is_said_so(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        other = "--admin-port" if option == "--port" else "--port"
        ours = ["serve", "--upstream", NOBODY, "--policy", POLICIES]
        assert main([*ours, option, port, other, "0"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("sidecar: ")
    assert port in said


def test_an_upstream_with_a_password_is_said_so_without_it() -> None:
    said = complaint("serve", "--policy", POLICIES, "--upstream", "http://user:hunter2@engine")
    assert "must not contain a user or a password" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("arguments", [["--port", "70000"], ["--port", "http"], ["--grace", "25"], ["--grace", "soon"]])
def test_a_wrong_argument_is_said_so(arguments: list[str]) -> None:
    assert f"argument {arguments[0]}" in complaint(
        "serve", "--upstream", NOBODY, "--policy", POLICIES, *arguments, code=2
    )


def test_a_second_engine_is_refused_and_not_used_in_place_of_the_first() -> None:
    assert "--upstream is given twice; several engines belong in the policy" in complaint(
        "serve", "--upstream", NOBODY, "--upstream", "http://127.0.0.1:8000", "--policy", POLICIES, code=2
    )


@pytest.mark.parametrize("arguments", [["serve", "--upstream", NOBODY], ["check"], ["explain", "--path", "/v1/models"]])
def test_the_policy_may_come_from_the_environment(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    monkeypatch.setenv("SIDECAR_POLICY", str(first))
    assert f"{first}: there is no such file or folder; `sidecar init` writes a policy" in complaint(*arguments)
    given = ["--policy", str(second)] if arguments[0] == "serve" else [str(second)]  # goes first
    assert f"{second}: there is no such file" in complaint(*arguments, *given)


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("arguments", [["serve", "--upstream", NOBODY], ["check"], ["explain", "--path", "/v1/models"]])
def test_without_any_policy_the_way_to_one_is_said(
    arguments: list[str], value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SIDECAR_POLICY", raising=False)
    if value is not None:
        monkeypatch.setenv("SIDECAR_POLICY", value)
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"no policy: give (--policy PATH|POLICY) or set SIDECAR_POLICY; `sidecar init` writes a ", said)


def test_a_policy_that_observes_is_said_to_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("engine: none\ncapacity: {requests: 8}\ntiers: {normal: {}}\nanonymous: normal\nmode: observe\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it ends before it serves
        ours = ["serve", "--upstream", NOBODY, "--policy", str(path), "--log-format", "text", "--admin-port", "0"]
        assert main([*ours, "--port", str(taken.getsockname()[1])]) == 1
    said = "observing: mode: observe: every request passes; `sidecar observed` reports what enforcing would"
    assert said in capsys.readouterr().err
