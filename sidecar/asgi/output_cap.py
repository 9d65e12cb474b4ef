"""A tenant's `max_output_tokens`: more is refused, and a request that names no maximum is given it."""

from __future__ import annotations

from sidecar.apis import Api
from sidecar.engines import Engine
from sidecar.errors import OutputTooLong
from sidecar.payload import Payload
from sidecar.policy.model import Tenant
from sidecar.splice import insert, remove

_FIELDS = {
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
}
"""Where each API names the maximum, for every choice; the first is written. Embeddings have no output."""


def cap_of(api: Api, payload: Payload, body: bytes, tenant: Tenant, engine: type[Engine]) -> int | None:
    """The cap that the body must be given, None where it stays below by itself. Raises OutputTooLong.

    A 0 is no maximum to engines that take it for an absent one, where an answer without tokens makes no sense.
    """
    most = tenant.limits.max_output_tokens
    if most is None or api not in _FIELDS:
        return None
    asked = max(payload.max_output_tokens or 0, payload.other_maximum or 0)
    if asked > most:
        raise OutputTooLong(
            f"{_FIELDS[api][-1]}: {asked} is more than the {most} tokens that one answer to tenant {tenant.name} may "
            f"have; send {most} or less"
        )
    default = engine.default_completion_tokens
    if api is Api.COMPLETIONS and default is not None and most >= default and remove(body, ("max_tokens",)) is body:
        return None  # a cap above the engine's default would make the answer longer
    is_unbounded = payload.max_output_tokens is None or (asked == 0 and api is not Api.COMPLETIONS)
    return most if is_unbounded else None


def capped(api: Api, body: bytes, most: int) -> bytes:
    """The body with the cap as its only maximum; every other byte stays."""
    for field in _FIELDS[api]:
        body = remove(body, (field,))
    return insert(body, _FIELDS[api][0], b"%d" % most)
