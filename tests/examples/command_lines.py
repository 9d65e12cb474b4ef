"""What an example tells the `sidecar` command, by the command's own parsers and the code's own names."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_SHELL_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_VARIABLE = re.compile(r"\bSIDECAR_[A-Z_]+\b")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of `sidecar WORDS`. SystemExit, with a line on standard error, for a flag that does not exist."""
    name, *arguments = words
    command = importlib.import_module(f"sidecar.cli.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"sidecar {name}", allow_abbrev=False)
    command.configure(parser)
    return parser.parse_args(arguments)


def replaced(words: Sequence[str], flags: Mapping[str, str | int]) -> list[str]:
    """The same command line with other values for some `--flag=value`. Each must be in it: else it tests nothing."""
    found = []
    for word in words:
        flag, _, _ = word.partition("=")
        found.append(f"{flag}={flags[flag]}" if flag in flags else word)
    missing = set(flags) - {word.partition("=")[0] for word in words}
    assert not missing, f"{missing} not in {words}"
    return found


@cache
def known_variables() -> frozenset[str]:
    """The variables of ours that the code names."""
    sources = (ROOT / "sidecar").rglob("*.py")
    return frozenset(name for path in sources for name in _VARIABLE.findall(path.read_text(encoding="utf-8")))


def unknown_variables(names: Sequence[str]) -> list[str]:
    """Those that the code does not name; the ones that are not ours are somebody else's business."""
    return [name for name in names if name.startswith("SIDECAR_") and name not in known_variables()]


def shell_lines(readme: Path) -> list[str]:
    """The commands in a page's shell blocks, each in one line."""
    blocks = _SHELL_BLOCK.findall(readme.read_text(encoding="utf-8"))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def named_files(line: str) -> list[str]:
    """The paths of this repository that a command names."""
    return [word for word in shlex.split(line, comments=True) if re.match(r"(examples|policies|otel)/", word)]
