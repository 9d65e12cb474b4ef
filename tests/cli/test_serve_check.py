"""What `sidecar serve` looks at before it begins, with emulated engines, silent ones, and none."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from sidecar.cli import main, serve_check
from sidecar.cli.serve_check import check_engines
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from tests.support.commands import address, command
from tests.support.in_process import emulated_engine
from tests.support.middleware import write_policy

NOBODY = "http://127.0.0.1:9"
FLEET = """\
engine: vllm
engines: {{static: [{engines}], capacity: {{requests: 4, tokens: 10k}}}}
tiers: {{high: {{}}, low: {{}}}}
default_tier: low
anonymous: high
endpoints: {{/v1/chat/completions: {{}}}}
"""


def emulated(*arguments: str) -> AbstractContextManager[str]:
    """An emulated vLLM."""
    return emulated_engine("--engine", "vllm", *arguments)


@contextmanager
def silent() -> Iterator[str]:
    """A server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    kept.append(listener.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for connection in kept:
            connection.close()


def policy(folder: Path, engine: str) -> Policy:
    return load(write_policy(folder, engine=engine))


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidecar.serve")


def test_an_engine_that_fits_gets_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with emulated() as url:
        check_engines(policy(tmp_path, "vllm"), url)
    (record,) = caplog.records
    assert (record.levelname, record.__dict__["event"]) == ("INFO", "check")
    assert f"the engine at {url} fits the policy" in record.getMessage()


def test_a_policy_for_another_engine_is_a_warning_that_says_what_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with emulated() as url:
        check_engines(policy(tmp_path, "tensorrt-llm"), url)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "write `engine: vllm` into the policy" in record.getMessage()


@pytest.mark.parametrize("kind", ["away", "silent"])
def test_an_engine_that_does_not_answer_keeps_no_one_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(serve_check, "WITHIN_S", 0.3)
    with silent() as hanging:
        check_engines(policy(tmp_path, "vllm"), NOBODY if kind == "away" else hanging)
    (record,) = caplog.records
    assert (record.levelname, record.__dict__["event"]) == ("INFO", "check_not_made")
    assert "was not examined" in record.getMessage()


def test_each_engine_of_a_policy_is_examined_and_they_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with emulated("--model", "one") as first, emulated("--model", "other") as second:
        named = enumerate((first, second, NOBODY))
        engines = ", ".join(f"{{name: engine-{number}, url: '{url}'}}" for number, url in named)
        (tmp_path / "policy.yaml").write_text(FLEET.format(engines=engines))
        check_engines(load(tmp_path / "policy.yaml"), None)
    events = [record.__dict__["event"] for record in caplog.records]
    assert events.count("check_not_made") == 1
    assert any("the engines together: " in record.getMessage() for record in caplog.records)


def test_a_defect_in_the_check_keeps_no_one_from_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_check, "examine", lambda *_: 1 / 0)
    check_engines(policy(tmp_path, "vllm"), NOBODY)
    (record,) = caplog.records
    assert record.__dict__["event"] == "defect"


def test_serve_looks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDECAR_SERVE_NO_CHECK", raising=False)
    path = write_policy(tmp_path, engine="vllm")
    with emulated() as url:
        serve = ["serve", "--upstream", url, "--policy", str(path), "--port", "0", "--admin-port", "0"]
        with command(*serve, "--log-format", "json") as process:
            address(process)
            process.terminate()
            _, written = process.communicate(timeout=60)
    events = [json.loads(line)["event"] for line in written.splitlines()]
    assert events.index("check") < events.index("started")


def test_serve_does_not_look_where_it_is_asked_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDECAR_SERVE_NO_CHECK", raising=False)
    looked: list[object] = []
    monkeypatch.setattr(serve_check, "check_engines", lambda *given: looked.append(given))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it ends before it serves
        serve = ["serve", "--upstream", NOBODY, "--policy", str(write_policy(tmp_path)), "--admin-port", "0"]
        serve += ["--port", str(taken.getsockname()[1])]
        assert main([*serve, "--no-check"]) == 1
        assert looked == []
        assert main(serve) == 1
        assert len(looked) == 1
