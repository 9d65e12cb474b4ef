"""`sidecar ...` as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def command(*arguments: str, cwd: str | None = None, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Runs it in `cwd`, without telemetry but by `variables`; killed at the end of the block if it is still there."""
    argv = [sys.executable, "-m", "sidecar.cli", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | variables
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def address(process: subprocess.Popen[str]) -> str:
    """The address in the next line that it prints."""
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found, process.stderr and process.stderr.read()
    return found[0]
