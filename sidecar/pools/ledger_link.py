"""What carries a replica's calls to the ledger of its pool, and the answers back."""

from __future__ import annotations

from typing import Protocol

from sidecar.core.amounts import UNBOUNDED
from sidecar.core.calls import Call, Reply, WakeUp
from sidecar.core.ledger import Ledger
from sidecar.core.rate_limit import RateLimiter
from sidecar.pools.runtime import Clock


class LinkUser(Protocol):
    """Who is told what a link brings, on the event loop."""

    def answered(self, reply: Reply) -> None:
        """The reply to a call."""

    def unanswered(self) -> None:
        """The call in flight has no answer: the connection ended."""

    def woken(self, wake_up: WakeUp) -> None:
        """The ledger published something to this replica, or to all."""


class Link(Protocol):
    """The way to one ledger.

    `heartbeat_us` and `lazy_us`: how often, and how late, the ledger needs to hear what nobody waits for. `knew`: how
    many replicas are in the pool before the first answer. `near`: the ledger, where it is in this process.
    """

    heartbeat_us: int
    lazy_us: int
    knew: int
    near: Ledger | None

    def send(self, call: Call, user: LinkUser) -> None:
        """Carries a call. `user` is told the reply or the loss, at once or later; another call may follow then."""

    async def close(self) -> None:
        """Carries no more."""


class LocalLink:
    """A ledger in this process, which answers at once. Nobody else shares it, so silence means nothing."""

    heartbeat_us = lazy_us = UNBOUNDED
    knew = 1

    def __init__(self, clock: Clock, allowances: RateLimiter | None = None) -> None:
        self._clock = clock
        self.near: Ledger | None = Ledger(allowances)

    def send(self, call: Call, user: LinkUser) -> None:
        """See `Link.send`."""
        assert self.near is not None
        user.answered(self.near.execute(call, self._clock())[0])

    async def close(self) -> None:
        """See `Link.close`."""
