"""The request as the app sees it: the client's own, byte for byte, but for the priority and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.asgi.types import Scope
from sidecar.engines import CLIENT_MEMBERS, Forward, is_client_priority
from sidecar.events import Headers
from sidecar.payload import Payload
from sidecar.policy.policy import Endpoint
from sidecar.splice import insert, remove


def forwarded_body(body: bytes, payload: Payload, forward: Forward) -> bytes:
    """Takes every priority of the client's out and puts the engine's in. The same object where nothing changes."""
    if payload.priority is not None:
        body = remove(body, ("priority",))
    if payload.nvext is not None:
        for path in CLIENT_MEMBERS:
            body = remove(body, path)
    return body if forward.member is None else insert(body, "priority", forward.member)


def forwarded_headers(headers: Headers, added: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Without the client's engine priorities, and with `added` in place of headers of the same names."""
    replaced = {name for name, _ in added}
    kept = [pair for pair in headers if pair[0] not in replaced and not is_client_priority(pair[0])]
    return [*kept, *added]


def forwarded_scope(scope: Scope, endpoint: Endpoint) -> Scope:
    """A copy of the scope, on the path that the engine knows."""
    copy = dict(scope)
    if endpoint.forward_to is not None:
        copy["path"] = scope.get("root_path", "") + endpoint.forward_to
        copy["raw_path"] = copy["path"].encode()
    return copy
