"""A request's trace in its app: the context that is current while the app runs."""

from __future__ import annotations

from contextvars import Token
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span
from starlette.types import Message, Send

from sidecar.telemetry.spans.links import SPAN_KEY

APP_TRACE: Final = otel_context.create_key("admission-app-trace")
"""In a context: the `AppSpan` of the app's call that it belongs to."""
_EMPTY = Context()


class AppSpan:
    """A span that is current in this task from now on, in the context that its request came with, baggage included.

    `has_usage` says that the app has traced what its own call of the model used.
    """

    __slots__ = ("_is_over", "_span", "_token", "has_usage")

    def __init__(self, span: Span, parent: Context) -> None:
        self._span = span
        self._is_over = self.has_usage = False
        self._token = otel_context.attach(Context({**parent, SPAN_KEY: span, APP_TRACE: self}))

    def detach(self) -> None:
        """See `events.AppTrace`."""
        self._is_over = True
        otel_context.detach(self._token)

    async def outside(self, send: Send, message: Message) -> None:
        """See `events.AppTrace`."""
        before = self._token.old_value
        token = otel_context.attach(_EMPTY if before is Token.MISSING else before)
        try:
            await send(message)
        finally:
            otel_context.detach(token)

    def is_over_for(self, span: Span) -> bool:
        """True if `span` is this one, and its app has returned."""
        return self._is_over and span is self._span


def is_inherited(context: Context, span: Span) -> bool:
    """True if the current span of a request that has just come belongs to an earlier one on its connection.

    It has ended: no span around this request has. A server's task for a request inherits the context of the one before
    where that has let it read on (uvicorn, unless `reset_contextvars`).
    """
    if getattr(span, "end_time", None) is not None:
        return True
    before = context.get(APP_TRACE)
    return isinstance(before, AppSpan) and before.is_over_for(span)
