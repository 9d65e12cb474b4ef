"""The `sidecar` command. Each subcommand is a module of this package, imported only when it is the one that runs.

A command module has `configure(parser)`, which adds its arguments, `run(args)`, which returns the exit code, and
`EXAMPLE`, a line or more shown at the end of its `--help`. Its first docstring line is its summary. One with
`PASSES_ON = True` is given, as `args.passed_on`, what it did not ask for; for the others that is a mistake.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Protocol

from sidecar.cli.environment import from_environment, options_by_name, variable_for
from sidecar.cli.output import CommandFailed, say
from sidecar.version import version_line

COMMANDS = {
    "init": "write a starter policy that fits an engine, with a key for each tenant",
    "serve": "run the proxy in front of an engine",
    "trtllm-serve": "run the real trtllm-serve with the middleware mounted in it",
    "sglang-serve": "run the real SGLang server with the middleware mounted in it",
    "emulate": "run an OpenAI-compatible engine emulator, no GPU needed",
    "demo": "show what admission does: three runs on the same arrivals",
    "check": "check a policy: every mistake at once, with file and line",
    "explain": "say which tier a request gets, and why; or why one waited",
    "top": "watch the pool in a terminal: who waits, who starves, and why",
    "engines": "list the engines of a pool, drain one, or resume it",
    "observed": "report what enforcing would have done, in mode: observe",
    "tenants": "list the tenants, write one to the store, or remove it from there",
    "usage": "report what each tenant used, by day, tier and model",
    "keys": "make an API key, or hash one for a tenant's file",
    "doctor": "find out whether an engine's priority does anything, and why not",
    "replay": "play a trace against a server, and say what each tier went through",
    "completion": "print a script that completes these commands in a shell",
    "simulate": "play a trace in virtual time, and compare policies on it",
}
_BY_VARIABLE = "Each option --NAME is also read from the environment, as {}."


class Command(Protocol):
    """Interface of a command module."""

    EXAMPLE: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the work and returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code; a wrong command line exits with 2, as argparse does."""
    _mend_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where its failure can be handled
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt begins a line of its own
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"sidecar: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    overview = _overview()
    chosen = overview.parse_args(arguments[:1]).command
    command: Command = importlib.import_module(f"sidecar.cli.{chosen.replace('-', '_')}")
    passes_on = getattr(command, "PASSES_ON", False)
    parser = argparse.ArgumentParser(
        prog=f"sidecar {chosen}",
        description=(command.__doc__ or "").strip(),
        epilog=f"example:\n{command.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=not passes_on,  # what begins like one of ours may be another command's
    )
    command.configure(parser)
    if options_by_name(parser):
        parser.epilog = f"{parser.epilog}\n\n{_BY_VARIABLE.format(variable_for(chosen, '--NAME'))}"
    given = arguments[1:]
    takes_commands = parser._subparsers is not None  # else its arguments may stand between and after its options
    parse = parser.parse_known_args if passes_on or takes_commands else parser.parse_known_intermixed_args
    args, passed_on = parse([*from_environment(parser, chosen, given, os.environ), *given])
    if passed_on and not passes_on:
        parser.error(f"unrecognized arguments: {' '.join(passed_on)}")
    args.passed_on = passed_on
    try:
        return command.run(args)
    except CommandFailed as end:
        several = "\n" if "\n" in str(end) else " "  # lines of their own, as a file's mistakes are read
        say(f"sidecar {chosen}:{several}{end}", sys.stderr)
        return end.code


def _mend_streams() -> None:
    """No stream is missing, and none fails at a character that its encoding does not have.

    Python has None for a stream that was closed before it began (`>&-`), and a path may hold bytes that are no text.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  until the process ends
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Sends standard output nowhere: the end of Python would write there again, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidecar",
        description="Admission control in front of an LLM engine.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<12} {summary}" for name, summary in COMMANDS.items())
        + "\n\n`sidecar COMMAND --help` shows a command's arguments and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_line())
    parser.add_argument("command", type=_command, metavar="COMMAND", help="one of those below")
    return parser


def _command(name: str) -> str:
    """Raises ArgumentTypeError for what is no command, with the nearest one."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        known = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise argparse.ArgumentTypeError(f"{name!r} is no command; {known}")
    return name
