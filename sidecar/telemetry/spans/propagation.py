"""Trace context in and out: the client's headers to a parent, a span to the headers that go on to the engine.

`OTEL_PROPAGATORS` is respected: the propagators that the process has configured read and write them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import entry_points

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.environment_variables import OTEL_PROPAGATORS
from opentelemetry.propagators.textmap import Getter, Setter, TextMapPropagator
from opentelemetry.trace import Span, SpanContext, SpanKind

from sidecar.events import Headers, Received
from sidecar.telemetry.spans.app_trace import is_inherited
from sidecar.telemetry.spans.links import SPAN_KEY

# -- OpenTelemetry's propagators, without the names of `OTEL_PROPAGATORS` that cannot be had.
#
# The specification of that variable wants a warning for an unknown name. The API raises while
# `opentelemetry.propagate` is imported (`_load_propagators`, 1.45), and no process with such a name would start.

_log = logging.getLogger("sidecar.telemetry")


@contextmanager
def _usable_names() -> Iterator[None]:
    """The variable has only names that can be had, while the block runs. Logs the others."""
    written = os.environ[OTEL_PROPAGATORS]
    names = [name.strip() for name in written.split(",")]
    kept = [name for name in names if _can_be_had(name)]
    left_out = ", ".join(name for name in names if name not in kept)
    message = "%s: %s is not installed, and is left out; in force: %s"
    _log.warning(message, OTEL_PROPAGATORS, left_out, ", ".join(kept) or "none", extra={"event": "propagator_unknown"})
    os.environ[OTEL_PROPAGATORS] = ",".join(kept) or "none"
    try:
        yield
    finally:
        os.environ[OTEL_PROPAGATORS] = written


def _can_be_had(name: str) -> bool:
    try:
        return any(found.load()() for found in entry_points(group="opentelemetry_propagator", name=name))
    except Exception:
        return False


try:
    from opentelemetry import propagate
except Exception:  # whatever a propagator raises
    with _usable_names():
        from opentelemetry import propagate

__all__ = ["propagate"]


class _HeaderGetter(Getter[Headers]):
    """Reads ASGI headers; names are matched in any case, as some propagators spell theirs with capitals."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        wanted = key.lower().encode("latin-1")
        return [value.decode("latin-1") for name, value in carrier if name == wanted] or None

    def keys(self, carrier: Headers) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


class _HeaderSetter(Setter[list[tuple[bytes, bytes]]]):
    """Writes ASGI headers."""

    def set(self, carrier: list[tuple[bytes, bytes]], key: str, value: str) -> None:
        carrier.append((key.lower().encode("latin-1"), value.encode("latin-1")))


@lru_cache(maxsize=4)
def _fields_for(propagator: TextMapPropagator) -> frozenset[bytes]:
    return frozenset(field.lower().encode("latin-1") for field in propagator.fields)


_GETTER = _HeaderGetter()
_SETTER = _HeaderSetter()
_TRACEPARENT = b"traceparent"
_TRACESTATE = b"tracestate"
_NO_PARENT = Context()
_traceparent = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?").fullmatch


def parent_for(received: Received) -> tuple[Context, SpanKind]:
    """The context to start `admission` in, and its kind.

    Mounted into a server that is instrumented itself, the request's SERVER span is there already and has read the
    headers: then we are a part of it (INTERNAL). Otherwise the parent is what the client sent, if anything.
    """
    current = otel_context.get_current()
    if current and (above := trace.get_current_span(current)).get_span_context().is_valid:
        if not is_inherited(current, above):
            return current, SpanKind.INTERNAL
        current = _NO_PARENT
    if _fields_for(propagate.get_global_textmap()).isdisjoint(dict(received.headers)):
        return current, SpanKind.SERVER
    return propagate.extract(received.headers, current, _GETTER), SpanKind.SERVER


def client_trace(received: Received) -> SpanContext | None:
    """The ids in a client's W3C `traceparent`: by these a request is found where the process makes no spans."""
    found = _traceparent(dict(received.headers).get(_TRACEPARENT, b""))
    if found is None:
        return None
    context = SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True)
    return context if context.is_valid else None


def injected(span: Span, received: Received) -> Headers:
    """The headers that carry a span's context on, in place of the client's own.

    Nothing but the span goes on, so that baggage is not written again: the client's own passes unchanged.
    """
    headers: list[tuple[bytes, bytes]] = []
    propagate.get_global_textmap().inject(headers, Context({SPAN_KEY: span}), _SETTER)
    names = dict(headers)
    # A tracestate that was not taken over belongs to another trace, and must not travel beside our traceparent. W3C
    # lets an empty one replace it.
    if _TRACEPARENT in names and _TRACESTATE not in names and _TRACESTATE in dict(received.headers):
        headers.append((_TRACESTATE, b""))
    return headers
