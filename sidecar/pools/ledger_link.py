"""Link that carries a replica's calls to the ledger of its pool, and the answers back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

from sidecar.policy.model import Policy
from sidecar.pools.base import Ask, Clock, PeerReport
from sidecar.pools.calls import Call, EngineView, LedgerRules
from sidecar.pools.engines import EngineOffer
from sidecar.pools.ledger import Ledger
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.figures import Rules
from sidecar.scheduling.rate_limit import RateLimiter
from sidecar.scheduling.tickets import Ticket

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


# -- A policy, the engines of a fleet and a request that comes, in the words of the ledger.


def new_rules(policy: Policy, weight_percent: int) -> LedgerRules:
    """The rules of a policy."""
    rules = policy.rules
    stated = Rules(
        policy.tiers,
        rules.promote_after_us,
        rules.ceiling,
        rules.max_preemptions,
        weight_percent,
        rules.is_by_gain,
        policy.fair if rules.is_by_gain else Fraction(1),
    )
    return LedgerRules.of(stated)


def engine_views(offers: Iterable[EngineOffer], now_us: int) -> list[EngineView]:
    """The engines as this process sees them."""
    return [
        EngineView(
            offer.id,
            offer.tokens,
            offer.requests,
            offer.prefill,
            offer.speed,
            offer.takes_new,
            now_us - offer.since_us if offer.ramp_us else 0,
            offer.ramp_us,
        )
        for offer in offers
    ]


def new_ticket(ask: Ask, number: int, arrived_us: int) -> Ticket:
    """The ticket of a request that came as the `number`-th one."""
    return Ticket(
        str(number),
        ask.tier,
        ask.tenant,
        ask.tokens,
        ask.requests,
        ask.prompt,
        ask.weight,
        dict(ask.hits),
        frozenset(ask.barred),
        arrived_us,
        "",
        number,
        ask.gain,
        user=ask.user,
        cost=None if ask.cost is None else ask.cost.in_turns(ask.tokens),
    )
