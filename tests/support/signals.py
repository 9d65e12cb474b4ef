"""Default signals for the processes that tests start, wherever the suite itself runs.

`nohup` ignores SIGHUP, and a shell ignores SIGINT and SIGQUIT in the commands that it runs in the background. A process
inherits what is ignored, so that a test would wait forever for a process that it interrupts. In a new program a signal
with a handler has its default again, and a handler that does nothing keeps the suite itself running as before.
"""

from __future__ import annotations

import signal

_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def restore_for_children() -> None:
    """Gives every process that is started from now on the default of each signal that is ignored here."""
    for number in _PASSED_ON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
