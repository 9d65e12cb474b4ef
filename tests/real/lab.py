"""Real engines for tests marked `engine`: vLLM and SGLang on the CPU, and Dynamo's router with its mock engine.

They are started by the engine lab's `run_vllm.sh`, `run_sglang.sh` and `run_dynamo.sh`, which are no part of this
repository: SIDECAR_ENGINE_LAB names their folder, by default `../shared/lab` beside the checkout. What the scripts have
installed is where their variable LAB says, by default ~/.cache/engine-lab.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_servers import free_port

ROOT = Path(__file__).parents[2]
READY_WITHIN_S = 300.0
"""vLLM takes 25 s on an idle machine with two cores, and has been seen to take 106 s on a busy one."""
MODEL = "tiny"
"""The name under which both serve their small random model."""


def installed_in() -> Path:
    """Where the scripts have put the engines."""
    return Path(os.environ.get("LAB") or Path.home() / ".cache" / "engine-lab")


def script(name: str, engine: str) -> Path:
    """A script of the lab. Skips the test, and says why, where it or the engine is not there."""
    chosen = os.environ.get("SIDECAR_ENGINE_LAB")
    folder = Path(chosen) if chosen else ROOT.parent / "shared" / "lab"
    if not (folder / name).is_file():
        pytest.skip(f"no engine lab: {name} is not in SIDECAR_ENGINE_LAB, nor in ../shared/lab beside the checkout")
    if not (installed_in() / engine / ".ready").is_file():
        pytest.skip(f"{engine} is not installed: run {name} of the engine lab once, which installs and starts it")
    return folder / name


class Engine:
    """An engine that answers, or has ended: its address, its process, all that it has written."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        """Standard output and error so far."""
        return self._log.read_text(errors="replace")

    def wait_ready(self, page: str) -> None:
        """Waits until `page` answers 200. An AssertionError with the end of the log where it has ended, or is late."""
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(self.url + page, timeout=2):
                return
            time.sleep(0.25)
        raise AssertionError(f"not ready; exit code {self.process.poll()}; the log ends\n{self.log[-4000:]}")

    def end(self, within_s: float = 30.0) -> int:
        """Asks it to end as an operator would. Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)


@contextmanager
def vllm_process(
    *,
    scheduling: str = "priority",
    sequences: int = 4,
    middleware: Sequence[str] = (),
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """Runs `vllm serve` with the tiny model; `middleware` are import names, the last one outermost.

    Does not wait for it to answer. This checkout is on its path.
    """
    line = ["bash", str(script("run_vllm.sh", "vllm")), scheduling, *arguments]
    port = free_port()
    settings = {
        "PORT": str(port),
        "SEQS": str(sequences),
        "MW": " ".join(middleware),
        "PYTHONPATH": str(ROOT),
        **(variables or {}),
    }
    with tempfile.TemporaryDirectory() as folder, _running(line, settings, Path(folder) / "log", port) as engine:
        yield engine


@contextmanager
def vllm(**settings: Any) -> Iterator[Engine]:
    """As `vllm_process`, and answers."""
    with vllm_process(**settings) as engine:
        engine.wait_ready("/health")
        yield engine


def skip_without(package: str, engine: str, requirement: str) -> None:
    """Skips where a package is not installed beside an engine."""
    environment = installed_in() / engine
    if not list(environment.glob(f"lib/*/site-packages/{package}-*.dist-info")):
        pytest.skip(f"{package} is not installed beside {engine}: run {environment}/bin/pip install {requirement} once")


SGLANG_TOKENS = 8192
"""What its KV cache holds here."""


@contextmanager
def sglang(
    *,
    policy: Path | None = None,
    by_priority: bool = True,
    sequences: int = 4,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """SGLang with the tiny model, which answers; where there is a `policy`, run by `sidecar sglang-serve`.

    Skips where this project's dependencies are not installed beside SGLang. This checkout is on its path.
    """
    line = ["bash", str(script("run_sglang.sh", "sglang")), *arguments]
    port = free_port()
    settings = {
        "PORT": str(port),
        "SEQS": str(sequences),
        "TOKENS": str(SGLANG_TOKENS),
        "PRIORITY": "1" if by_priority else "0",
        "PYTHONPATH": str(ROOT),
        **(variables or {}),
    }
    if policy is not None:
        skip_without("admission_sidecar", "sglang", ".")
        settings |= {"SERVE": "python -m sidecar.cli sglang-serve", "SIDECAR_POLICY": str(policy)}
    with tempfile.TemporaryDirectory() as folder, _running(line, settings, Path(folder) / "log", port) as engine:
        engine.wait_ready("/v1/models")
        yield engine


@contextmanager
def dynamo(*, router_queue: bool = True, sequences: int = 4, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Dynamo's frontend with its KV router and one mock worker; its address. `router_queue`: the router holds requests.

    The script keeps its files in the lab's folder and ends what it has started before: here in a folder of its own, so
    that a Dynamo which somebody else runs stays as it is.
    """
    starting = script("run_dynamo.sh", "dynamo")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("dynamo", "tiny-llama-v8k"):
            (Path(folder) / name).symlink_to(installed_in() / name)
        settings = {"LAB": folder, "PORT": str(port), "SEQS": str(sequences), "QTHRESH": "0" if router_queue else ""}
        given = {**_without_ours(), **settings}
        started = subprocess.run(
            ["bash", str(starting), "start", *arguments],
            env=given,
            capture_output=True,
            text=True,
            timeout=READY_WITHIN_S,
            check=False,
        )
        try:
            assert started.returncode == 0, started.stdout + started.stderr
            yield f"http://127.0.0.1:{port}"
        finally:
            subprocess.run(["bash", str(starting), "stop"], env=given, timeout=30, check=False)


@contextmanager
def _running(line: Sequence[str], settings: Mapping[str, str], log: Path, port: int) -> Iterator[Engine]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, env={**_without_ours(), **settings}, stdout=output, stderr=output, start_new_session=True
        )
    engine = Engine(process, port, log)
    try:
        yield engine
    finally:
        with suppress(subprocess.TimeoutExpired):
            engine.end()
        with suppress(ProcessLookupError):  # its workers are of its session, and may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _without_ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR_", "OTEL_"))}
