"""Deferred work: a request with a deadline may wait until then, and rises to better tiers as the deadline comes near.

A deadline is a moment, or a time from the request's arrival. The wall clock is read once, when the request comes. From
then on the pool's clock counts: a wall clock that is set changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidecar.admission.intake import DEADLINE_HEADER
from sidecar.errors import InvalidHeader
from sidecar.policy.model import Policy
from sidecar.policy.units import duration_s, moment_s

if TYPE_CHECKING:
    from sidecar.pools import Lease, Pool

LEAST_US = 100_000
"""The least time between two looks at a waiting request: thousands may be near their deadlines at once."""
SPREAD = 0.1
"""Part of the measured wait by which some rise earlier: thousands with one deadline would rise in one moment."""

_WRITE = "send a time with its zone such as 2027-01-31T06:00:00Z, or a duration such as 6h, of at most a year"


def asked_deadline_us(raw: bytes, now_us: int) -> int:
    """The deadline that a header's value states, by the clock of `now_us`. Raises InvalidHeader."""
    text = raw.decode("latin-1").strip()
    try:
        left_s = moment_s(text) - time.time() if ":" in text else float(duration_s(text))
    except ValueError:
        raise InvalidHeader(f"{DEADLINE_HEADER.decode()}: {text[:40]!r} is no deadline; {_WRITE}") from None
    return now_us + round(left_s * 1e6)


def bounded_deadline_us(policy: Policy, level: int, asked_us: int, from_us: int) -> int | None:
    """The deadline that counts in a tier: at most its `max_deadline` after `from_us`. None where it takes none."""
    most_s = policy.tiers[level].queue.max_deadline_s
    return None if most_s is None else min(asked_us, from_us + round(most_s * 1e6))


def latest_deadline_us(policy: Policy, level: int, asked_us: int, arrived_us: int) -> int:
    """The deadline that counts for a request which came at `arrived_us`. Raises InvalidHeader where its tier has none.

    See `bounded_deadline_us`.
    """
    if (found := bounded_deadline_us(policy, level, asked_us, arrived_us)) is None:
        those = ", ".join(tier.name for tier in policy.tiers if tier.queue.max_deadline_s is not None) or "none here"
        tier = f"tier {policy.tiers[level].name} takes no request with a deadline"
        raise InvalidHeader(
            f"{DEADLINE_HEADER.decode()}: {tier}; those with `queue: {{max_deadline: ...}}` do: {those}"
        )
    return found


class RisingWait:
    """One wait of a request with a deadline: it looks now and then, and raises the request by a tier where that is due.

    That is so where what remains is no longer than the wait in its present tier: the longest of those that ended there
    lately, or what it has waited there itself. So each tier gets at most half of what remains, also if nothing moves.
    It rises to the tier `best` at most, and stays where it is if the next has no place for it, or could never admit it.
    Between two looks half of the time passes that remains before it is due: a day's wait costs some 20.

    `rose` is called after each rise, with its time. Call `stop` at the end of the wait.
    """

    def __init__(self, pool: Pool, lease: Lease, deadline_us: int, best: int, rose: Callable[[int], None]) -> None:
        self._pool, self._lease = pool, lease
        self._deadline_us, self._best, self._rose = deadline_us, best, rose
        self._since_us, self._margin = pool.now_us(), 1 + SPREAD * (lease.id % 64) / 64
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def stop(self) -> None:
        """It looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        pool, lease, now_us = self._pool, self._lease, self._pool.now_us()
        left_us = self._deadline_us - now_us
        while lease.grant is None and left_us > 0 and lease.tier > self._best:
            pause_us = self._pause_us(now_us, left_us)
            if pause_us or not pool.rise(lease, lease.tier - 1):
                pause_us = max(LEAST_US, pause_us or left_us // 8)
                self._timer = asyncio.get_running_loop().call_later(pause_us / 1e6, self._look)
                return
            self._since_us = now_us
            self._rose(now_us)

    def _pause_us(self, now_us: int, left_us: int) -> int:
        """The time until the next look; 0 where it is to rise now."""
        own_us = now_us - self._since_us
        lately_us = round(self._pool.longest_wait_us(self._lease.tier) * self._margin)
        if left_us <= max(own_us, lately_us):
            return 0
        return max(1, min((left_us - own_us + 1) // 2, (left_us - lately_us) // 2))
