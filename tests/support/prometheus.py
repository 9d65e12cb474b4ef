"""A real Prometheus: its two programs, and a server on a free port that scrapes what a test gives it.

The server starts in half a second, keeps its data in the test's folder, and ends with the test process, however that
ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_servers import HOST, ends_with_parent, free_port, until

UNPACKED = Path(__file__).parents[2] / ".prometheus"
"""Where `sh .ci/prometheus` puts the programs."""
TIMEOUT_S = 10.0

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    """One series of an answer, and its value."""

    labels: Labels
    value: float


def program(name: str) -> Path:
    """`prometheus` or `promtool`. Without it the test is skipped; in CI it fails where it could have been installed."""
    for folder in (str(UNPACKED), None):
        if path := shutil.which(name, path=folder):
            return Path(path)
    what = f"no {name} on the PATH; `sh .ci/prometheus` unpacks one, as root on Debian or Ubuntu"
    if os.environ.get("CI") and shutil.which("apt-get") and os.geteuid() == 0:
        pytest.fail(f"{what}, and this is CI, where it could be had")
    pytest.skip(what)


def promtool(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `promtool`; the caller looks at its exit status."""
    command = [program("promtool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=cwd)


class Prometheus:
    """A running server, asked over HTTP. An AssertionError has its own words for what it refuses."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str, at_s: float | None = None) -> list[Sample]:
        """The instant vector that an expression gives now, or at a Unix time. What is no number (0/0) is left out."""
        found = self._get("query", query=expression, **({} if at_s is None else {"time": at_s}))
        assert found["resultType"] == "vector", f"{expression}: a {found['resultType']}"
        samples = [Sample(series["metric"], float(series["value"][1])) for series in found["result"]]
        return [sample for sample in samples if sample.value == sample.value]

    def exemplars(self, selector: str, within_s: float = 3600) -> list[Mapping[str, Any]]:
        """The exemplars of the series that a selector names."""
        now_s = time.time()
        found = self._get("query_exemplars", query=selector, start=now_s - within_s, end=now_s + 1)
        return [exemplar for series in found for exemplar in series["exemplars"]]

    def values(self, label: str, selector: str) -> list[str]:
        """What a label says in the series that a selector names."""
        return list(self._get(f"label/{label}/values", **{"match[]": selector}))

    def families(self) -> Mapping[str, list[Mapping[str, str]]]:
        """Type, unit and help of every metric, by its name."""
        return self._get("metadata")

    def alerts(self) -> list[Mapping[str, Any]]:
        """Every alert that is pending or fires."""
        return list(self._get("alerts")["alerts"])

    def scraped(self) -> bool:
        """Whether every target has been scraped, the last time without an error."""
        targets = self._get("targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def _get(self, path: str, **parameters: Any) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as refused:
            with refused:
                raise AssertionError(f"{parameters or path}: {json.load(refused)['error']}") from None


@contextmanager
def prometheus(
    folder: Path, targets: Sequence[str], rules: Sequence[Path] = (), *, every: str = "500ms"
) -> Iterator[Prometheus]:
    """Runs a server in `folder` that scrapes `targets` (`host:port`) and evaluates `rules`; it is killed at the end."""
    binary = program("prometheus")
    configuration = folder / "prometheus.json"  # which is YAML, too
    configuration.write_text(json.dumps(_configuration(targets, rules, every)))
    port = free_port()
    command: list[str | Path] = [
        binary, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}", "--enable-feature=exemplar-storage", "--log.level=warn",
    ]  # fmt: skip
    # The kernel ends a server with the *thread* that started it.
    assert threading.current_thread() is threading.main_thread(), "start servers from the main thread"
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=ends_with_parent(),  # noqa: PLW1509 - it takes no lock that a thread may hold
        )
    try:
        url = f"http://{HOST}:{port}"
        until(lambda: process.poll() is not None or _is_ready(url), "Prometheus is ready")
        assert process.poll() is None, f"Prometheus has ended:\n{(folder / 'log').read_text()}"
        yield Prometheus(url)
    finally:
        process.kill()
        process.wait()


def _configuration(targets: Sequence[str], rules: Sequence[Path], every: str) -> Mapping[str, Any]:
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": "admission-sidecar", "static_configs": [{"targets": list(targets)}]}],
    }


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=TIMEOUT_S):
            return True
    except urllib.error.HTTPError as not_yet:
        not_yet.close()
        return False
