"""The keys of a request on its way to the engine: the tenant's is for the door alone, the engine's own goes on.

A tenant's key is worth as much as the tenant's share of the pool, and an engine has no use for it: its log, its
tracing and whoever else sees its requests would learn it. So it ends here, unless the policy says `forward_key: true`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.asgi.types import Scope
from sidecar.errors import InvalidHeader

_AUTHORIZATION, _API_KEY = b"authorization", b"x-api-key"
_MUST_BE_ONE = (_AUTHORIZATION, _API_KEY)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What becomes of a client's key. `engine_key` is the engine's own, None where it has none.

    With `is_forwarded` the client's headers pass as they are, and the engine's key is not put in their place.
    """

    is_forwarded: bool = False
    engine_key: bytes | None = field(default=None, repr=False)

    def taken(self, headers: Mapping[bytes, bytes]) -> Sequence[bytes]:
        """The names of the client's headers that hold, or may hold, a key of the door's: they must not pass on.

        Both where both are there: clients of two providers send the same key in each. `Authorization` with another
        scheme, such as Basic, is no business of the door's and stays.
        """
        if self.is_forwarded:
            return ()
        names = []
        if headers.get(_AUTHORIZATION, b"").lstrip()[:6].lower() == b"bearer":
            names.append(_AUTHORIZATION)
        if _API_KEY in headers:
            names.append(_API_KEY)
        return names

    @property
    def added(self) -> Sequence[tuple[bytes, bytes]]:
        """What the engine gets in place of it."""
        if self.is_forwarded or self.engine_key is None:
            return ()
        return ((_AUTHORIZATION, b"Bearer " + self.engine_key),)


def refuse_two_keys(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Raises InvalidHeader where a header that holds a key is there twice: the engine might read the other one."""
    if len(headers) == len(scope["headers"]):
        return
    for name in _MUST_BE_ONE:
        if sum(found == name for found, _ in scope["headers"]) > 1:
            raise InvalidHeader(f"{name.decode()} is given twice; send one key, once")
