"""Rules 6 and 8: the engines of a pool, what they hold, and which of them a ticket wants."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sidecar.scheduling.amounts import NOTHING, UNBOUNDED, Amount, minus, plus
from sidecar.scheduling.queue import FairQueue
from sidecar.scheduling.tickets import Ticket


@dataclass(frozen=True)
class Freed:
    """Room that leases give free on one engine if they are taken back: in the pool, and of the prompts that it was
    sent.
    """

    amount: Amount = NOTHING
    sent: int = 0


NOTHING_FREED = Freed()


class Gone:
    """Room that is as good as free: sums of leases that are taken back, by tier and by engine."""

    def __init__(self) -> None:
        self.total = NOTHING
        self._tiers: dict[int, Amount] = {}
        self._engines: dict[str, Freed] = {}

    def add(self, tier: int, engine: str, amount: Amount, sent: int) -> None:
        """Leases of one tier on one engine."""
        self.total, self._tiers[tier] = plus(self.total, amount), plus(self.of(tier), amount)
        freed = self.on(engine)
        self._engines[engine] = Freed(plus(freed.amount, amount), freed.sent + sent)

    def on(self, engine: str) -> Freed:
        """On one engine."""
        return self._engines.get(engine, NOTHING_FREED)

    def of(self, tier: int) -> Amount:
        """Of one tier."""
        return self._tiers.get(tier, NOTHING)


NOTHING_GONE = Gone()


@dataclass
class ScheduledEngine:
    """One incarnation of an engine: its sizes, and what it holds.

    `speed` is per mille of the usual. `is_known`: it is there; `takes_new`: it is open for new work; what it holds
    counts in any case. `unreachable_for`: the owners whose tickets cannot enter it. `lined`: the prompts of those that
    stand in line for it. Its slow start ends `ramp_us` after `since_us`.
    """

    id: str
    tokens: int = UNBOUNDED
    requests: int = UNBOUNDED
    prefill: int = UNBOUNDED
    speed: int = 1_000
    takes_new: bool = True
    since_us: int = 0
    ramp_us: int = 0
    is_known: bool = True
    unreachable_for: frozenset[str] = frozenset()
    held: Amount = NOTHING
    sent: int = 0
    lined: int = 0
    cap_requests: int = UNBOUNDED
    cap_until_us: int = 0
    name: str = field(init=False)
    order: tuple[bytes, int] = field(init=False)

    def __post_init__(self) -> None:
        self.name, _, incarnation = self.id.rpartition("#")
        self.order = self.name.encode(), int(incarnation)

    @property
    def is_ready(self) -> bool:
        """It may get new work."""
        return self.is_known and self.takes_new

    def size(self, now_us: int) -> Amount:
        """Amount that it may hold now: in slow start a number of tenths, at least one request."""
        if self.ramp_us:
            tenths = 1 + max(0, now_us - self.since_us) * 10 // self.ramp_us
            if tenths < 10:
                tokens, requests, prefill = (
                    s if s == UNBOUNDED else s * tenths // 10 for s in (self.tokens, self.requests, self.prefill)
                )
                return tokens, max(1, requests), prefill
        return self.tokens, max(1, self.requests), self.prefill

    def cap(self, now_us: int) -> int:
        """Rule 8: the most requests that it may run now."""
        return self.cap_requests if now_us < self.cap_until_us else UNBOUNDED

    def set_cap(self, requests: int, until_us: int, now_us: int) -> None:
        """Rule 8: a cap in force only falls, and lasts on."""
        if now_us < self.cap_until_us:
            requests, until_us = min(requests, self.cap_requests), max(until_us, self.cap_until_us)
        self.cap_requests, self.cap_until_us = requests, until_us

    def could_take(self, ticket: Ticket, now_us: int) -> bool:
        """True if it is ready, not barred, large enough, and its cap is not reached by the ticket."""
        return (
            self.is_ready
            and ticket.tokens <= self.tokens
            and ticket.requests <= self.requests
            and self.held[1] + ticket.requests <= self.cap(now_us)
            and self.name not in ticket.barred
            and ticket.owner not in self.unreachable_for
        )

    def is_full(self, now_us: int) -> bool:
        """True if it has room for nothing."""
        if not self.is_ready:
            return True
        tokens, requests, _ = self.size(now_us)
        return self.held[0] >= tokens or self.held[1] >= min(requests, self.cap(now_us))

    def has_room(self, ticket: Ticket, now_us: int) -> bool:
        """Tokens, requests, and the prompt's turn: one prompt of any size, or several within `prefill`."""
        size, held = self.size(now_us), self.held
        if held[0] + ticket.tokens > size[0] or held[1] + ticket.requests > min(size[1], self.cap(now_us)):
            return False
        return not self.sent or self.sent + ticket.sent_to(self.id) <= size[2]

    def lacking(self, ticket: Ticket, now_us: int, before: Amount, gone: Freed) -> Amount:
        """The tokens, requests and sent prompts that have to end for that.

        As if `gone` were taken off, and tokens, requests and sent prompts `before` the ticket had entered.
        """
        size, (tokens, requests, _) = self.size(now_us), minus(plus(self.held, before), gone.amount)
        sent = self.sent + before[2] - gone.sent
        prompts = min(sent, max(0, sent + ticket.sent_to(self.id) - size[2]))
        most = min(size[1], self.cap(now_us))
        return max(0, tokens + ticket.tokens - size[0]), max(0, requests + ticket.requests - most), max(0, prompts)

    def score(self, ticket: Ticket, affinity_percent: int) -> tuple[int, tuple[bytes, int]]:
        """How late it would begin with a ticket: the smallest is wanted."""
        lined = self.lined - (ticket.prompt if ticket.is_in_line and ticket.engine == self.id else 0)
        hit = affinity_percent * ticket.hits.get(self.id, 0) // 100
        work = self.sent + lined + ticket.prompt - hit
        return (work * 50 + self.held[0]) * 1_000 // self.speed, self.order


# -- Which engines each replica's tickets can enter, where replicas see different ones.


class Reach:
    """Of a pool's engines, until it has others. `is_divided`: replicas see different ones."""

    def __init__(self, engines: Collection[ScheduledEngine]) -> None:
        self.is_divided = any(e.is_ready and e.unreachable_for for e in engines)
        self._engines = engines
        self._found: dict[str, frozenset[str]] = {}

    def of(self, owner: str) -> frozenset[str]:
        """The ready engines that a replica's tickets can enter."""
        if (found := self._found.get(owner)) is None:
            found = frozenset(e.id for e in self._engines if e.is_ready and owner not in e.unreachable_for)
            self._found[owner] = found
        return found

    def reaches_one(self, owner: str, engines: set[str]) -> bool:
        """True if a replica's tickets can enter one of these, which are ready."""
        return not self.is_divided or not engines.isdisjoint(self.of(owner))

    def heads_elsewhere(self, queue: FairQueue, heads: Sequence[Ticket]) -> list[Ticket]:
        """Rule 3: beside these heads the next that can reach an engine which none before it can."""
        seen, found = self.of(heads[0].owner), list[Ticket]()
        for ticket in queue.first_of_each_owner():
            reached = self.of(ticket.owner)
            if not reached <= seen and ticket not in heads:
                found.append(ticket)
            seen |= reached
        return found

    def places(self, ticket: Ticket, line: Sequence[Ticket]) -> int:
        """Rule 6: the free places in line: one for each engine that it can reach, less those that can reach one too."""
        reached = self.of(ticket.owner)
        return len(reached) - sum(t.tier == ticket.tier and bool(reached & self.of(t.owner)) for t in line)
