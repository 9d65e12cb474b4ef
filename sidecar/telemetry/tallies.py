"""What enforcing would have done, added up by tier and by tenant since the policy in force was first observed.

Waits are counted in buckets, each a tenth wider than the one before: a quantile is right to 5%, whatever its size, and
tallies of several replicas can be added up. There are at most 231 buckets up to an hour, and of those only the ones
that some wait fell in are kept. The longest wait is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from sidecar.events import Observed, Verdict

WAITS_FROM_US = 10_000
"""Less is the time that a store takes to answer: nobody would have called it a wait."""
OTHERS = "(others)"
"""No tenant's name: those have no parentheses."""
_STEP = math.log(1.1)


class Tally(msgspec.Struct):
    """Of some requests, what would have become of them.

    `waits` counts by bucket those that would have been admitted after a wait; of them, `waited` would have waited for
    10 ms or more. `refused` and `unknown` are by code. Of all requests, however they would have ended, `starved` would
    have been overtaken for 10 ms or more, and `served_ahead` has the tokens that would have gone first while they
    waited, by tier.
    """

    requests: int = 0
    admitted: int = 0
    abandoned: int = 0
    refused: dict[str, int] = {}
    unknown: dict[str, int] = {}
    waits: dict[int, int] = {}
    waited: int = 0
    wait_max_us: int = 0
    starved: int = 0
    starvation_max_us: int = 0
    served_ahead: dict[str, int] = {}

    def note(self, observed: Observed) -> None:
        """Counts one request."""
        self.requests += 1
        self._note_starvation(observed)
        if observed.verdict is Verdict.ADMITTED:
            self._admit(observed)
        elif observed.verdict is Verdict.ABANDONED:
            self.abandoned += 1
        else:
            by_code = self.refused if observed.verdict is Verdict.REFUSED else self.unknown
            _add(by_code, str(observed.code))

    def add(self, other: Tally) -> None:
        """Counts all that another has counted."""
        for name in ("requests", "admitted", "abandoned", "waited", "starved"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("refused", "unknown", "waits", "served_ahead"):
            for key, number in getattr(other, name).items():
                _add(getattr(self, name), key, number)
        self.wait_max_us = max(self.wait_max_us, other.wait_max_us)
        self.starvation_max_us = max(self.starvation_max_us, other.starvation_max_us)

    def wait_us(self, share: float) -> int:
        """The wait that this share of the admitted would not have exceeded, right to 5%; 0 where nobody waited."""
        left = math.ceil(share * self.admitted) - (self.admitted - sum(self.waits.values()))
        for bucket in sorted(self.waits):
            if left <= 0:
                break
            left -= self.waits[bucket]
            if left <= 0:
                return min(self.wait_max_us, round(math.exp((bucket + 0.5) * _STEP)))
        return 0

    def _admit(self, observed: Observed) -> None:
        self.admitted += 1
        wait_us = observed.queue_wait_us
        if wait_us > 0:
            _add(self.waits, int(math.log(wait_us) / _STEP))
        self.waited += wait_us >= WAITS_FROM_US
        self.wait_max_us = max(self.wait_max_us, wait_us)

    def _note_starvation(self, observed: Observed) -> None:
        self.starved += observed.starvation_us >= WAITS_FROM_US
        self.starvation_max_us = max(self.starvation_max_us, observed.starvation_us)
        for tier, tokens in observed.served_ahead.items():
            _add(self.served_ahead, tier, tokens)


class Standing(msgspec.Struct, frozen=True):
    """All tallies of a process as they stand, by name; an empty one where it is not known. `since_s` is since 1970."""

    generation: str
    since_s: float
    by_tier: dict[str, Tally]
    by_tenant: dict[str, Tally]


class Tallies:
    """All of one process. Begins anew with every policy that is observed; use it from one event loop.

    `generation` is that of the policy in force, and `now_s` the calendar's clock. What was observed by another policy,
    and is known only now, is left out.
    """

    def __init__(self, generation: Callable[[], str], now_s: Callable[[], float]) -> None:
        self._generation = generation
        self._now_s = now_s
        self._standing: Standing | None = None

    def note(self, observed: Observed) -> None:
        """Counts one request, under its tier and its tenant; an empty name is for those whose it is not known."""
        if observed.generation != self._generation():
            return
        if self._standing is None or observed.generation != self._standing.generation:
            self._standing = Standing(observed.generation, self._now_s(), {}, {})
        self._standing.by_tier.setdefault(observed.tier or "", Tally()).note(observed)
        self._standing.by_tenant.setdefault(observed.tenant or "", Tally()).note(observed)

    def read(self, most_tenants: int) -> Standing | None:
        """As they stand: the tenants with the most requests, the others under `OTHERS`. None where there are none."""
        standing = self._standing
        if standing is None or len(standing.by_tenant) <= most_tenants:
            return standing
        ranked = sorted(standing.by_tenant.items(), key=lambda pair: (-pair[1].requests, pair[0]))
        shown = dict(ranked[:most_tenants])
        shown[OTHERS] = added_up(tally for _, tally in ranked[most_tenants:])
        return msgspec.structs.replace(standing, by_tenant=shown)


def added_up(tallies: Iterable[Tally]) -> Tally:
    """One tally of all."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _add(counted: dict[str, int] | dict[int, int], key: str | int, number: int = 1) -> None:
    counted[key] = counted.get(key, 0) + number  # type: ignore[index, arg-type]  # of the one kind or the other
