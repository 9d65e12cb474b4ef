"""Real routers before the emulated engine: installed in environments of their own, and started by one function.

SMG (`smg launch`) routes by its rule cache_aware, with its own gate on the balance. Dynamo's frontend has its KV
router; a process of ours registers the engine. Everything is as it comes, but for what keeps a router on this machine:
addresses of loopback, and no downloads of tokenizers.

Each is installed into $LAB/routers/NAME-VERSION, where LAB is ~/.cache/engine-lab if it is not set.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READY_WITHIN_S = 60.0
STOPS_WITHIN_S = 15.0
NO_DOWNLOADS = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
"""No one listens at the address."""
RULE = ["--policy", "cache_aware", "--cache-threshold", "0.3"]
RULE += ["--balance-abs-threshold", "64", "--balance-rel-threshold", "1.5"]

Command = Callable[[Path, Sequence[str], int], list[str]]
Registered = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Router:
    """One router: its package, how it is started from its environment, and how many engines it has registered.

    `skipped` are requirements of the package that are not installed, and `loosened` those whose version is not minded.
    """

    package: str
    version: str
    command: Command
    registered: Registered
    skipped: Sequence[str] = ()
    loosened: Sequence[str] = ()


class NotInstalled(Exception):
    """A router cannot be installed here. The message has the command and its error."""


class NotReady(Exception):
    """A router ended, or did not register all engines in time. The message has the end of its log."""


def _loopback(workers: Sequence[str], port: int) -> list[str]:
    metrics = [
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(port + 10_000 if port < 50_000 else port - 10_000),
    ]
    return ["--host", "127.0.0.1", "--port", str(port), *metrics, "--worker-urls", *workers]


def _smg(folder: Path, workers: Sequence[str], port: int) -> list[str]:
    quick = ["--worker-startup-check-interval", "1", "--disable-tokenizer-autoload"]
    return [str(folder / "bin" / "smg"), "launch", *_loopback(workers, port), *RULE, *quick]


def _dynamo(folder: Path, workers: Sequence[str], port: int) -> list[str]:
    fleet = [sys.executable, "-m", "benchmarks.peers.dynamo_fleet", "--python", str(folder / "bin" / "python")]
    return [*fleet, "--port", str(port), *workers]


def _healthy_workers(url: str) -> int:
    return sum(worker["is_healthy"] for worker in _json(f"{url}/workers")["workers"])


def _dynamo_instances(url: str) -> int:
    if not _json(f"{url}/v1/models")["data"]:
        return 0
    return sum(one["endpoint"] == "generate" for one in _json(f"{url}/health")["instances"])


ROUTERS: Mapping[str, Router] = {
    "smg": Router("smg", "1.13.0", _smg, _healthy_workers),
    # aisimulate is a placeholder that fetches its wheel elsewhere, and is wanted for the option --ais-perf-model alone.
    "dynamo": Router(
        "ai-dynamo",
        "1.6.1",
        _dynamo,
        _dynamo_instances,
        skipped=["aisimulate"],
        loosened=["certifi"],
    ),
}


def folder_of(name: str) -> Path:
    """Where a router is installed, or would be."""
    return environment_of(name, ROUTERS[name].version)


def environment_of(name: str, version: str) -> Path:
    """The folder of an environment of its own."""
    lab = Path(os.environ.get("LAB") or Path.home() / ".cache" / "engine-lab")
    return lab / "routers" / f"{name}-{version}"


def install(name: str) -> Path:
    """Installs a router where it is not yet. Returns its environment. Raises NotInstalled."""
    router = ROUTERS[name]
    return install_package(folder_of(name), router.package, router.version, router.skipped, router.loosened)


def install_package(
    folder: Path, package: str, version: str, skipped: Sequence[str] = (), loosened: Sequence[str] = ()
) -> Path:
    """Installs a package, such as `name` or `name[extra]`, into an environment of its own. Raises NotInstalled.

    `skipped` and `loosened` as in `Router`.
    """
    done = folder / ".ready"
    if done.is_file():
        return folder
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = f"{package}=={version}"
    if skipped or loosened:
        _run([*pip, "--no-deps", wanted])
        _run([*pip, *_requirements(folder, package, skipped, loosened)])
    else:
        _run([*pip, "--only-binary", ":all:", wanted])
    done.touch()
    return folder


def _requirements(folder: Path, package: str, skipped: Sequence[str], loosened: Sequence[str]) -> Sequence[str]:
    """The requirements of an installed package, less the skipped ones; a loosened one without its version."""
    script = (
        "import json, sys; from importlib.metadata import requires; from pip._vendor.packaging.requirements import "
        "Requirement; own = Requirement(sys.argv[1]); print(json.dumps([[r.name, str(r.specifier), sorted(r.extras)] "
        "for r in map(Requirement, requires(own.name) or []) if r.marker is None or any(r.marker.evaluate({'extra': "
        "extra}) for extra in ['', *own.extras])]))"
    )
    line = [str(folder / "bin" / "python"), "-c", script, package]
    found: list[tuple[str, str, list[str]]] = json.loads(_run(line))
    return [
        name + (f"[{','.join(extras)}]" if extras else "") + ("" if name in loosened else specifier)
        for name, specifier, extras in found
        if name not in skipped
    ]


def _run(line: Sequence[str]) -> str:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(f"{' '.join(line)} exited with {done.returncode}:\n{done.stderr.strip()[-2_000:]}")
    return done.stdout


def start(
    name: str,
    worker_urls: Sequence[str],
    port: int,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a router on loopback, and returns when it has registered all workers. The caller ends it with `stop`.

    Installs it where it is not yet, which takes a minute, and five for Dynamo. Its log is beside its environment, named
    by its port. `options` are added to its command, `variables` to its environment. Raises NotInstalled, NotReady.
    """
    router, folder = ROUTERS[name], install(name)
    log = log_of(name, port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*router.command(folder, worker_urls, port), *options],
            cwd=ROOT,
            env={**os.environ, **NO_DOWNLOADS, **(variables or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(name, process, len(worker_urls), port)
    except BaseException:
        stop(process)
        raise
    return process


def log_of(name: str, port: int) -> Path:
    """What the router on this port writes."""
    return folder_of(name) / f"log-{port}.txt"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a router and all that it has started."""
    process.terminate()
    try:
        process.wait(STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(name: str, process: subprocess.Popen[bytes], workers: int, port: int) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    registered = 0
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError, ValueError, KeyError):
            registered = ROUTERS[name].registered(f"http://127.0.0.1:{port}")
        if registered >= workers:
            return
        time.sleep(0.2)
    ended = "is still starting" if process.poll() is None else f"exited with {process.returncode}"
    tail = log_of(name, port).read_text(errors="replace")[-2_000:]
    raise NotReady(f"{name} {ended}, and has registered {registered} of {workers} workers. Its log ends with:\n{tail}")


def _json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=2.0) as response:
        return json.load(response)
