"""How the requests of one process have waited: since when they are overtaken, and what was served ahead of them.

Of what other replicas of the pool admit it hears with the ledger's replies: late, but for no more than a heartbeat.

A request is overtaken by the first one that arrived after it and was admitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from sidecar.pools.base import Grant
from sidecar.pools.elsewhere import ServedElsewhere
from sidecar.pools.stats import served_by_name

NONE_AHEAD: Mapping[str, Any] = {}


class Wait(msgspec.Struct, eq=False, gc=False):
    """The wait of one request: the `number`-th that came. `before`: the tokens of each tier served before it came.

    It is overtaken by an admission of a later number than `after`. `admitted_tokens`: what it was admitted with last.
    """

    number: int
    tier: int
    came_us: int
    before: Sequence[int]
    after: int
    overtaken_us: int | None = None
    admitted_tokens: int = 0


class Waits:
    """Of a pool with tiers of these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._served: Sequence[int] = [0] * len(names)
        self._latest = 0
        self._waiting = [dict[int, Wait]() for _ in names]
        # Not overtaken: those that came, by number, and the few that came back or to another tier.
        self._ahead, self._ahead_again = OrderedDict[int, Wait](), dict[int, Wait]()
        self.new = dict[int, Wait]()  # those that came since the call was made whose reply was the last

    def came(self, number: int, tier: int, now_us: int) -> Wait:
        """A request. It waits from `begins` on, if it is not admitted at once."""
        wait = self.new[number] = Wait(number, tier, now_us, self._served, number)
        is_last = not self._ahead or number > next(reversed(self._ahead))
        (self._ahead if is_last else self._ahead_again)[number] = wait
        return wait

    def has_not_waited(self, wait: Wait, now_us: int) -> None:
        """A request is about to enter, and nothing was in its way; unless a later one has entered before it."""
        if wait.overtaken_us is None:
            wait.came_us = now_us

    def entered(self, number: int, tier: int, tokens: int, now_us: int) -> Wait:
        """A request that enters an engine as it comes, while none waits."""
        wait = Wait(number, tier, now_us, self._served, number)
        self._is_admitted(wait, tokens, now_us)
        return wait

    def begins(self, wait: Wait) -> None:
        """A request waits, behind all that came before."""
        self._waiting[wait.tier][wait.number] = wait

    def admitted(self, wait: Wait, tokens: int, now_us: int) -> None:
        """A request enters an engine with so many tokens."""
        self.ended(wait)
        self._is_admitted(wait, tokens, now_us)

    def _is_admitted(self, wait: Wait, tokens: int, now_us: int) -> None:
        if wait.number > self._latest:
            self._latest = wait.number
            self._overtakes(wait.number, now_us)
        wait.admitted_tokens = tokens
        served = [*self._served]  # another list: those that came before keep theirs
        served[wait.tier] += tokens
        self._served = served

    def _overtakes(self, number: int, now_us: int) -> None:
        ahead = self._ahead
        while ahead and next(iter(ahead)) < number:
            ahead.popitem(last=False)[1].overtaken_us = now_us
        for wait in [wait for wait in self._ahead_again.values() if wait.after < number]:
            wait.overtaken_us = now_us
            self._is_ahead_no_more(wait)

    def _is_ahead_no_more(self, wait: Wait) -> None:
        if self._ahead.pop(wait.number, None) is None:
            self._ahead_again.pop(wait.number, None)

    def served_elsewhere(self, news: ServedElsewhere) -> None:
        """Other replicas admitted requests between two replies: ahead of those that came before the former's call."""
        if any(news.tokens):
            self._served = [*_plus(self._served, news.tokens)]
            for wait in self.new.values():
                wait.before = _plus(wait.before, news.tokens)
        self.new = {number: wait for number, wait in self.new.items() if wait.came_us > news.asked_us}
        if news.latest is not None:
            came_us, admitted_us = news.latest
            overtaken = [*takewhile(lambda wait: wait.came_us < came_us, self._ahead.values())]
            overtaken += [wait for wait in self._ahead_again.values() if wait.came_us < came_us]
            for wait in overtaken:
                wait.overtaken_us = admitted_us
                self._is_ahead_no_more(wait)

    def ended(self, wait: Wait) -> None:
        """A request waits no more."""
        self._waiting[wait.tier].pop(wait.number, None)
        self._is_ahead_no_more(wait)

    def came_back(self, wait: Wait, now_us: int, *, is_overtaken: bool) -> None:
        """An admitted request waits again, by its first arrival. No request is served ahead of itself."""
        before = list(wait.before)
        before[wait.tier] += wait.admitted_tokens
        wait.before, wait.after = before, self._latest
        self.begins(wait)
        if is_overtaken and wait.overtaken_us is None:
            wait.overtaken_us = now_us
        if wait.overtaken_us is None:
            self._ahead_again[wait.number] = wait

    def so_far(self, wait: Wait, level: int, now_us: int, passed: Mapping[str, str] = NONE_AHEAD) -> Grant:
        """How a request has waited, as the grant that ends it now at an aged `level`."""
        overtaken_us, ahead = wait.overtaken_us, NONE_AHEAD
        if self._served is not wait.before:
            ahead = served_by_name(self._names, [n - b for n, b in zip(self._served, wait.before, strict=True)])
        starvation_us = 0 if overtaken_us is None else now_us - overtaken_us
        return Grant(now_us, now_us - wait.came_us, starvation_us, overtaken_us, ahead, level, passed)

    def oldest(self, tier: int) -> Wait | None:
        """The request of a tier that came first, of those that wait."""
        waiting = self._waiting[tier]
        return waiting[min(waiting)] if waiting else None

    def queued(self, tier: int) -> int:
        """How many requests of a tier wait."""
        return len(self._waiting[tier])


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
