"""How the requests of one process have waited: since when they are overtaken, and what was served ahead of them.

Of what other replicas of the pool admit it hears with the ledger's replies: late, but for no more than a heartbeat.

A request is overtaken by the first one that arrived after it and was admitted. The latest arrival that was admitted so
far only grows; its *steps* are kept with their moments, and a binary search finds the step that overtook a request. So
that steps can be dropped, those that are overtaken are noted, a few with each admission, the first that came first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

import msgspec

from sidecar.pools.base import Grant
from sidecar.pools.elsewhere import ServedElsewhere
from sidecar.pools.stats import served_by_name

NOTED_AT_ONCE = 64
"""Requests that one admission notes as overtaken: some 10 us."""
SPARE_STEPS = 1_024
"""Steps that are kept before those that no request needs are dropped."""

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
        self._steps, self._moments = list[int](), list[int]()
        self._waiting = [OrderedDict[int, Wait]() for _ in names]
        self._returned = [dict[int, Wait]() for _ in names]
        # Not noted as overtaken: those that came, and those that came back, each in order of `after`.
        self._ahead, self._ahead_again = OrderedDict[int, Wait](), OrderedDict[int, Wait]()
        self.new = dict[int, Wait]()  # those that came since the call was made whose reply was the last

    def came(self, number: int, tier: int, now_us: int) -> Wait:
        """A request. It waits from `begins` on, if it is not admitted at once."""
        wait = self.new[number] = Wait(number, tier, now_us, self._served, number)
        return wait

    def has_not_waited(self, wait: Wait, now_us: int) -> None:
        """A request is about to enter, and nothing was in its way; unless a later one has entered before it."""
        if wait.after >= self._latest:
            wait.came_us = now_us

    def entered(self, number: int, tier: int, tokens: int, now_us: int) -> Wait:
        """A request that enters an engine as it comes, while none waits."""
        wait = Wait(number, tier, now_us, self._served, number, None, tokens)
        self._latest = max(self._latest, number)
        if self._steps:
            self._drop_steps()
        self._has_served(tier, tokens)
        return wait

    def begins(self, wait: Wait) -> None:
        """A request waits, behind all that came before."""
        self._waiting[wait.tier][wait.number] = self._ahead[wait.number] = wait

    def admitted(self, wait: Wait, tokens: int, now_us: int) -> None:
        """A request enters an engine with so many tokens."""
        if wait.after < self._latest:
            wait.overtaken_us = self._overtaken_us(wait)
        self.ended(wait)
        if not (self._ahead or self._ahead_again):
            self._latest = max(self._latest, wait.number)
            self._drop_steps()
        else:
            if wait.number > self._latest:
                self._latest = wait.number
                self._steps.append(wait.number)
                self._moments.append(now_us)
            self._note_overtaken()
        wait.admitted_tokens = tokens
        self._has_served(wait.tier, tokens)

    def _drop_steps(self) -> None:
        self._steps.clear()
        self._moments.clear()

    def _has_served(self, tier: int, tokens: int) -> None:
        served = [*self._served]  # another list: those that came before keep theirs
        served[tier] += tokens
        self._served = served

    def served_elsewhere(self, news: ServedElsewhere) -> None:
        """Other replicas admitted requests between two replies: ahead of those that came before the former's call."""
        if any(news.tokens):
            self._served = [*_plus(self._served, news.tokens)]
            for wait in self.new.values():
                wait.before = _plus(wait.before, news.tokens)
        self.new = {number: wait for number, wait in self.new.items() if wait.came_us > news.asked_us}
        if news.latest is None:
            return
        came_us, admitted_us = news.latest
        overtaken = [*takewhile(lambda wait: wait.came_us < came_us, self._ahead.values())]
        overtaken += [wait for wait in self._ahead_again.values() if wait.came_us < came_us]
        for wait in overtaken:
            here_us = self._overtaken_us(wait)
            wait.overtaken_us = admitted_us if here_us is None else min(here_us, admitted_us)
            self._ahead.pop(wait.number, None)
            self._ahead_again.pop(wait.number, None)

    def _note_overtaken(self) -> None:
        needed = self._latest
        for ahead in (self._ahead, self._ahead_again):
            for _ in range(min(NOTED_AT_ONCE, len(ahead))):
                number, wait = next(iter(ahead.items()))
                if wait.after >= self._latest:
                    break
                wait.overtaken_us = self._overtaken_us(wait)
                del ahead[number]
            needed = min([needed, *(wait.after for wait in islice(ahead.values(), 1))])
        if len(self._steps) > SPARE_STEPS or needed == self._latest:
            unneeded = bisect_right(self._steps, needed)
            del self._steps[:unneeded], self._moments[:unneeded]

    def _overtaken_us(self, wait: Wait) -> int | None:
        if wait.overtaken_us is not None or wait.after >= self._latest:
            return wait.overtaken_us
        return self._moments[bisect_right(self._steps, wait.after)]

    def ended(self, wait: Wait) -> None:
        """A request waits no more."""
        number, tier = wait.number, wait.tier
        if self._waiting[tier].pop(number, None) is not None:
            self._ahead.pop(number, None)
        elif self._returned[tier].pop(number, None) is not None:
            self._ahead_again.pop(number, None)

    def over(self, wait: Wait) -> None:
        """A request has left, or has run."""
        self.new.pop(wait.number, None)

    def came_back(self, wait: Wait, now_us: int, *, is_overtaken: bool) -> None:
        """An admitted request waits again, by its first arrival. No request is served ahead of itself."""
        before = list(wait.before)
        before[wait.tier] += wait.admitted_tokens
        wait.before, wait.after = before, self._latest
        self._returned[wait.tier][wait.number] = wait
        if is_overtaken and wait.overtaken_us is None:
            wait.overtaken_us = now_us
        if wait.overtaken_us is None:
            self._ahead_again[wait.number] = wait

    def so_far(self, wait: Wait, level: int, now_us: int, passed: Mapping[str, str] = NONE_AHEAD) -> Grant:
        """How a request has waited, as the grant that ends it now at an aged `level`."""
        overtaken_us, ahead = wait.overtaken_us, NONE_AHEAD
        if wait.after < self._latest:
            overtaken_us = self._overtaken_us(wait)
        if self._served is not wait.before:
            ahead = served_by_name(self._names, [n - b for n, b in zip(self._served, wait.before, strict=True)])
        starvation_us = 0 if overtaken_us is None else now_us - overtaken_us
        return Grant(now_us, now_us - wait.came_us, starvation_us, overtaken_us, ahead, level, passed)

    def oldest(self, tier: int) -> Wait | None:
        """The request of a tier that came first, of those that wait."""
        firsts = [*self._returned[tier].values(), *islice(self._waiting[tier].values(), 1)]
        return min(firsts, key=lambda wait: wait.number, default=None)

    def queued(self, tier: int) -> int:
        """How many requests of a tier wait."""
        return len(self._waiting[tier]) + len(self._returned[tier])


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
