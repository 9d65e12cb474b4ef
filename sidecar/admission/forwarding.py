"""The request as the app gets it: the engine's priority and key replace the client's, every other byte stays."""

from __future__ import annotations

from collections.abc import Container, Sequence
from urllib.parse import quote

from starlette.types import Scope

from sidecar.admission.intake import CONTENT_ENCODING, SizedRequest
from sidecar.admission.request_path import path_for_app
from sidecar.context import Granted
from sidecar.engines.base import Forward
from sidecar.engines.registry import CLIENT_MEMBERS
from sidecar.events import Headers
from sidecar.payload.decode import Payload
from sidecar.payload.edit import insert, remove
from sidecar.policy.model import Endpoint, Policy
from sidecar.pools import Grant


def headers_for_app(pairs: Headers, request: SizedRequest, body: bytes, added: list[tuple[bytes, bytes]]) -> Headers:
    """The headers for the app: the client's `pairs`, with those `added`, to which the new length is added here."""
    if b"content-length" in request.headers and (body is not request.body or CONTENT_ENCODING in request.taken):
        added.append((b"content-length", b"%d" % len(body)))
    return forwarded_headers(pairs, request.taken, added)


def granted_of(grant: Grant, request: SizedRequest, policy: Policy, priority: int | float, request_id: str) -> Granted:
    """The grant for an app in the same process."""
    classification = request.classification
    tier, tenant = policy.tiers[classification.level].name, classification.tenant.name
    waited_s, starved_s = grant.queue_wait_us / 1e6, grant.starvation_us / 1e6
    return Granted(tier, tenant, grant.level, priority, waited_s, starved_s, request.tokens, request_id)


def forwarded_body(body: bytes, payload: Payload, forward: Forward, stream_options: bytes | None = None) -> bytes:
    """Removes every priority of the client's and inserts the engine's, and other `stream_options` where there are any.

    The same object where nothing changes.
    """
    if stream_options is not None:
        if payload.stream_options is not None:
            body = remove(body, ("stream_options",))
        body = insert(body, "stream_options", stream_options)
    if payload.priority is not None or payload.nvext is not None:  # hardly any request has one
        is_there = {"priority": payload.priority is not None, "nvext": payload.nvext is not None}
        for path in CLIENT_MEMBERS:
            if is_there[path[0]]:
                body = remove(body, path)
    return body if forward.member is None else insert(body, "priority", forward.member)


def forwarded_headers(
    headers: Headers, taken: Sequence[bytes], added: Sequence[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    """The client's headers without those `taken`, and with `added` in place of headers of the same names.

    A client lists in `Connection` the headers that a proxy must drop. It may not list one that is added here: the
    request would reach the engine without its granted priority, which some engines take for the best priority.
    """
    names = dict(added)
    gone = {*taken, *names}
    kept = [header for header in headers if header[0] not in gone]
    if b"connection" in dict(kept):
        kept = [(name, _without(names, value) if name == b"connection" else value) for name, value in kept]
    return [*kept, *added]


def _without(names: Container[bytes], connection: bytes) -> bytes:
    """A value of `Connection`, without these names."""
    return b", ".join(token for part in connection.split(b",") if (token := part.strip()).lower() not in names)


def forwarded_scope(scope: Scope, endpoint: Endpoint, headers: Headers) -> Scope:
    """A copy of the scope, with these headers and the path that the engine knows, however the client has spelled it.

    The scope itself, where nothing changes.
    """
    path = path_for_app(scope, endpoint)
    if path == scope["path"] and headers is scope["headers"]:
        return scope
    copy = {**scope, "headers": headers}
    if path != scope["path"]:
        copy["path"], copy["raw_path"] = path, quote(path).encode()
    return copy
