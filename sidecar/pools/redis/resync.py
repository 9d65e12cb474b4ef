"""The resync of a replica with its store: the leases that it states, whether the pool takes it, and safe figures.

A statement travels in slices, the leases first. The store's script is short for every slice, so that a replica with
many waiting requests delays no other one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from sidecar.policy.rules import UNLIMITED
from sidecar.pools.base import Lease
from sidecar.pools.clock import Clock
from sidecar.pools.redis import protocol
from sidecar.pools.redis.connection import PoolRefuses
from sidecar.pools.redis.partition import LastKnown

STATED_AT_ONCE = 32
"""Leases and tickets of one slice. The script needs 30 to 50 us for each, up to 100 us by gain, so 1 to 3 ms."""


class Statement:
    """All leases of a replica, waiting or held, at one moment. Changes after it travel in batches, as always.

    `is_cut_off` says that the replica cannot reach the engine.

    `waiting` has the ids of those that wait. `unjudged` are the requests with limits that the store may have heard of
    or not: they ask again once it knows the others.
    """

    def __init__(self, leases: Iterable[Lease], clock: Clock, *, is_cut_off: bool = False) -> None:
        self.is_cut_off = is_cut_off
        self._first: list[protocol.Argument] = [protocol.CUT_OFF] if is_cut_off else []
        self.unjudged: list[Lease] = []
        held: list[Lease] = []
        self._tickets: deque[Lease] = deque()
        for lease in leases:
            if lease.grant is not None:
                held.append(lease)
            elif lease.ask.limits is not None and lease.is_entering:
                self.unjudged.append(lease)
            else:
                self._tickets.append(lease)
        self.held_tokens = sum(lease.ask.tokens for lease in held)
        self.held_requests = sum(lease.ask.requests for lease in held)
        self._held = frozenset(lease.id for lease in held)
        self.waiting = frozenset(lease.id for lease in self._tickets)
        self._clock = clock
        self._leases = deque([*held, *self.unjudged])

    @property
    def has_leases(self) -> bool:
        """Whether leases are left to state. Until none is, the store admits no request of any replica."""
        return bool(self._leases)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to state."""
        return not self._leases and not self._tickets

    def next_slice(self) -> tuple[list[protocol.Argument], list[Lease]]:
        """The next part, as the script's arguments, and the requests that it answers.

        A ticket that has ended meanwhile is not stated: the store may have heard of its end already.
        """
        arguments, self._first = self._first, []
        leases = _taken(self._leases, STATED_AT_ONCE)
        taken = _taken(self._tickets, STATED_AT_ONCE - len(leases))
        tickets = [ticket for ticket in taken if not ticket.is_over]
        for lease in leases:
            if lease.id in self._held:
                arguments += self._stated(lease, None)
            else:
                arguments += (protocol.UNTOLD, lease.id)
        for ticket in tickets:
            arguments += self._stated(ticket, self._clock() - ticket.entered_us)
        return arguments, [ticket for ticket in tickets if ticket.is_entering]

    def _stated(self, lease: Lease, waited_us: int | None) -> Sequence[protocol.Argument]:
        counted = () if lease.ask.limits is None else (protocol.COUNTED, lease.id, lease.ask.tenant)
        first = () if waited_us is None else protocol.gain(lease.id, lease.ask)
        return (*first, *protocol.statement(lease.id, lease.ask, waited_us, lease.returns), *counted)


class EngineStatement(Statement):
    """A statement in a pool of several engines: first what the replica says of `engines`, and of each lease its engine.

    `unprefilled` says how many tokens of a lease's prompt are un-prefilled there at the moment.
    """

    def __init__(
        self,
        leases: Iterable[Lease],
        clock: Clock,
        *,
        is_cut_off: bool,
        engines: Sequence[protocol.Argument],
        unprefilled: Callable[[Lease], int],
    ) -> None:
        super().__init__(leases, clock, is_cut_off=is_cut_off)
        self._first += engines
        self._unprefilled = unprefilled

    def _stated(self, lease: Lease, waited_us: int | None) -> Sequence[protocol.Argument]:
        if waited_us is not None or lease.grant is None:
            first = protocol.placing(lease.ask)
        else:
            first = protocol.on_engine(lease.grant.engine, self._unprefilled(lease))
        return (*first, *super()._stated(lease, waited_us))


def _taken(leases: deque[Lease], most: int) -> Sequence[Lease]:
    return [leases.popleft() for _ in range(min(most, len(leases)))]


class Membership:
    """Membership of a process in a pool, which refuses a process with other tiers while its own replicas live.

    `takes_over`: this process makes the pool anew where the tiers differ, once. `why` is the reason of a refusal.
    """

    def __init__(self, pool: str, tier_names: Sequence[str], clock: Clock, *, takes_over: bool) -> None:
        self.is_refused = False
        self.why = ""
        self._pool = pool
        self._tier_names = tier_names
        self._clock = clock
        self._takes_over = takes_over
        self._refused_us = 0

    def brings(self, *, are_rules_new: bool) -> int:
        """The fate of the store's rules: new ones replace them, others are brought to an empty store alone.

        A process that was refused does not make a pool that is gone before the pool's own replicas had the time to.
        """
        if self._takes_over:
            return protocol.TAKES_OVER
        if self.is_refused and self._clock() - self._refused_us < protocol.SILENCE_S * 1e6:
            return protocol.JOINS
        return protocol.REPLACES if are_rules_new else protocol.KEEPS

    def accepted(self) -> None:
        """The pool has taken this process."""
        self._takes_over = self.is_refused = False

    def refused(self, error: PoolRefuses) -> None:
        """The pool has not, or is gone and was not to be made."""
        self.is_refused = True
        if error.tiers is None:
            return
        self._refused_us = self._clock()
        theirs, own = ", ".join(error.tiers.split()), ", ".join(self._tier_names)
        self.why = (
            f"pool {self._pool} has the tiers {theirs}, and the policy of this process has {own}; start it with the "
            "pool's tiers, name another pool, end all replicas of the pool first, or take it over with "
            "--take-over-pool"
        )


class KnownUsage:
    """The figures that are safe for an outage: what this replica holds as the store has it, and the store's answers.

    A lease that ended is held in the store until the replica says so. Room is free only by an answer in which the store
    had heard of all replicas, after this one stated its leases. Without such an answer the store may have given the
    free room to others: then this replica may go on with what it holds, and no more.
    """

    def __init__(self) -> None:
        self.held_tokens = 0
        self.held_requests = 0
        self._last: protocol.Reply | None = None
        self._whole: protocol.Reply | None = None

    def hold(self, tokens: int, requests: int) -> None:
        """The replica holds so much more, or less where it is negative."""
        self.held_tokens += tokens
        self.held_requests += requests

    def state(self, statement: Statement) -> None:
        """The replica states what it holds. Whether it is heard or not, the store may apply it from now on."""
        self.held_tokens, self.held_requests = statement.held_tokens, statement.held_requests
        self._whole = None

    def hear(self, reply: protocol.Reply) -> None:
        """The store's latest answer."""
        self._last = reply
        self._whole = None if reply.is_on_hold or reply.unheard else reply

    def at_loss(self, replicas: int | None) -> LastKnown | None:
        """The figures to go on with; where the store was never reached, those of an empty pool of `replicas`.

        None where that is None.
        """
        if self._last is None:
            return None if replicas is None else LastKnown(replicas, 0, 0, 0, 0)
        whole = self._whole
        held = (UNLIMITED, UNLIMITED) if whole is None else (whole.held_tokens, whole.held_requests)
        return LastKnown(max(1, self._last.expected), *held, self.held_tokens, self.held_requests)
