"""Terminal in full-screen mode, restored however the program ends: by a key, Ctrl-C, an error or a signal."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_GLANCE_S = 0.2
"""How late a window's new size is noticed."""


def can_draw() -> bool:
    """Whether standard output is a terminal that can be drawn on, and standard input its keys."""
    try:
        import termios  # noqa: F401
    except ImportError:
        return False
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """The terminal while it is drawn on. See `drawn_on`."""

    def __init__(self) -> None:
        self._size = shutil.get_terminal_size()

    def measure(self) -> int:
        """How wide the window is now: what is drawn next is for this size."""
        self._size = shutil.get_terminal_size()
        return self._size.columns

    def show(self, lines: Sequence[str]) -> None:
        """Draws over what was there; what does not fit is said to be there."""
        height = self._size.lines
        shown = list(lines)
        if len(shown) > height:
            shown = [*shown[: height - 1], f"({len(shown) - height + 1} more lines: a taller window shows them)"]
        text = f"{_TO_LINE_END}\n".join(shown)
        _write(f"{_HOME}{text}{_TO_LINE_END}{_TO_SCREEN_END}")

    def wait(self, for_s: float) -> str:
        """The key that was pressed, or an empty string when the time is over or the window has another size."""
        end_s = time.monotonic() + for_s
        while (left_s := end_s - time.monotonic()) > 0 and shutil.get_terminal_size() == self._size:
            readable, _, _ = select.select([sys.stdin], [], [], min(left_s, _GLANCE_S))
            if readable:
                return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") or "q"  # end of input
        return ""


@contextlib.contextmanager
def drawn_on() -> Iterator[Screen]:
    """A screen of its own over what the terminal showed. SIGTERM and SIGHUP end the program by SystemExit."""
    import termios
    import tty

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setcbreak(keys)
        _write(_ENTER)
        yield Screen()
    finally:
        with contextlib.suppress(OSError):  # the terminal itself may be gone
            _write(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
