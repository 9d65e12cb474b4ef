"""API keys on the way to the engine: which of the client's headers hold one, and what the engine gets instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.classify import API_KEY_HEADERS
from sidecar.events import Headers

AUTHORIZATION = b"authorization"
KEY_HEADERS = (AUTHORIZATION, *API_KEY_HEADERS)
BEARER = b"Bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """Rules for API keys on the way to the engine. `engine_key` is the engine's own key, None where it has none.

    A tenant's key gives access to the tenant's share of the pool, and an engine would write it into its logs. So the
    key is removed, unless the policy says `forward_key: true` (`is_forwarded`). Then the client's headers pass
    unchanged, and the engine's key is not added.

    `of_gateway` are the headers of a gateway that names tenants: no engine gets them, whoever sent them. `added` are
    those that the engine gets instead.
    """

    is_forwarded: bool = False
    engine_key: bytes | None = field(default=None, repr=False)
    of_gateway: Sequence[bytes] = ()
    added: Headers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Makes the headers that the engine gets instead."""
        has_none = self.is_forwarded or self.engine_key is None
        added = () if has_none else ((AUTHORIZATION, BEARER + (self.engine_key or b"")),)
        object.__setattr__(self, "added", added)

    def taken(self, headers: Mapping[bytes, bytes]) -> Sequence[bytes]:
        """The names of the client's headers that hold, or may hold, a tenant's key: they must not be forwarded.

        All of them, where several are there: clients of two providers send the same key in each. `Authorization` with
        another scheme, such as Basic, holds no tenant's key and stays.
        """
        names = [name for name in self.of_gateway if name in headers]
        if self.is_forwarded:
            return names
        if headers.get(AUTHORIZATION, b"").lstrip()[:6].lower() == b"bearer":
            names.append(AUTHORIZATION)
        names += [name for name in API_KEY_HEADERS if name in headers]
        return names
