"""Shared output of the commands: an answer as text and as JSON, progress, and the sentence that ends one that fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from sidecar.policy.rules import UNLIMITED
from sidecar.telemetry.logs.formats import one_line

if TYPE_CHECKING:
    from sidecar.tools.loadgen import Progress

STANDARD_OUTPUT = "-"
LOG_EVERY_S = 2.0


def reporter(title: str) -> Callable[[float, Progress], None]:
    """Says how far a run is: on a terminal in one line that changes, in a log with a line now and then."""
    is_terminal = sys.stderr.isatty()
    last_s = -LOG_EVERY_S

    def report(elapsed_s: float, progress: Progress) -> None:
        nonlocal last_s
        if not is_terminal and not progress.is_over and elapsed_s - last_s < LOG_EVERY_S:
            return
        last_s = elapsed_s
        counts = f"sent {progress.sent:5}  answered {progress.answered:5}  under way {progress.under_way:5}"
        failed = f"  failed {progress.failed}" if progress.failed else ""
        line = f"{title:24} {elapsed_s:5.1f} s  {counts}{failed}"
        ends = "\n" if progress.is_over or not is_terminal else ""
        print(f"\r{line}" if is_terminal else line, end=ends, file=sys.stderr, flush=True)

    return report


class CommandFailed(Exception):
    """Ends a command with `code`: `main` prints the message on standard error, after the command's name."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def say(text: str, out: TextIO | None = None) -> None:
    """Prints text for people. What is no end of a line, and does not print, is shown as its code.

    Names come from clients, engines and traces: none is a command to the terminal.
    """
    print("\n".join(map(one_line, text.split("\n"))), file=out or sys.stdout, flush=True)


def require_writable(path: str | None) -> None:
    """Raises CommandFailed where nothing could be written to `path`, before a minute is spent on what to write."""
    if path in (None, STANDARD_OUTPUT):
        return
    try:
        Path(str(path)).open("ab").close()
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror or error}") from None


def show(json_target: str | None, figures: Any, lines: Callable[[], Sequence[str]]) -> int:
    """Prints the lines, unless standard output is for JSON, and writes the figures. Returns the exit code."""
    if json_target != STANDARD_OUTPUT:
        say("\n".join(lines()))
    return 0 if write_json(json_target, figures) else 1


def write_json(target: str | None, figures: Any) -> bool:
    """Writes records, mappings and lists as JSON to `target`; nothing for None. False where it cannot be written."""
    return write_text(target, lambda: _as_json(figures))


def _as_json(figures: Any) -> str:
    try:
        return msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"
    except UnicodeEncodeError:  # a path with bytes that are no text: the standard library writes them as escapes
        return json.dumps(msgspec.to_builtins(figures), indent=2) + "\n"


def write_text(target: str | None, write: Callable[[], str]) -> bool:
    """Writes the text that `write` makes to `target`; nothing for None. False where it cannot be written."""
    if target is None:
        return True
    text = write()
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return True
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        say(f"{target}: cannot be written ({error.strerror})", sys.stderr)
        return False
    return True


def bounded(amount: int) -> int | None:
    """An amount as JSON has it: None where there is no bound."""
    return None if amount >= UNLIMITED else amount
