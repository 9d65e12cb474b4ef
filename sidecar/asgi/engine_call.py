"""One call of the app for a request: whether the engine may still compute for it when the call has ended."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.asgi.pending_aborts import Held, PendingAbort, PendingAborts

CALL_KEY = "sidecar.engine_call"
"""Where a reverse proxy finds it in the scope."""


class EngineCall:
    """The engine computes from the call on, until its whole response has come: an error is a response, too.

    A proxy that answers in the engine's place says `answered_by_proxy`; its answer does not end the engine's work.
    """

    __slots__ = ("_is_proxys", "_pending", "may_run")

    def __init__(self) -> None:
        self.may_run = True
        self._is_proxys = False
        self._pending: PendingAbort | None = None

    def answered(self) -> None:
        """The response is complete."""
        if not self._is_proxys:
            self.may_run = False

    def answered_by_proxy(self, *, was_sent: bool) -> None:
        """The proxy answers. `was_sent`: the engine may have got the request."""
        self._is_proxys = True
        self.may_run = was_sent

    def when_aborted(self, release: Callable[[], object], aborts: PendingAborts, due_us: int, held: Held) -> None:
        """Calls `release` at `due_us`. The first call says when, a later one only what."""
        if self._pending is None:
            self._pending = aborts.add(release, due_us=due_us, held=held)
        else:
            self._pending.then(release)


def given_back_anyway(on_preempt: Callable[[], None] | None) -> Callable[[], None] | None:
    """What a lease calls, once its request has ended, where its room is wanted: nothing makes it free any sooner."""
    return None if on_preempt is None else _nothing


def _nothing() -> None:
    pass
