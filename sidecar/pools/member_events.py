"""Events of a replica's requests, and its relation to its pool."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

from sidecar.pools.meter import Judged
from sidecar.scheduling.reports import Found
from sidecar.scheduling.tickets import ScheduledLease, Ticket


class MemberMode(Enum):
    """A replica's relation to its pool.

    `JOINING`: it was never in. `WAITING`: another layout is in force. `STATING`: the ledger does not know what it has.
    `LOST`: it has no answer, for less than ALONE_US.
    """

    JOINING = "joining"
    WAITING = "waiting"
    STATING = "stating"
    SHARED = "shared"
    LOST = "lost"
    ALONE = "alone"


class Entered(NamedTuple):
    """A ticket got an engine: it is a lease. `found` and `passed`: see `calls.BidGranted`."""

    lease: ScheduledLease
    found: Found
    passed: Mapping[str, str]


class TakeBack(NamedTuple):
    """The room of a lease is needed: it is to be aborted, and to be handed back or kept."""

    lease: ScheduledLease


class TicketRefused(NamedTuple):
    """The pool has other tiers: a ticket cannot wait here."""

    ticket: Ticket


Event: TypeAlias = Entered | TakeBack | TicketRefused | Judged
