"""Link that carries a replica's calls to the ledger of its pool, and the answers back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from sidecar.pools.base import Clock, PeerReport
from sidecar.pools.calls import Call
from sidecar.pools.ledger import Ledger
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.rate_limit import RateLimiter

if TYPE_CHECKING:
    from sidecar.pools.pool import Pool


class Link(Protocol):
    """The way to one ledger.

    `heartbeat_us` and `lazy_us`: how often, and how late, the ledger needs to get what nobody waits for. `is_shared`:
    it is in a store, for many processes, and answers later; `round_trips` were made to it. `near`: the ledger, where it
    is in this process.
    """

    heartbeat_us: int
    lazy_us: int
    is_shared: bool
    round_trips: int

    @property
    def near(self) -> Ledger | None:
        """The ledger, where it is in this process."""

    def send(self, call: Call, user: Pool) -> None:
        """Carries a call. `user` gets the reply or the loss, at once or later; another call may follow then."""

    async def share(self, who: str, report: bytes) -> Mapping[str, PeerReport]:
        """See `Pool.share`."""

    async def close(self) -> None:
        """Carries no more."""


class LocalLink:
    """A ledger in this process, which answers at once. Nobody else shares it, so silence means nothing."""

    heartbeat_us = lazy_us = UNBOUNDED
    is_shared = False
    round_trips = 0

    def __init__(self, clock: Clock, allowances: RateLimiter | None = None) -> None:
        self._clock = clock
        self.near: Ledger | None = Ledger(allowances)

    def send(self, call: Call, user: Pool) -> None:
        """See `Link.send`."""
        assert self.near is not None
        user.answered(self.near.execute(call, self._clock())[0])

    async def share(self, who: str, report: bytes) -> Mapping[str, PeerReport]:  # noqa: ARG002
        """See `Link.share`."""
        return {}

    async def close(self) -> None:
        """See `Link.close`."""
