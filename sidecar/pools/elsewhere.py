"""Grants of the other replicas of a pool, by the differences of the ledger's replies to one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidecar.pools.calls import BidGranted, Reply


class ServedElsewhere(NamedTuple):
    """The tokens of each tier that others were granted between two replies. The latter is to a call of `asked_us`.

    `latest`: when the request arrived that came last of all that were granted, and when it was; None where the replica
    knows it, as its own or by the reply before.
    """

    tokens: Sequence[int]
    asked_us: int
    latest: tuple[int, int] | None


class GrantsElsewhere:
    """To others than one replica, whose tiers have these `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._served = dict.fromkeys(names, 0)  # by the last reply, to all
        self._own = dict.fromkeys(names, 0)  # in no reply yet
        self._latest: tuple[int, int] | None = None
        self._news: ServedElsewhere | None = None

    def own(self, grant: BidGranted) -> None:
        """The replica was granted one of its bids, in a reply or before it."""
        self._own[grant.tier] += grant.tokens

    def answered(self, reply: Reply, asked_us: int, *, is_first: bool) -> None:
        """A reply, whose grants are known. What was granted before the first one does not count."""
        tokens, total = [], {tier.tier: tier.served for tier in reply.tiers}
        for name, before in self._served.items():
            self._served[name] = total.get(name, 0)
            by_others = 0 if is_first else self._served[name] - before - self._own[name]
            self._own[name] = max(0, -by_others)  # it got a grant before the reply to an earlier call
            tokens.append(max(0, by_others))
        latest, self._latest = None if reply.latest == self._latest else reply.latest, reply.latest
        if latest is not None:
            ahead_us = reply.now_us - asked_us  # as the ledger takes the arrivals of this replica's bids
            latest = latest[0] - ahead_us, latest[1] - ahead_us
        self._news = ServedElsewhere(tokens, asked_us, None if is_first else latest)

    def take(self) -> ServedElsewhere | None:
        """News since the last time."""
        news, self._news = self._news, None
        return news
