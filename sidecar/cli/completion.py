"""Print a script that completes `sidecar` commands and their options in a shell.

It needs shtab, from the extra `completion`.
"""

from __future__ import annotations

import argparse
import importlib

from sidecar.cli.output import CommandFailed
from sidecar.extras import how_to_install

EXAMPLE = """\
  sidecar completion bash > ~/.local/share/bash-completion/completions/sidecar
  sidecar completion zsh > ~/.zfunc/_sidecar          with fpath+=~/.zfunc before compinit in ~/.zshrc"""
SHELLS = ("bash", "zsh", "tcsh")
_PATHS = frozenset(("PATH", "FILE", "POLICY", "TRACE", "FOLDER"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the shell."""
    parser.add_argument("shell", choices=SHELLS, help="which shell the script is for")


def run(args: argparse.Namespace) -> int:
    """Prints the script. Returns 2 where shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise CommandFailed(f"shtab is missing; {how_to_install('completion')}", 2) from None
    print(shtab.complete(_whole(shtab.FILE), shell=args.shell))
    return 0


def _whole(file: object) -> argparse.ArgumentParser:
    """One parser with every command. `file` marks the arguments that are paths."""
    from sidecar.cli import COMMANDS

    parser = argparse.ArgumentParser(prog="sidecar")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"sidecar.cli.{name.replace('-', '_')}")
        own = commands.add_parser(name, help=summary)
        module.configure(own)
        for action in own._actions:
            if action.metavar in _PATHS:
                action.complete = file  # type: ignore[attr-defined]  # shtab's own attribute
    return parser
