"""Processor time and modules of a start: of the middleware's import, and of commands that connect to nothing.

    python -m benchmarks.startup

It exits with 1 where one exceeds its budget in benchmarks/budgets.json. The time is that of the process, user and
system, the least of 5 starts, in starts of a program of the standard library that runs beside it: so it depends little
on the machine. The modules do not at all: what is imported without need shows there first.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.instructions.budgets import FILE

STARTS = 5
YARDSTICK = "import asyncio, email.mime.text, http.server, ssl, unittest.mock, urllib.request, xml.dom.minidom"
_ROOT = Path(__file__).parents[1]
_COUNTED = "import atexit, sys; atexit.register(lambda: print(len(sys.modules), file=sys.stderr)); "


def _command(*words: str) -> str:
    return f"from sidecar.cli import main; sys.exit(main({list(words)}))"


def programs(folder: str) -> dict[str, str]:
    """What is started, as Python. `folder` does not exist yet."""
    return {
        "the yardstick": YARDSTICK,
        "import sidecar.app": "import sidecar.app",
        "sidecar serve --help": _command("serve", "--help"),
        "sidecar check": _command("check", "policies/"),
        "sidecar init": _command("init", folder, "--engine", "vllm", "--requests", "4"),
    }


def start(program: str) -> tuple[float, int]:
    """Runs a program. Returns its processor time in milliseconds, and its modules."""
    # Without that variable's effect: each start would compile every module.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = _children_s()
    ended = subprocess.run(
        [sys.executable, "-c", _COUNTED + program],
        cwd=_ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return (_children_s() - before) * 1e3, int(ended.stderr.split()[-1])


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Measures, prints the table, compares."""
    budgets = json.loads(FILE.read_text())["startup"]
    with tempfile.TemporaryDirectory() as folder:
        seen = [
            {name: start(program) for name, program in programs(f"{folder}/{number}").items()}
            for number in range(STARTS)
        ]
    least = {name: tuple(map(min, zip(*(one[name] for one in seen), strict=True))) for name in seen[0]}
    whole_ms = least["the yardstick"][0]
    print(f"{'':24} {'CPU ms':>8} {'times':>8} {'budget':>8} {'modules':>8} {'budget':>8}")
    exceeded = []
    for name, (cpu_ms, modules) in least.items():
        budget = budgets.get(name, {"times": 1, "modules": modules})
        times = cpu_ms / whole_ms
        print(f"{name:24} {cpu_ms:8.0f} {times:8.2f} {budget['times']:8} {modules:8} {budget['modules']:8}")
        exceeded += [name] * (times > budget["times"] or modules > budget["modules"])
    for name in exceeded:
        print(f"BUDGET EXCEEDED: a start of {name}; `python -X importtime` says what it imports", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
