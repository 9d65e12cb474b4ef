"""How the requests of one process have waited: since when they are overtaken, and what was served ahead of them.

What other replicas of the pool admit comes with the ledger's replies: late, but for no more than a heartbeat.

A request is overtaken by the first one that arrived after it and was admitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from sidecar.events import Grant
from sidecar.pools.base import Lease
from sidecar.pools.elsewhere import ServedElsewhere

NONE_AHEAD: Mapping[str, Any] = {}


class Waits:
    """Of a pool with tiers of these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._served: Sequence[int] = [0] * len(names)
        self._latest = 0
        self._waiting = [dict[int, Lease]() for _ in names]
        # Not overtaken: those that came, by number, and the few that came back or to another tier.
        self._ahead, self._ahead_again = OrderedDict[int, Lease](), dict[int, Lease]()
        self.new = dict[int, Lease]()  # those that came since the call was made whose reply was the last

    def came(self, lease: Lease) -> None:
        """A request. It waits from `begins` on, if it is not admitted at once."""
        self._begins_anew(lease, lease.entered_us)
        self.new[lease.id] = lease
        is_last = not self._ahead or lease.id > next(reversed(self._ahead))
        (self._ahead if is_last else self._ahead_again)[lease.id] = lease

    def _begins_anew(self, lease: Lease, since_us: int) -> None:
        lease.since_us, lease.before, lease.after, lease.overtaken_us = since_us, self._served, lease.id, None

    def has_not_waited(self, lease: Lease, now_us: int) -> None:
        """A request is about to enter, and nothing was in its way; unless a later one has entered before it."""
        if lease.overtaken_us is None:
            lease.since_us = now_us

    def entered(self, lease: Lease, now_us: int) -> None:
        """A request that enters an engine as it comes, while none waits."""
        self._begins_anew(lease, now_us)
        self._is_admitted(lease, now_us)

    def begins(self, lease: Lease) -> None:
        """A request waits, behind all that came before."""
        self._waiting[lease.tier][lease.id] = lease

    def leaves_tier(self, lease: Lease) -> None:
        """A waiting request is about to wait in another tier. It is as overtaken as it was."""
        del self._waiting[lease.tier][lease.id]

    def admitted(self, lease: Lease, now_us: int) -> None:
        """A request enters an engine."""
        self.ended(lease)
        self._is_admitted(lease, now_us)

    def _is_admitted(self, lease: Lease, now_us: int) -> None:
        if lease.id > self._latest:
            self._latest = lease.id
            self._overtakes(lease.id, now_us)
        tokens = lease.admitted_tokens = lease.ticket.tokens
        served = [*self._served]  # another list: those that came before keep theirs
        served[lease.tier] += tokens
        self._served = served

    def _overtakes(self, number: int, now_us: int) -> None:
        ahead = self._ahead
        if ahead and next(reversed(ahead)) < number:  # all at once: one by one, 100,000 would take three times as long
            for lease in ahead.values():
                lease.overtaken_us = now_us
            ahead.clear()
        while ahead and next(iter(ahead)) < number:
            ahead.popitem(last=False)[1].overtaken_us = now_us
        for lease in [lease for lease in self._ahead_again.values() if lease.after < number]:
            lease.overtaken_us = now_us
            self._is_ahead_no_more(lease)

    def _is_ahead_no_more(self, lease: Lease) -> None:
        if self._ahead.pop(lease.id, None) is None:
            self._ahead_again.pop(lease.id, None)

    def served_elsewhere(self, news: ServedElsewhere) -> None:
        """Other replicas admitted requests between two replies: ahead of those that came before the former's call."""
        if any(news.tokens):
            self._served = [*_plus(self._served, news.tokens)]
            for lease in self.new.values():
                lease.before = _plus(lease.before, news.tokens)
        self.new = {number: lease for number, lease in self.new.items() if lease.since_us > news.asked_us}
        if news.latest is not None:
            came_us, admitted_us = news.latest
            overtaken = [*takewhile(lambda lease: lease.since_us < came_us, self._ahead.values())]
            overtaken += [lease for lease in self._ahead_again.values() if lease.since_us < came_us]
            for lease in overtaken:
                lease.overtaken_us = admitted_us
                self._is_ahead_no_more(lease)

    def ended(self, lease: Lease) -> None:
        """A request waits no more."""
        self._waiting[lease.tier].pop(lease.id, None)
        self._is_ahead_no_more(lease)

    def came_back(self, lease: Lease, now_us: int, *, is_overtaken: bool) -> None:
        """An admitted request waits again, by its first arrival. No request is served ahead of itself."""
        before = list(lease.before)
        before[lease.tier] += lease.admitted_tokens
        lease.before, lease.after = before, self._latest
        self.begins(lease)
        if is_overtaken and lease.overtaken_us is None:
            lease.overtaken_us = now_us
        if lease.overtaken_us is None:
            self._ahead_again[lease.id] = lease

    def so_far(self, lease: Lease, level: int, now_us: int, passed: Mapping[str, str] = NONE_AHEAD) -> Grant:
        """How a request has waited, as the grant that ends it now at an aged `level`."""
        overtaken_us, ahead = lease.overtaken_us, NONE_AHEAD
        if self._served is not lease.before:
            tiers = zip(self._names, self._served, lease.before, strict=True)
            ahead = {name: now - before for name, now, before in tiers if now != before}
        starvation_us = 0 if overtaken_us is None else now_us - overtaken_us
        return Grant(now_us, now_us - lease.since_us, starvation_us, overtaken_us, ahead, level, passed)

    def oldest(self, tier: int) -> Lease | None:
        """The request of a tier that came first, of those that wait and are not deferred."""
        waiting = self._waiting[tier]
        first = min((number for number, lease in waiting.items() if not lease.ask.is_deferred), default=None)
        return None if first is None else waiting[first]

    def queued(self, tier: int) -> int:
        """How many requests of a tier wait."""
        return len(self._waiting[tier])


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
