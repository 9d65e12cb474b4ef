"""What a replica states in a sync: everything that it runs or has waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidecar.pools.redis import script
from sidecar.pools.redis.lease import RedisLease


class Statement(NamedTuple):
    """The script's arguments, and what they say: who is to hear of the answer, and what this replica holds by it.

    `unjudged` are those with limits of whom the store may have heard or not: they ask again, when it knows the rest.
    """

    arguments: Sequence[script.Argument]
    entering: list[RedisLease]
    unjudged: Sequence[RedisLease]
    held_tokens: int
    held_requests: int


NOTHING = Statement((), [], (), 0, 0)


def statement(leases: Iterable[RedisLease], now_us: int) -> Statement:
    """Of all leases of a replica, waiting or held."""
    arguments: list[script.Argument] = []
    entering: list[RedisLease] = []
    unjudged: list[RedisLease] = []
    tokens = requests = 0
    for lease in leases:
        ask = lease.ask
        if ask.limits is not None and lease.is_entering:
            unjudged.append(lease)
            arguments += (script.UNTOLD, lease.id)
            continue
        waited_us = None if lease.grant else now_us - lease.entered_us
        arguments += script.statement(lease.id, ask, waited_us, lease.preemptions)
        if ask.limits is not None:
            arguments += (script.COUNTED, lease.id, ask.tenant)
        if lease.is_entering:
            entering.append(lease)
        if lease.grant is not None:
            tokens, requests = tokens + ask.tokens, requests + ask.requests
    return Statement(arguments, entering, unjudged, tokens, requests)
