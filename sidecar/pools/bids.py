"""The waiting tickets of one replica: those that it shows the ledger as bids, and those after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from sidecar.pools.calls import BIDS_SHOWN, Bid, LeaseGrowth, Reply, TierHeld, Withdrawn
from sidecar.scheduling.queue import BestByGain, FairQueue
from sidecar.scheduling.tickets import LanePlace, Ticket


@dataclass
class _Tier:
    """Tickets of one tier.

    `queue`: those not shown, in fair order by the tags of the last reply; `by_gain`: the same. `shown`: by bid, in the
    order of showing; `best`: the one of them that is shown for its gain, beyond fair order. `last`: that of the others
    which is last in fair order and does not stand in line, if that `is_known`. `afresh`: how often the ledger's tags
    had started afresh.
    """

    name: str
    queue: FairQueue = field(default_factory=FairQueue)
    by_gain: BestByGain = field(init=False)
    shown: dict[int, Ticket] = field(default_factory=dict)
    best: int | None = None
    last: int | None = None
    is_known: bool = False
    owes: bool = False
    afresh: int = -1

    def __post_init__(self) -> None:
        self.by_gain = BestByGain(self.queue)
        self.queue.are_more = lambda: bool(self.shown)

    def wait(self, ticket: Ticket) -> None:
        """One that came, or came back."""
        self.queue.add(ticket)
        self.by_gain.add(ticket)

    def wait_again(self, ticket: Ticket) -> None:
        """A bid that is shown no more."""
        self.queue.take_back(ticket)
        self.by_gain.add(ticket)


class Bids:
    """Rule 10: of each tier at most `most` tickets are shown, the next in fair order, and the best by gain.

    `size_now` is called with each that is about to be shown. `near`: the queues of a ledger in this process, through
    which tickets pass that are not shown.
    """

    def __init__(
        self,
        tiers: Iterable[str],
        most: int,
        size_now: Callable[[Ticket], None],
        near: Callable[[], Iterable[FairQueue]] = tuple,
    ) -> None:
        self.withdrawn: list[Withdrawn] = []
        self.is_paused = False
        self._tiers = [self._new_tier(name) for name in tiers]
        self._most, self._size_now, self._near = most, size_now, near
        self._bids: dict[str, int] = {}
        self._lined: set[int] = set()
        self._made = self.waiting = 0

    def _new_tier(self, name: str) -> _Tier:
        tier = _Tier(name)
        tier.queue.start_after = partial(self._start_after, tier)
        return tier

    def __len__(self) -> int:
        return self.waiting

    @property
    def shown(self) -> dict[int, Ticket]:
        """All bids that the ledger may know."""
        return {bid: ticket for tier in self._tiers for bid, ticket in tier.shown.items()}

    def are_more(self, level: int) -> bool:
        """True if others of a tier wait than those that are shown."""
        return bool(self._tiers[level].queue)

    def count(self) -> int:
        """How many bids the ledger knows, or will when it knows all that is withdrawn."""
        return sum(len(tier.shown) for tier in self._tiers) + len(self.withdrawn)

    def virtual(self) -> list[float]:
        """The virtual time of each tier, as far as it is known here."""
        return [tier.queue.virtual for tier in self._tiers]

    def add(self, ticket: Ticket) -> None:
        """One that waits from now on."""
        if not self.waiting:
            for tier, ledger in zip(self._tiers, self._near(), strict=False):
                tier.afresh = ledger.afresh
                tier.queue.start_afresh(ledger.virtual)
        self.waiting += 1
        self._tiers[ticket.tier].wait(ticket)

    def remove(self, ticket: Ticket) -> bool:
        """One that is given up. Returns whether it was shown, so that the ledger must learn of it."""
        tier = self._tiers[ticket.tier]
        self.waiting -= 1
        bid = self._bids.get(ticket.id)
        if bid is None:
            tier.queue.remove(ticket)
            return False
        self._withdraw(tier, bid)
        return True

    def drop(self, ticket: Ticket) -> None:
        """One that the ledger refused: it knows no bid of it."""
        if self.remove(ticket):
            self.withdrawn.pop()

    def granted(self, bid: int) -> Ticket | None:
        """The ticket of a bid that got an engine; None where it is gone."""
        self.withdrawn = [gone for gone in self.withdrawn if gone.id != bid]
        for tier in self._tiers:
            if (ticket := tier.shown.get(bid)) is not None:
                self._pass_time(tier, bid, ticket)
                del tier.shown[bid], self._bids[ticket.id]
                self.waiting -= 1
                tier.is_known = tier.is_known and bid != tier.last
                return ticket
        return None

    def charge(self, lease: Ticket, tokens: int) -> LeaseGrowth:
        """Growth of a lease: charged to its tenant while others of the tier wait, to its user while others of that do.

        Below 0 it is what the lease did not use. Returns it for the ledger.
        """
        tier, tenant, weight, user = self._tiers[lease.tier], lease.tenant, lease.weight, lease.user
        if tier.queue or not self._lined.issuperset(tier.shown):
            tier.queue.charge(tenant, tokens, weight)
            shown = [it for bid, it in tier.shown.items() if it.tenant == tenant and self._is_tagged(bid, it)]
            if shown:
                tier.queue.put_behind(tenant)
                first = min(shown, key=lambda it: it.lane_place)
                self._shift(tier, tenant, first.lane_place, tokens / weight)
                if tokens < 0:
                    first.start = max(tier.queue.virtual, (first.start or 0.0) + tokens / weight)
            users = None if user is None else tier.queue.users.get(tenant)
            if users is not None and (own := [it.lane_place for it in shown if it.user == user]):
                self._shift_user(tier, tenant, user, min(own), tokens)
            elif users is not None and (shown or users.lane):
                if tokens < 0:
                    tier.queue.charge_user(tenant, user, tokens)
                else:
                    users.grow(user, tokens)
        return LeaseGrowth(tier.name, tenant, tokens, weight, 0, user)

    def has_paid(self, ticket: Ticket) -> bool:
        """True if the tags have its charge still: others waited when it left, and none has let them start afresh."""
        return ticket.afresh == self._tiers[ticket.tier].afresh

    def has_urgent(self, now_us: int, of_level: int | None = None) -> bool:
        """True if one is to be shown at once, and not with what is sent next.

        Half of the bids of a tier are enough until then: those after them do not enter before them.
        """
        tiers = self._tiers if of_level is None else self._tiers[of_level : of_level + 1]
        return not self.is_paused and any(
            (self._is_next(tier) if self._has_few(tier) else self._comes_before_last(tier))
            or self._better(tier, now_us) is not None
            for tier in tiers
        )

    def new(self, now_us: int, most: int = BIDS_SHOWN) -> list[Bid]:
        """At most so many more bids. One that comes before the last that is shown takes its place."""
        made: list[Bid] = []
        for tier in () if self.is_paused else self._tiers:
            while len(made) < most and self._is_next(tier) and (ticket := tier.queue.next()) is not None:
                if self._is_full(tier) and (last := self._last(tier)) is not None:
                    tier.wait_again(self._withdraw(tier, last))
                made.append(self._show(tier, ticket, now_us))
            if len(made) < most and (ticket := self._better(tier, now_us)) is not None:
                if tier.best in tier.shown:
                    tier.wait_again(self._withdraw(tier, tier.best))
                made.append(self._show(tier, ticket, now_us))
                tier.best, tier.is_known = self._made, False
        return made

    def show_anew(self) -> None:
        """Takes back those that do not stand in line, to show them again with their sizes of then."""
        for tier in self._tiers:
            for bid in reversed([bid for bid in tier.shown if bid not in self._lined]):
                tier.wait_again(self._withdraw(tier, bid))

    def go_back(self) -> None:
        """The ledger knows none of them any more."""
        for tier in self._tiers:
            for bid in reversed(list(tier.shown)):
                tier.wait_again(self._withdraw(tier, bid))
            tier.afresh = -1
        self._bids.clear()
        self._lined.clear()
        self.withdrawn.clear()

    def pause(self, is_paused: bool) -> None:
        """Shows none, or shows them again."""
        self.is_paused = is_paused
        if is_paused:
            withdrawn = [Withdrawn(bid, tier.name) for tier in self._tiers for bid in tier.shown]
            withdrawn += self.withdrawn
            self.go_back()
            self.withdrawn = withdrawn

    def remove_all(self) -> list[Ticket]:
        """Gives up all that wait."""
        self.go_back()
        tickets = [ticket for tier in self._tiers for ticket in tier.queue]
        self._tiers = [self._new_tier(tier.name) for tier in self._tiers]
        self.waiting = 0
        return tickets

    def take_tags(self, reply: Reply) -> None:
        """The tags as the ledger has them, and beyond them what is shown. Those in line were charged there."""
        lined = self._lined if reply.lined is None else {lined.bid for lined in reply.lined}
        if lined != self._lined:
            for of in self._tiers:
                of.is_known = False
                for bid in lined - self._lined & of.shown.keys():
                    self._pass_time(of, bid, of.shown[bid])
            self._lined = lined
        known = {tier.name: tier for tier in self._tiers}
        for held in reply.tiers:
            if (tier := known.get(held.tier)) is not None:
                ahead = {tenant: tag for name, tenant, tag in reply.finish if name == held.tier}
                self._tag(tier, held, ahead, reply.now_us)

    def _tag(self, tier: _Tier, held: TierHeld, ahead: dict[str, float], now_us: int) -> None:
        queue = tier.queue
        queue.virtual, tier.owes = max(queue.virtual, held.virtual), held.owes_until_us > now_us
        if tier.afresh == held.afresh and not ahead:
            return
        shown = self._uncharged(tier)
        if tier.afresh != held.afresh:
            tier.afresh = held.afresh
            if not queue:
                queue.largest = 1
            queue.finish = {tenant: held.virtual + more for tenant, more in shown.items()}
        for tenant, finish in ahead.items():
            queue.finish[tenant] = finish + shown.get(tenant, 0.0)

    def _uncharged(self, tier: _Tier) -> dict[str, float]:
        """The charge of each tenant for its bids. Those in line were charged."""
        found: dict[str, float] = {}
        for bid, ticket in tier.shown.items():
            if self._is_tagged(bid, ticket):
                found[ticket.tenant] = found.get(ticket.tenant, 0.0) + ticket.charged / ticket.weight
        return found

    def _is_tagged(self, bid: int, ticket: Ticket) -> bool:
        """True if it waits in its tenant's queue at the ledger."""
        return bid not in self._lined and not ticket.has_returned

    def _shift(self, tier: _Tier, tenant: str, after: LanePlace, charge: float) -> None:
        """Moves the start tags of what is shown of a tenant after one of them."""
        for bid, ticket in tier.shown.items():
            if ticket.tenant == tenant and ticket.lane_place > after and self._is_tagged(bid, ticket):
                ticket.start = max(0.0, (ticket.start or 0.0) + charge)
                tier.is_known = False

    def _shift_user(self, tier: _Tier, tenant: str, user: str | None, after: LanePlace, tokens: int) -> None:
        """Moves the places of what a user has after one of them."""
        for ticket in self._in_turns(tier, tenant):
            if ticket.user == user and ticket.lane_place > after:
                ticket.place += tokens
        tier.queue.charge_user(tenant, user, tokens)

    def _pass_time(self, tier: _Tier, bid: int, ticket: Ticket) -> None:
        """A bid has left its tenant's queue at the ledger: time passes for the tenant's users."""
        if ticket.user is not None and self._is_tagged(bid, ticket):
            tier.queue.pass_time(ticket.tenant, min(it.place for it in self._in_turns(tier, ticket.tenant)))

    def _in_turns(self, tier: _Tier, tenant: str) -> list[Ticket]:
        """The bids of a tenant that wait in its queue at the ledger."""
        return [it for bid, it in tier.shown.items() if it.tenant == tenant and self._is_tagged(bid, it)]

    def _start_after(self, tier: _Tier, ticket: Ticket) -> float:
        """The tag of the first bid that comes after a ticket among its tenant's users."""
        later = (it.start or 0.0 for it in self._in_turns(tier, ticket.tenant) if it.lane_place > ticket.lane_place)
        return min(later, default=math.inf)

    def _better(self, tier: _Tier, now_us: int) -> Ticket | None:
        """One that earns more than the best that is shown."""
        if not tier.by_gain:
            return None
        queue, uncharged = tier.queue, list[dict[str, float]]()

        def is_ahead(ticket: Ticket) -> bool:
            if not queue.is_ahead(ticket):
                return False
            if not uncharged:
                uncharged.append(self._uncharged(tier))
            own = [it.charged for it in self._in_turns(tier, ticket.tenant) if it.user == ticket.user]
            return queue.is_ahead(ticket, uncharged[0].get(ticket.tenant, 0.0), sum(own))

        ticket = tier.by_gain.find(now_us, is_ahead)
        shown = tier.shown.get(tier.best) if tier.best is not None else None
        if ticket is None or shown is None:
            return ticket
        is_free = tier.best not in self._lined
        return ticket if is_free and ticket.earned(now_us) > shown.earned(now_us) else None

    def _in_queue(self, tier: _Tier) -> int:
        """How many are shown that do not stand in line."""
        return len(tier.shown) - len(self._lined & tier.shown.keys())

    def _is_full(self, tier: _Tier) -> bool:
        has_best = tier.best in tier.shown and tier.best not in self._lined
        return self._in_queue(tier) - has_best >= self._most

    def _has_few(self, tier: _Tier) -> bool:
        return self._in_queue(tier) <= (self._most if tier.owes else self._most // 2)

    def _is_next(self, tier: _Tier) -> bool:
        """True if the next of a tier's queue is to be shown."""
        return self._comes_before_last(tier) if self._is_full(tier) else bool(tier.queue)

    def _comes_before_last(self, tier: _Tier) -> bool:
        if not tier.queue:
            return False
        last, ticket = self._last(tier), tier.queue.next()
        return last is not None and ticket is not None and _comes_before(ticket, tier.shown[last])

    def _last(self, tier: _Tier) -> int | None:
        """The bid that is last in fair order, of those that are shown for it and do not stand in line."""
        if not tier.is_known:
            waiting = [bid for bid in tier.shown if bid not in self._lined and bid != tier.best]
            tier.last, tier.is_known = max(waiting, key=lambda bid: _order(tier.shown[bid]), default=None), True
        return tier.last

    def _withdraw(self, tier: _Tier, bid: int) -> Ticket:
        ticket = tier.shown.pop(bid)
        tier.is_known = tier.is_known and bid != tier.last
        del self._bids[ticket.id]
        self.withdrawn.append(Withdrawn(bid, tier.name))
        if bid not in self._lined:
            tier.queue.give_back(ticket)
            if not ticket.has_returned:
                self._shift(tier, ticket.tenant, ticket.lane_place, -ticket.charged / ticket.weight)
            users = tier.queue.users.get(ticket.tenant)
            if ticket.user is not None and users is not None and not ticket.has_returned:
                self._shift_user(tier, ticket.tenant, ticket.user, ticket.lane_place, -users.charged(ticket))
        return ticket

    def _show(self, tier: _Tier, ticket: Ticket, now_us: int) -> Bid:
        """One that is shown again has another id, so that a grant of its former bid cannot be taken for this one."""
        self._size_now(ticket)
        tier.queue.show(ticket)
        if ticket.user is not None and not ticket.has_returned:
            self._shift(tier, ticket.tenant, ticket.lane_place, ticket.charged / ticket.weight)
        self._made += 1
        self._bids[ticket.id] = self._made
        if not ticket.has_returned:
            ticket.afresh = tier.afresh
        if tier.is_known and (tier.last is None or _order(ticket) >= _order(tier.shown[tier.last])):
            tier.last = self._made
        tier.shown[self._made] = ticket
        start = ticket.start
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
            ticket.gain,
            ticket.has_returned,
            start if start is not None and start < tier.queue.virtual else None,
            ticket.user,
            ticket.cost,
        )


def _comes_before(ticket: Ticket, other: Ticket) -> bool:
    if ticket.user is None or ticket.tenant != other.tenant or ticket.has_returned or other.has_returned:
        return _order(ticket) < _order(other)
    return ticket.lane_place < other.lane_place


def _order(ticket: Ticket) -> tuple[float, tuple[int, str, int]]:
    return ticket.start or 0.0, ticket.arrival
