"""Budgets of instructions: a committed file, and the comparison with it.

A count depends on the tool, on Python's version, and on how that Python was built. The file has an entry for each tool
and minor version; an entry says which build it was measured with, and which packages.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "budgets.json"
TOLERANCE = 0.15
"""A figure may exceed its budget by this much: what clear code costs more is taken, a slip in every request is not."""
PACKAGES = (
    "aiohttp",
    "anyio",
    "httptools",
    "msgspec",
    "opentelemetry-sdk",
    "prometheus-client",
    "starlette",
    "uvicorn",
    "uvloop",
)
"""The packages that run in a request."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Budgets of one tool and one minor version of Python, in instructions by figure."""

    build: str
    packages: Mapping[str, str]
    instructions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a comparison, in sentences."""

    exceeded: Sequence[str]
    not_checked: Sequence[str]
    below: Sequence[str]


def python_minor() -> str:
    """The running Python, as the file names it: 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def python_build() -> str:
    """What else decides how many instructions Python's bytecode takes."""
    arguments = str(sysconfig.get_config_var("CONFIG_ARGS"))
    options = [option for option in ("--enable-optimizations", "--with-lto", "--enable-shared") if option in arguments]
    return " ".join([platform.python_implementation(), platform.machine(), platform.python_compiler(), *options])


def installed_packages() -> dict[str, str]:
    """The versions of `PACKAGES` here."""
    return {name: metadata.version(name) for name in PACKAGES}


def read(file: Path) -> dict[str, dict[str, Any]]:
    """All entries: by tool, then by Python."""
    entries: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return entries


def entry_of(file: Path, tool: str) -> Entry | None:
    """The entry for a tool and the running Python; None where there is none."""
    found = read(file).get(tool, {}).get(python_minor())
    return None if found is None else Entry(**found)


def write(file: Path, tool: str, measured: Mapping[str, float]) -> None:
    """Makes the measured figures the budgets of a tool and the running Python. Other figures and entries stay."""
    entries, old = read(file), entry_of(file, tool)
    kept = old.instructions if old is not None and old.build == python_build() else {}
    figures = {**kept, **{name: round(instructions) for name, instructions in measured.items()}}
    entries.setdefault(tool, {})[python_minor()] = asdict(Entry(python_build(), installed_packages(), figures))
    file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")


def compare(measured: Mapping[str, float], entry: Entry | None, tool: str) -> Findings:
    """Compares figures with their budgets."""
    if entry is None:
        return Findings([], [f"no budgets for {tool} and Python {python_minor()}"], [])
    if entry.build != python_build():
        reason = f"the budgets for Python {python_minor()} are of the build {entry.build!r}; this is {python_build()!r}"
        return Findings([], [reason], [])
    exceeded, below = [], []
    for name in measured.keys() & entry.instructions.keys():
        budget, instructions = entry.instructions[name], measured[name]
        sentence = (
            f"{name}: {instructions:,.0f} instructions, {instructions / budget - 1:+.1%} to the budget of {budget:,}"
        )
        if instructions > budget * (1 + TOLERANCE):
            exceeded.append(sentence)
        elif instructions < budget * (1 - TOLERANCE):
            below.append(sentence)
    missing = [f"no budget for {name}" for name in sorted(measured.keys() - entry.instructions.keys())]
    return Findings(sorted(exceeded), missing, sorted(below))


def changed_packages(entry: Entry) -> list[str]:
    """Packages that have another version than when the budgets were written."""
    here = installed_packages()
    return [
        f"{name} {entry.packages.get(name)} -> {here[name]}" for name in here if entry.packages.get(name) != here[name]
    ]
