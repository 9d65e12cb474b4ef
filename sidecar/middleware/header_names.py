"""What the names of a request's headers say. Clients send the same names with every request: each set is read once."""

from __future__ import annotations

import msgspec

from sidecar.classify import may_hold_keys
from sidecar.engines.registry import client_headers
from sidecar.events import Headers
from sidecar.middleware.credentials import BEARER, Credentials
from sidecar.middleware.slo_headers import SLO_HEADERS
from sidecar.policy.model import Policy, Source

MOST_READ = 256
"""Sets of names that are kept."""
MOST_NAMES, LARGEST_KEPT = 64, 4096
"""Names, and their bytes together, of a set that is kept. No client needs more, and 16,000 names fit in a head."""
MAX_WAIT_HEADER = b"x-admission-max-wait"
CONTENT_ENCODING = b"content-encoding"
_NOT_PACKED = {b"accept-encoding": b"identity"}
"""No answer may be compressed: its usage is read, and it may have begun as plain text."""
_UNUSUAL = frozenset((b"via", b"transfer-encoding", CONTENT_ENCODING, MAX_WAIT_HEADER, *SLO_HEADERS))


class HeaderNames(msgspec.Struct, frozen=True, gc=False):
    """What a request's headers may say, known from their names.

    `claims` names those from which some engine would take a priority or a tenant. They are not forwarded, and neither
    are the others of `taken`, which hold a tenant's key where `Authorization` is a bearer's. The engine gets those
    `added`. `may_state_tier`: the headers have to be read before the tier is known. `are_usual`: there is none about
    the way here, the body's form, the longest wait or the objective. `may_hold_key`: there is one that may hold a key,
    read here or not.
    """

    claims: tuple[bytes, ...]
    taken: tuple[bytes, ...]
    added: Headers
    may_state_tier: bool
    are_usual: bool
    may_hold_key: bool


class NamesRead(dict[tuple[bytes, ...], HeaderNames]):
    """What the lower-case names of requests' headers say under one policy, by the names.

    Bounded, in number and in size: anyone chooses the names, also who has no key. A dictionary, because its look-up
    costs half as much as that of `lru_cache`.
    """

    def __init__(self, policy: Policy, credentials: Credentials) -> None:
        super().__init__()
        self._credentials = credentials
        self._tier_header = policy.tier_header
        self._reads_engines = Source.ENGINE in policy.sources

    def __missing__(self, names: tuple[bytes, ...]) -> HeaderNames:
        """Reads a set of names that has not come before."""
        claims = client_headers(names)
        keys = self._credentials.taken(dict.fromkeys(names, BEARER))
        may_state_tier = bool(claims) or self._tier_header in names or self._reads_engines
        found = HeaderNames(
            claims,
            (*claims, *keys),
            (*self._credentials.added, *((name, value) for name, value in _NOT_PACKED.items() if name in names)),
            may_state_tier,
            _UNUSUAL.isdisjoint(names),
            any(map(may_hold_keys, names)),
        )
        if len(names) <= MOST_NAMES and sum(map(len, names)) <= LARGEST_KEPT:
            if len(self) >= MOST_READ:
                self.clear()
            self[names] = found
        return found
