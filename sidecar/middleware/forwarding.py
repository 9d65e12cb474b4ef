"""The request as the app gets it: the engine's priority and key replace the client's, every other byte stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import Scope

from sidecar.context import Granted
from sidecar.engines.base import Forward
from sidecar.engines.registry import CLIENT_MEMBERS
from sidecar.events import Headers
from sidecar.middleware.intake import SizedRequest
from sidecar.payload.decode import Payload
from sidecar.payload.edit import insert, remove
from sidecar.policy.model import Endpoint, Policy
from sidecar.pools import Grant
from sidecar.sending import CLIENT_KEY


def forwarded_request(
    scope: Scope, endpoint: Endpoint, request: SizedRequest, forward: Forward, traced: Headers, *, has_begun: bool
) -> tuple[Scope, bytes]:
    """The scope and the body for the app. `traced` is the trace context.

    `has_begun`: the response has begun as plain text, so the engine must not compress the rest. A background response
    must not be compressed either, because its id has to be read.
    """
    copy = forwarded_scope(scope, endpoint)
    body = forwarded_body(request.body_to_forward(), request.payload, forward)
    if request.payload.background:
        copy.pop(CLIENT_KEY, None)
    added = [*forward.headers, *traced, *request.added]
    taken = [*request.taken, b"accept-encoding"] if has_begun or request.payload.background else request.taken
    if body is not request.body and b"content-length" in request.headers:
        added.append((b"content-length", b"%d" % len(body)))
    if added or taken:
        is_each_once = len(request.headers) == len(scope["headers"])
        own = request.headers if is_each_once and b"connection" not in request.headers else None
        if own is None:
            copy["headers"] = forwarded_headers(scope["headers"], taken, added)
        else:
            copy["headers"] = _replaced(own, taken, added)
    return copy, body


def _replaced(headers: Mapping[bytes, bytes], taken: Sequence[bytes], added: Headers) -> Headers:
    """As `forwarded_headers`, of headers that are each there once, without `Connection`: so are most requests'."""
    kept = dict(headers)
    for name in taken:
        kept.pop(name, None)
    for name, _ in added:
        kept.pop(name, None)
    return [*kept.items(), *added]


def granted_of(grant: Grant, request: SizedRequest, policy: Policy, priority: int | float) -> Granted:
    """The grant for an app in the same process."""
    classification = request.classification
    return Granted(
        tier=policy.tiers[classification.level].name,
        tenant=classification.tenant.name,
        level=grant.level,
        engine_priority=priority,
        queue_wait_s=grant.queue_wait_us / 1e6,
        starvation_s=grant.starvation_us / 1e6,
        tokens=request.tokens,
    )


def forwarded_body(body: bytes, payload: Payload, forward: Forward) -> bytes:
    """Removes every priority of the client's and inserts the engine's. The same object where nothing changes."""
    if payload.priority is not None or payload.nvext is not None:  # hardly any request has one
        is_there = {"priority": payload.priority is not None, "nvext": payload.nvext is not None}
        for path in CLIENT_MEMBERS:
            if is_there[path[0]]:
                body = remove(body, path)
    return body if forward.member is None else insert(body, "priority", forward.member)


def forwarded_headers(headers: Headers, taken: Sequence[bytes], added: Sequence[tuple[bytes, bytes]]) -> Headers:
    """The client's headers without those `taken`, and with `added` in place of headers of the same names.

    A client lists in `Connection` the headers that a proxy must drop. It may not list one that is added here: the
    request would reach the engine without its granted priority, which some engines take for the best priority.
    """
    ours = {name for name, _ in added}
    gone = ours.union(taken)
    kept = [pair for pair in headers if pair[0] not in gone]
    if b"connection" in dict(kept):
        kept = [(name, _without(ours, value)) if name == b"connection" else (name, value) for name, value in kept]
    return kept + list(added)


def _without(names: set[bytes], connection: bytes) -> bytes:
    return b", ".join(token for part in connection.split(b",") if (token := part.strip()).lower() not in names)


def forwarded_scope(scope: Scope, endpoint: Endpoint) -> Scope:
    """A copy of the scope, with the path that the engine knows."""
    copy = dict(scope)
    if endpoint.forward_to is not None:
        # The part before the endpoint's own path is where the app is mounted; some servers leave it out.
        copy["path"] = scope["path"].removesuffix(endpoint.path) + endpoint.forward_to
        copy["raw_path"] = copy["path"].encode()
    return copy
