"""What a replica states in a sync: everything that it runs or has waiting, in slices, its leases first.

The store's script is short for every slice, so a replica with many waiting requests delays no other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from sidecar.pools.redis import protocol
from sidecar.pools.redis.lease import RedisLease

STATED_AT_ONCE = 128
"""Leases and tickets of one slice. The script needs 30 to 50 us for each, so some 5 ms."""


class Slice(NamedTuple):
    """A part of a statement: the script's arguments, and the requests that are answered by it."""

    arguments: Sequence[protocol.Argument]
    entering: Sequence[RedisLease]


class Statement:
    """Of all leases of a replica, waiting or held, at one moment. Requests that come or end later are told as always.

    `unjudged` are those with limits of which the store may have heard or not: they ask again, when it knows the rest.
    """

    def __init__(self, leases: Iterable[RedisLease] = ()) -> None:
        self.unjudged: list[RedisLease] = []
        self.held_tokens = 0
        self.held_requests = 0
        held, waiting = [], []
        for lease in leases:
            if lease.grant is not None:
                held.append(lease)
                self.held_tokens += lease.ask.tokens
                self.held_requests += lease.ask.requests
            elif lease.ask.limits is not None and lease.is_entering:
                self.unjudged.append(lease)
            else:
                waiting.append(lease)
        self._unstated_leases = len(held) + len(self.unjudged)
        self._unstated_tickets = len(waiting)
        self._leases: Iterator[RedisLease] = iter([*held, *self.unjudged])
        self._tickets: Iterator[RedisLease] = iter(waiting)
        self._held = frozenset(lease.id for lease in held)

    @property
    def has_leases(self) -> bool:
        """Whether leases are left to state. Until none is, the store admits nothing to anyone."""
        return self._unstated_leases > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to state."""
        return self._unstated_leases == self._unstated_tickets == 0

    def next_slice(self, now_us: int) -> Slice:
        """The next part."""
        arguments: list[protocol.Argument] = []
        leases = list(islice(self._leases, STATED_AT_ONCE))
        for lease in leases:
            arguments += self._lease(lease)
        tickets = list(islice(self._tickets, STATED_AT_ONCE - len(leases)))
        for ticket in tickets:
            arguments += _ticket(ticket, now_us)
        self._unstated_leases -= len(leases)
        self._unstated_tickets -= len(tickets)
        return Slice(arguments, [ticket for ticket in tickets if ticket.is_entering])

    def _lease(self, lease: RedisLease) -> Sequence[protocol.Argument]:
        if lease.id not in self._held:
            return (protocol.UNTOLD, lease.id)
        return (*protocol.statement(lease.id, lease.ask, None, lease.preemptions), *_counted(lease))


def _ticket(lease: RedisLease, now_us: int) -> Sequence[protocol.Argument]:
    """Of one that has been ended meanwhile, too: its end follows, and finds it."""
    return (*protocol.statement(lease.id, lease.ask, now_us - lease.entered_us, lease.preemptions), *_counted(lease))


def _counted(lease: RedisLease) -> Sequence[protocol.Argument]:
    return () if lease.ask.limits is None else (protocol.COUNTED, lease.id, lease.ask.tenant)
