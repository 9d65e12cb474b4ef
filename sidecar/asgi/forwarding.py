"""The request as the app sees it: the client's own, byte for byte, but for the priority and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidecar.asgi.types import Scope
from sidecar.asgi.understanding import Understood
from sidecar.engines.base import Forward
from sidecar.engines.registry import CLIENT_MEMBERS
from sidecar.events import Headers
from sidecar.granted import Granted
from sidecar.payload import Payload
from sidecar.policy.model import Endpoint, Policy
from sidecar.pools import Grant
from sidecar.splice import insert, remove


class ForwardedRequest(NamedTuple):
    """What the app is called with."""

    scope: Scope
    body: bytes


def forwarded_request(
    scope: Scope, endpoint: Endpoint, understood: Understood, forward: Forward, traced: Headers, *, has_begun: bool
) -> ForwardedRequest:
    """The request with the engine's priority and key, and the trace's context, in place of the client's own.

    An answer that `has_begun` as plain text goes on so: the engine is not told that the client reads compressed ones.
    Nor is it for a background response, whose id has to be read.
    """
    copy = forwarded_scope(scope, endpoint)
    body = forwarded_body(understood.body_to_forward(), understood.payload, forward)
    added = [*forward.headers, *traced, *understood.added]
    taken = [*understood.taken, b"accept-encoding"] if has_begun or understood.payload.background else understood.taken
    if body is not understood.body and b"content-length" in understood.headers:
        added.append((b"content-length", b"%d" % len(body)))
    if added or taken:
        copy["headers"] = forwarded_headers(scope["headers"], taken, added)
    return ForwardedRequest(copy, body)


def granted_of(grant: Grant, understood: Understood, policy: Policy, priority: int | float) -> Granted:
    """What an app in the same process is told of the grant."""
    classification = understood.classification
    return Granted(
        tier=policy.tiers[classification.level].name,
        tenant=classification.tenant.name,
        level=grant.level,
        engine_priority=priority,
        queue_wait_s=grant.queue_wait_us / 1e6,
        starvation_s=grant.starvation_us / 1e6,
        tokens=understood.tokens,
    )


def forwarded_body(body: bytes, payload: Payload, forward: Forward) -> bytes:
    """Takes every priority of the client's out and puts the engine's in. The same object where nothing changes."""
    is_there = {"priority": payload.priority is not None, "nvext": payload.nvext is not None}
    for path in CLIENT_MEMBERS:
        if is_there[path[0]]:
            body = remove(body, path)
    return body if forward.member is None else insert(body, "priority", forward.member)


def forwarded_headers(headers: Headers, taken: Sequence[bytes], added: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Without those `taken` from the client, and with `added` in place of headers of the same names.

    A client names in `Connection` what a proxy must drop. It may not name what is ours: the engine would get
    the request without the priority that it was granted, which some engines take for the best there is.
    """
    ours = {name for name, _ in added}
    gone = ours.union(taken)
    kept = [pair for pair in headers if pair[0] not in gone]
    if any(name == b"connection" for name, _ in kept):
        kept = [(name, _without(ours, value)) if name == b"connection" else (name, value) for name, value in kept]
    return kept + list(added)


def _without(names: set[bytes], connection: bytes) -> bytes:
    return b", ".join(token for part in connection.split(b",") if (token := part.strip()).lower() not in names)


def forwarded_scope(scope: Scope, endpoint: Endpoint) -> Scope:
    """A copy of the scope, on the path that the engine knows."""
    copy = dict(scope)
    if endpoint.forward_to is not None:
        # What stands before the endpoint's own path is where the app is mounted; some servers leave it out.
        copy["path"] = scope["path"].removesuffix(endpoint.path) + endpoint.forward_to
        copy["raw_path"] = copy["path"].encode()
    return copy
