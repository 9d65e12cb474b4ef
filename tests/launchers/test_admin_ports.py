"""A launcher finds out that its admin port is taken before the engine loads its model."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launchers.conftest import Refusal
from tests.launchers.launched import write_policy
from tests.support.each import each
from tests.support.ports import free_ports

SERVERS = {
    "trtllm-serve": ("tensorrt-llm", "--num_serve_frontends"),
    "sglang-serve": ("sglang", "--tokenizer-worker-num"),
}
Refused = Callable[[int], str]


@pytest.fixture(params=SERVERS)
def refused(request: pytest.FixtureRequest, tmp_path: Path, refusal: Refusal) -> Refused:
    """What each launcher says for so many processes."""
    engine, workers = SERVERS[request.param]
    policy = str(write_policy(tmp_path, engine=engine))
    return lambda count: refusal(request.param, "m", "--policy", policy, workers, str(count))


@pytest.fixture(autouse=True)
def _with_a_store(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_STORE", "redis://127.0.0.1:9/0")  # else several processes are refused


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(port))
        said = refused(1)
    assert said == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use "
        "(for the admin pages, by SIDECAR_ADMIN_PORT); end what listens there, or set another port"
    )
    assert "SIDECAR_PROCESSES" not in os.environ


@each(("which", "named"), [(0, "one of 2"), (1, "the last of 2")])
def test_each_of_several_processes_needs_one(
    monkeypatch: pytest.MonkeyPatch, refused: Refused, which: int, named: str
) -> None:
    first = free_ports(2)
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", str(first))
    with socket.create_server(("127.0.0.1", first + which)):
        said = refused(2)
    assert f"cannot listen on 127.0.0.1:{first + which}: Address already in use" in said
    assert f"SIDECAR_ADMIN_PORT, {named} from {first} on" in said


@each(
    ("variable", "value", "said"),
    [
        ("SIDECAR_ADMIN_PORT", "98765", "'98765' is not a port; write a number from 0 to 65535"),
        ("SIDECAR_ADMIN_PORT", "65535", "65535 leaves no port for each of 2 processes; write 65534 or less"),
        ("SIDECAR_ADMIN_HOST", "192.0.2.1", "cannot listen on 192.0.2.1:0: "),
    ],
)
def test_what_is_no_port_at_all(
    monkeypatch: pytest.MonkeyPatch, refused: Refused, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_PORT", "0")
    monkeypatch.setenv(variable, value)
    assert said in refused(2)
