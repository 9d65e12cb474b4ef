"""SIGHUP in a server that is not ours: taken where it means nothing yet, and where it cannot be a terminal that closes.

Nobody asked the server's owner. So a handler that is there stays (a supervisor's, one of the server's own), as does a
signal that is ignored; and a process with a terminal ends with it as before, rather than to live on unseen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)


class Hangup:
    """Calls `called` in the running event loop at every SIGHUP, from `take` on and until `let_go`."""

    def __init__(self, called: Callable[[], None]) -> None:
        self._called = called
        self._loop: asyncio.AbstractEventLoop | None = None

    def take(self) -> bool:
        """Takes the signal, in this event loop, where it is free. False where it is not."""
        if _HANGUP is None or not _is_free(_HANGUP):
            return False
        loop = asyncio.get_running_loop()
        try:
            loop.add_signal_handler(_HANGUP, self._called)
        except (NotImplementedError, RuntimeError, ValueError):  # another kind of loop, or one that may not
            return False
        self._loop = loop
        return True

    def let_go(self) -> None:
        """The signal does again what it did."""
        loop, self._loop = self._loop, None
        if loop is not None and _HANGUP is not None and not loop.is_closed():
            loop.remove_signal_handler(_HANGUP)


def _is_free(hangup: signal.Signals) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(hangup) is signal.SIG_DFL and not _has_terminal()


def _has_terminal() -> bool:
    """Whether there is a terminal whose end this process is told by the same signal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    os.close(terminal)
    return True
