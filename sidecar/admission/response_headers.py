"""Response headers that the middleware adds: the request's id, how it was admitted, and what its tenant has left.

The `x-ratelimit-*` headers are OpenAI's: the limit per minute, how much may come at once now, and the time until the
whole limit may come at once again. Durations are written as Go writes them (`6m0s`, `1.5s`, `100ms`), because OpenAI's
clients parse that form.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sidecar.admission.intake import SizedRequest
from sidecar.apis import Api
from sidecar.errors import RemainingLimits
from sidecar.events import Headers
from sidecar.pools import Grant, Lease

REQUEST_ID = b"x-request-id"
ADMISSION_ID = b"x-admission-id"
"""Holds the request's id where the app's response has an `x-request-id` of its own."""
ANTHROPIC_ID = b"request-id"
"""Header that Anthropic's clients read the request's id from."""

_MESSAGES = Api.MESSAGES  # looked up once: an enumeration's attribute costs as much as a call
_RANDOM_BITS = 0xFFFFFFFF_FFFF_0FFF_3FFF_FFFFFFFFFFFF
_VERSION_4 = 0x00000000_0000_4000_8000_000000000000
"""The bits of a UUID of version 4 (RFC 9562) that are random, and those that say so."""
_is_valid_id = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch
_NO_WAIT = ((b"x-admission-wait-ms", b"0"), (b"server-timing", b"admission;dur=0.0"))


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own id of the request, up to 128 visible ASCII characters; else a random one.

    That is a UUID of version 4: apps check ids that they are given.
    """
    own = headers.get(REQUEST_ID)
    if own is not None and _is_valid_id(own):
        return own.decode("ascii")
    return (random.getrandbits(128) & _RANDOM_BITS | _VERSION_4).to_bytes(16, "big").hex()


def id_for_app(request_id: str, pairs: Headers, headers: Mapping[bytes, bytes]) -> Headers:
    """The request's id as a header for the app, where the client has sent none, one that is not used, or several."""
    sent = headers.get(REQUEST_ID)
    if sent is not None and len(headers) == len(pairs) and sent.decode("latin-1") == request_id:
        return ()
    return ((REQUEST_ID, request_id.encode("ascii")),)


def id_headers(request_id: str, headers: Headers, api: Api) -> list[tuple[bytes, bytes]]:
    """The headers with the request's id, for a response of `api` that has `headers` already."""
    own, id_name = request_id.encode(), REQUEST_ID
    for name, _ in headers:  # costs half as much as a dictionary
        if name == REQUEST_ID:
            id_name = ADMISSION_ID
    named = [(id_name, own)]
    if api is _MESSAGES and ANTHROPIC_ID not in dict(headers):
        named.append((ANTHROPIC_ID, own))
    return named


def early_headers(
    request: SizedRequest, lease: Lease, tier_names: Sequence[bytes], request_id: str
) -> list[tuple[bytes, bytes]]:
    """The headers that are known while the request still waits."""
    named = id_headers(request_id, (), request.api)
    tier = (b"x-admission-tier", tier_names[request.classification.level])
    return [*named, tier, *differences(request, tier_names), *_limit_headers(request, lease, tier_names)]


def admission_headers(
    request: SizedRequest, lease: Lease, tier_names: Sequence[bytes], preemptions: int
) -> list[tuple[bytes, bytes]]:
    """How the request was admitted, and everything that differs from what the client asked for."""
    grant, classification = lease.grant, request.classification
    assert grant is not None
    headers = [(b"x-admission-tier", tier_names[classification.level])]
    if classification.clamped_from is not None or classification.ignored:
        headers += differences(request, tier_names)
    headers += wait_headers(grant) if grant.queue_wait_us else _NO_WAIT
    if preemptions:
        headers.append((b"x-admission-preempted", b"%d" % preemptions))
    if grant.engine is not None:
        headers.append((b"x-admission-engine", grant.engine.rpartition("#")[0].encode("latin-1", "replace")))
    if classification.downgraded_from is not None or request.output_cap is not None or lease.allowance is not None:
        headers += _limit_headers(request, lease, tier_names)
    return headers


def wait_headers(wait: Grant) -> Iterable[tuple[bytes, bytes]]:
    """How long the request waited, in milliseconds, and for how much of that it starved."""
    if not wait.queue_wait_us:
        return _NO_WAIT
    wait_ms, starved_ms = wait.queue_wait_us / 1000, wait.starvation_us / 1000
    timing = (
        b"admission;dur=%.3f, starved;dur=%.3f" % (wait_ms, starved_ms)
        if starved_ms
        else b"admission;dur=%.3f" % wait_ms
    )
    return (b"x-admission-wait-ms", b"%d" % wait_ms), (b"server-timing", timing)


def differences(request: SizedRequest, tier_names: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """What of the client's own priority did not count."""
    classification = request.classification
    headers = []
    if classification.clamped_from is not None:
        headers.append((b"x-admission-clamped-from", tier_names[classification.clamped_from]))
    if classification.ignored:
        headers.append((b"x-admission-ignored", ", ".join(classification.ignored).encode("latin-1", "replace")))
    return headers


def _limit_headers(request: SizedRequest, lease: Lease, tier_names: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    headers = []
    downgraded_from = request.classification.downgraded_from
    if downgraded_from is not None:
        headers.append((b"x-admission-downgraded-from", tier_names[downgraded_from]))
    if request.output_cap is not None:
        headers.append((b"x-admission-max-output-tokens", b"%d" % request.output_cap))
    if lease.allowance is not None:
        headers += allowance_headers(lease.allowance)
    return headers


def allowance_headers(allowance: RemainingLimits) -> Iterator[tuple[bytes, bytes]]:
    """What is left of a tenant's limits."""
    for name, remaining in ((b"requests", allowance.requests), (b"tokens", allowance.tokens)):
        if remaining is not None:
            yield b"x-ratelimit-limit-" + name, b"%d" % remaining.per_minute
            yield b"x-ratelimit-remaining-" + name, b"%d" % remaining.left
            yield b"x-ratelimit-reset-" + name, duration(remaining.reset_us)


def duration(us: int) -> bytes:
    """A duration as Go writes it, in milliseconds, rounded up: a client that waits for so long is never too early."""
    ms = -(-us // 1000)
    if 0 < ms < 1000:
        return b"%dms" % ms
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = (b"%g" % (ms / 1000)) + b"s"
    if hours:
        return b"%dh%dm" % (hours, minutes) + seconds
    return b"%dm" % minutes + seconds if minutes else seconds
