"""What a client is told in every answer: by which id the operator finds its request, and how it waited."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping

from sidecar.events import Headers
from sidecar.pools import Grant

REQUEST_ID = b"x-request-id"
ADMISSION_ID = b"x-admission-id"
"""Says the id where the app has written an `x-request-id` of its own into its answer."""

_in_order = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch
_NO_WAIT = ((b"x-admission-wait-ms", b"0"), (b"server-timing", b"admission;dur=0.0"))


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own id of the request, up to 128 visible characters of ASCII; where it has none, a random one."""
    own = headers.get(REQUEST_ID)
    if own is not None and _in_order(own):
        return own.decode("ascii")
    return f"{random.getrandbits(128):032x}"


def id_header(request_id: str, headers: Headers) -> tuple[bytes, bytes]:
    """What names the request in an answer that has these headers already."""
    for name, _ in headers:
        if name == REQUEST_ID:
            return ADMISSION_ID, request_id.encode("ascii")
    return REQUEST_ID, request_id.encode("ascii")


def wait_headers(wait: Grant) -> Iterable[tuple[bytes, bytes]]:
    """How the request waited, in milliseconds, and how much of that it starved."""
    if not wait.queue_wait_us:
        return _NO_WAIT
    wait_ms, starved_ms = wait.queue_wait_us / 1000, wait.starvation_us / 1000
    timing = (
        b"admission;dur=%.3f, starved;dur=%.3f" % (wait_ms, starved_ms)
        if starved_ms
        else b"admission;dur=%.3f" % wait_ms
    )
    return (b"x-admission-wait-ms", b"%d" % wait_ms), (b"server-timing", timing)
