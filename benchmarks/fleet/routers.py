"""Routers of a run: the baselines, `sidecar serve` with an `engines:` policy, and any other program.

Each is a process, and is given the engines' addresses.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.engines import Engine
from benchmarks.fleet.setting import Setting
from benchmarks.fleet_routers import RULES
from benchmarks.processes import addresses, start

OURS = "ours"
START_WITHIN_S = 120.0

TIERS = """\
tiers:
  normal: {}
default_tier: normal
anonymous: normal
"""
"""One tier for all: the comparison is of placement."""

THREE_TIERS = """\
tiers:
  high: {reserve: 30%}
  normal: {reserve: 20%}
  batch: {reserve: 10%}
default_tier: normal
anonymous: high
sources: [header]
"""


@dataclass(frozen=True, slots=True)
class Router:
    """A running router. `admin` is None where it has no admin port."""

    name: str
    url: str
    process: int
    admin: str | None = None


class NotStarted(RuntimeError):
    """A router that did not start. One line."""


@contextlib.contextmanager
def running(
    name: str, engines: Sequence[Engine], setting: Setting, *, tiers: str = TIERS, store: str | None = None
) -> Iterator[Router]:
    """The router of that name while the block runs. Raises NotStarted.

    `store` is the address of a Redis that `ours` shares its pool in. A name with `=` is any other program: its command,
    in which {engines} stands for the addresses and {port} for a free port.
    """
    if name in RULES:
        words = ["--rule", name, "--cache-tokens", str(setting.engine_tokens), *(engine.url for engine in engines)]
        with _printing(start(*words, module="benchmarks.fleet_routers"), 1, name) as (process, (url,)):
            yield Router(name, url, process.pid)
    elif name == OURS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "policy.yaml").write_text(policy(engines, setting, tiers, store))
            words = ["serve", "--policy", folder, "--port", "0", "--admin-port", "0", "--grace", "1s"]
            with _printing(start(*words, module="sidecar.cli"), 2, name) as (process, (url, admin)):
                yield Router(name, url, process.pid, admin)
    elif "=" in name:
        with _other(name.partition("=")[0], name.partition("=")[2], engines) as router:
            yield router
    else:
        raise NotStarted(f"{name} is no router; there are {', '.join([*RULES, OURS])}, and NAME=COMMAND")


@contextlib.contextmanager
def _printing(
    process: subprocess.Popen[str], lines: int, name: str
) -> Iterator[tuple[subprocess.Popen[str], Sequence[str]]]:
    try:
        try:
            found = addresses(process, lines)
        except RuntimeError as error:
            raise NotStarted(f"{name} did not start: {error}") from None
        yield process, found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def _other(name: str, command: str, engines: Sequence[Engine]) -> Iterator[Router]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = shlex.split(command.format(engines=" ".join(engine.url for engine in engines), port=port))
    process = subprocess.Popen(words, stdout=sys.stderr)
    try:
        end_s = time.monotonic() + START_WITHIN_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > end_s:
                raise NotStarted(f"{name} did not start: {command}")
            time.sleep(0.1)
        yield Router(name, f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def policy(engines: Sequence[Engine], setting: Setting, tiers: str = TIERS, store: str | None = None) -> str:
    """The policy of `sidecar serve` for these engines, with the capacity that they really have."""
    lines = [f"  - {{name: {engine.name}, url: {engine.url}}}" for engine in engines]
    pool = f"store: {store}\n" if store else ""
    return (
        f"engine: vllm\n{pool}engines:\n  static:\n  "
        + "\n  ".join(lines)
        + f"""
  capacity: {{tokens: {setting.engine_tokens}, requests: {setting.sequences}}}
  prefill: {setting.engine_prefill}
  affinity: {{prefix: true, weight: 3}}
  health: {{path: /health, every: 1s, fail: 3, rise: 1}}
  slow_start: 0s
  replay: {{before_first_byte: 1, budget: 10%}}
  drain_timeout: 60s
{tiers}endpoints:
  /v1/chat/completions: {{}}
"""
    )
