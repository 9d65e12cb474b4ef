"""`sidecar ...` as processes of their own, for benchmarks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

LINES = {"serve": 2}
"""How many lines with an address a command prints when it is ready; one, where it is not here."""


@contextlib.contextmanager
def command(*arguments: str, module: str = "sidecar.cli", **variables: str) -> Iterator[Sequence[str]]:
    """`sidecar ...` while the block runs, and the addresses that it prints. SIGTERM lets it send what it holds."""
    process = start(*arguments, module=module, stderr=None, **variables)
    with process:
        try:
            yield addresses(process, LINES.get(arguments[0], 1))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def start(
    *arguments: str, module: str = "sidecar.cli", stderr: TextIO | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Starts it. The caller ends it."""
    line = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "SIDECAR_LOG_LEVEL": "error", **variables}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def addresses(process: subprocess.Popen[str], count: int) -> Sequence[str]:
    """The addresses in the next lines that it prints. Raises RuntimeError where it printed something else."""
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(count)]
    found = [address for line in said for address in re.findall(r"http://\S+:\d+", line)[:1]]
    if len(found) != count:
        raise RuntimeError(f"a command did not start; it said {said}")
    return found
