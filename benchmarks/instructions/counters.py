"""Counters of instructions: Linux perf where its counters work, else valgrind's callgrind.

Both count the instructions of the program itself, not the kernel's. They differ: a budget holds for one of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.instructions.marks import CALLGRIND_VARIABLE

Run = Callable[[Sequence[str], Mapping[str, str], Mapping[str, int]], Mapping[str, float]]
"""Runs a program: the command that counts it, its environment, and the repetitions of each of its parts.

Returns the seconds that each part took, where background tasks of the program are counted as well: it then has the part
`IDLE`, in which nothing else runs.
"""
IDLE = "idle"


class CannotCount(Exception):
    """A tool is missing, is not permitted, or said nothing. The message is one line."""


class Counter(Protocol):
    """A tool that counts instructions."""

    name: str

    def missing(self) -> str | None:
        """Why this machine cannot use the tool; None where it can."""

    def measure(self, run: Run, names: Sequence[str]) -> dict[str, float]:
        """Instructions per repetition, by the part's name."""


class Perf:
    """`perf stat`: the processor's own counter. The difference of two runs."""

    name = "perf"
    repetitions = 10_000

    def missing(self) -> str | None:
        """See `Counter.missing`. Virtual machines and containers often have no such counter."""
        if shutil.which("perf") is None:
            return "perf is not installed"
        try:
            self._instructions(_run_true, "", 0)
        except CannotCount as reason:
            return str(reason)
        except RuntimeError:
            return "perf does not run, or may not count"
        return None

    def measure(self, run: Run, names: Sequence[str]) -> dict[str, float]:
        """See `Counter.measure`."""
        more = self.repetitions
        return {
            name: (self._instructions(run, name, more) - self._instructions(run, name, 0)) / more
            for name in names
            if name != IDLE  # background tasks do not matter in the seconds that this takes
        }

    def _instructions(self, run: Run, name: str, count: int) -> int:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "stat"
            command = ["perf", "stat", "-x", ",", "-e", "instructions:u", "-o", str(output), "--"]
            run(command, fixed_environment(), {name: count})
            return perf_total(output.read_text() if output.exists() else "")


class Callgrind:
    """`valgrind --tool=callgrind`: a simulated processor, fifty times slower, the same figures in every run."""

    name = "callgrind"
    repetitions = 250
    chunks = 2_500
    """Repetitions of the parts that stream: each is small beside the background tasks, which run by the clock."""

    def missing(self) -> str | None:
        """See `Counter.missing`."""
        absent = [program for program in ("valgrind", "vgdb") if shutil.which(program) is None]
        if absent:
            return f"{' and '.join(absent)} not installed"
        try:
            call(["valgrind", "-q", "--tool=none", sys.executable, "-c", "pass"])
        except RuntimeError:
            return "valgrind cannot run this Python"
        return None

    def measure(self, run: Run, names: Sequence[str]) -> dict[str, float]:
        """See `Counter.measure`."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "dump"
            command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--dump-before=getppid"]
            command += [f"--callgrind-out-file={output}"]
            parts = {name: self.chunks if name.endswith("_chunk") else self.repetitions for name in names}
            seconds = run(command, {**fixed_environment(), CALLGRIND_VARIABLE: "1"}, parts)
            # One dump before each mark: up to the first begin, its counted part, up to the second begin, ...
            found = len(list(Path(folder).glob("dump.*")))
            if found != 2 * len(names):
                raise CannotCount(f"callgrind wrote {found} dumps instead of {2 * len(names)}")
            dumps = [Path(f"{output}.{2 * part + 2}") for part in range(len(names))]
            totals = {name: callgrind_total(dump.read_text()) for name, dump in zip(names, dumps, strict=True)}
        # On a busy machine a part takes longer, and more background tasks fall into it.
        idle_per_s = totals.pop(IDLE) / seconds[IDLE] if IDLE in totals else 0.0
        return {name: (total - idle_per_s * seconds.get(name, 0.0)) / parts[name] for name, total in totals.items()}


COUNTERS: tuple[Counter, ...] = (Perf(), Callgrind())


def perf_total(output: str) -> int:
    """The instructions in the output of `perf stat -x,`. A processor with two kinds of cores has a line for each."""
    lines = [line.split(",") for line in output.splitlines() if "instructions" in line and not line.startswith("#")]
    if not lines:
        raise CannotCount("perf counted nothing: its counters are not permitted, or not for this user")
    values = [fields[0] for fields in lines if fields[0] != "<not counted>"]
    if not values or "<not supported>" in values:
        raise CannotCount("perf's counter of instructions is not supported by this machine")
    return sum(map(int, values))


def callgrind_total(output: str) -> int:
    """The instructions in one dump of callgrind."""
    found = re.search(r"^totals: (\d+)", output, re.MULTILINE)
    if found is None:
        raise CannotCount("callgrind's dump has no totals")
    return int(found[1])


def fixed_environment() -> dict[str, str]:
    """The environment without settings of ours or of OpenTelemetry, and with one order of sets in every run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR_", "OTEL_", "PYTHON"))}
    return {**kept, "PYTHONHASHSEED": "0"}


def _run_true(prefix: Sequence[str], _environment: Mapping[str, str], _parts: Mapping[str, int]) -> dict[str, float]:
    call([*prefix, "true"])
    return {}


def call(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Runs a command to its end. Raises RuntimeError with the end of what it wrote where it fails."""
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(
            f"exit status {ended.returncode}: {' '.join(command)}\n{(ended.stdout + ended.stderr)[-4000:]}"
        )
