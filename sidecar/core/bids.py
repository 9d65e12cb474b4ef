"""The waiting tickets of one replica: those that it shows the ledger as bids, and those behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sidecar.core.calls import BIDS_SHOWN, Bid, GainBid, TierHeld, Withdrawn
from sidecar.core.queue import FairQueue
from sidecar.core.tickets import Ticket


@dataclass
class _Tier:
    """`queue`: those not shown, in fair order by the tags of the last reply. `shown`: by bid."""

    name: str
    queue: FairQueue = field(default_factory=FairQueue)
    shown: dict[int, Ticket] = field(default_factory=dict)
    afresh: int = 0


class Bids:
    """Shows of each tier at most `most` tickets. `size_now` is called with each that is about to be shown."""

    def __init__(self, tiers: Iterable[str], most: int, size_now: Callable[[Ticket], None]) -> None:
        self.withdrawn: list[Withdrawn] = []
        self._tiers = [_Tier(name) for name in tiers]
        self._most, self._size_now = most, size_now
        self._bids: dict[str, int] = {}
        self._made = 0

    def __len__(self) -> int:
        return sum(len(tier.queue) + len(tier.shown) for tier in self._tiers)

    @property
    def shown(self) -> dict[int, Ticket]:
        """All bids that the ledger may know."""
        return {bid: ticket for tier in self._tiers for bid, ticket in tier.shown.items()}

    def add(self, ticket: Ticket) -> None:
        """One that waits from now on."""
        self._tiers[ticket.tier].queue.add(ticket)

    def remove(self, ticket: Ticket) -> bool:
        """One that is given up. Returns whether it was shown, so that the ledger must hear of it."""
        tier = self._tiers[ticket.tier]
        bid = self._bids.pop(ticket.id, None)
        if bid is None:
            tier.queue.remove(ticket)
            return False
        del tier.shown[bid]
        self.withdrawn.append(Withdrawn(bid, tier.name))
        return True

    def granted(self, bid: int) -> Ticket | None:
        """The ticket of a bid that got an engine; None where it is gone."""
        self.withdrawn = [gone for gone in self.withdrawn if gone.id != bid]
        for tier in self._tiers:
            if (ticket := tier.shown.pop(bid, None)) is not None:
                del self._bids[ticket.id]
                return ticket
        return None

    def has_more(self) -> bool:
        """Whether one waits that could be shown."""
        return any(tier.queue and len(tier.shown) < self._most for tier in self._tiers)

    def new(self, now_us: int, most: int = BIDS_SHOWN) -> list[Bid]:
        """At most so many of the next tickets of every tier in fair order, as far as the tags are known."""
        made: list[Bid] = []
        for tier in self._tiers:
            while len(tier.shown) < self._most and len(made) < most and (ticket := tier.queue.next()) is not None:
                tier.queue.show(ticket)
                self._size_now(ticket)
                made.append(self._show(tier, ticket, now_us))
        return made

    def go_back(self) -> None:
        """The ledger knows none of them any more."""
        for tier in self._tiers:
            for ticket in tier.shown.values():
                tier.queue.take_back(ticket)
            tier.shown.clear()
        self._bids.clear()
        self.withdrawn.clear()

    def remove_all(self) -> list[Ticket]:
        """Gives up all that wait."""
        self.go_back()
        tickets = [ticket for tier in self._tiers for ticket in list(tier.queue)]
        for ticket in tickets:
            self._tiers[ticket.tier].queue.remove(ticket)
        return tickets

    def take_tags(self, tiers: Iterable[TierHeld]) -> None:
        """The tags as the ledger has them, and beyond them what this replica has shown."""
        known = {tier.name: tier for tier in self._tiers}
        for held in tiers:
            tier = known.get(held.tier)
            if tier is None:
                continue
            tier.queue.virtual = max(tier.queue.virtual, held.virtual)
            if tier.afresh != held.afresh or not (tier.queue or tier.shown):
                tier.afresh = held.afresh
                tier.queue.finish = dict.fromkeys((t.tenant for t in tier.shown.values()), held.virtual)
                for ticket in tier.shown.values():
                    tier.queue.finish[ticket.tenant] += ticket.tokens / ticket.weight
            for tenant, finish in held.finish.items():
                shown = sum(t.tokens / t.weight for t in tier.shown.values() if t.tenant == tenant)
                tier.queue.finish[tenant] = max(finish, held.virtual) + shown

    def _show(self, tier: _Tier, ticket: Ticket, now_us: int) -> Bid:
        """One that is shown again has another id, so that a grant of its former bid cannot be taken for this one."""
        is_first = not any(other.tenant == ticket.tenant for other in tier.shown.values())
        self._made += 1
        self._bids[ticket.id] = self._made
        tier.shown[self._made] = ticket
        return Bid(
            self._made,
            tier.name,
            ticket.tenant,
            ticket.tokens,
            ticket.requests,
            ticket.prompt,
            ticket.weight,
            dict(ticket.hits),
            sorted(ticket.barred),
            now_us - ticket.arrived_us,
            ticket.number,
            None if ticket.gain is None else GainBid(*dataclasses.astuple(ticket.gain)),
            ticket.has_returned,
            ticket.start if is_first else None,
        )
