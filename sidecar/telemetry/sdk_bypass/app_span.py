"""A span of the bypass as an app finds it where it is current. What an app writes to it makes it a span of the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span, SpanContext

if TYPE_CHECKING:
    from sidecar.telemetry.sdk_bypass.spans import DirectSpan


class AppSpan(Span):
    """A span that is made directly, as one of OpenTelemetry's API."""

    def __init__(self, direct: DirectSpan) -> None:
        self._direct = direct

    def __getattr__(self, name: str) -> Any:
        return getattr(self._direct.of_sdk(), name)

    @property
    def end_time(self) -> int | None:
        """See the SDK's `ReadableSpan`."""
        return self._direct.ended_ns

    def get_span_context(self) -> SpanContext:
        """See `Span`."""
        return self._direct.context

    def is_recording(self) -> bool:
        """See `Span`."""
        return self._direct.ended_ns is None

    def end(self, end_time: int | None = None) -> None:
        """Does nothing: the request ends it."""

    def set_attributes(self, attributes: Any) -> None:
        """See `Span`."""
        self._direct.of_sdk().set_attributes(attributes)

    def set_attribute(self, key: str, value: Any) -> None:
        """See `Span`."""
        self._direct.of_sdk().set_attribute(key, value)

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """See `Span`."""
        self._direct.of_sdk().add_event(name, attributes, timestamp)

    def add_link(self, context: SpanContext, attributes: Any = None) -> None:
        """See `Span`."""
        self._direct.of_sdk().add_link(context, attributes)

    def update_name(self, name: str) -> None:
        """See `Span`."""
        self._direct.of_sdk().update_name(name)

    def set_status(self, status: Any, description: str | None = None) -> None:
        """See `Span`."""
        self._direct.of_sdk().set_status(status, description)

    def record_exception(self, exception: BaseException, *given: Any, **named: Any) -> None:
        """See `Span`."""
        self._direct.of_sdk().record_exception(exception, *given, **named)
