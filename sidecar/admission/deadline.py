"""Deferred work: a request with a deadline may wait until then, and rises to better tiers as the deadline comes near.

A deadline is a moment, or a time from the request's arrival. The wall clock is read once, when the request comes. From
then on the pool's clock counts: a wall clock that is set changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from sidecar.errors import InvalidHeader
from sidecar.policy.model import Policy
from sidecar.policy.units import duration_s

if TYPE_CHECKING:
    from sidecar.pools import Lease, Pool

DEADLINE_HEADER = b"x-admission-deadline"
LEAST_US = 100_000
"""The least time between two looks at a waiting request: thousands may be near their deadlines at once."""

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d(?::\d\d)?)(?:\.\d+)?([Zz]|[+-]\d\d:\d\d)?", re.ASCII)
_WRITE = "send a time with its zone such as 2027-01-31T06:00:00Z, or a duration such as 6h, of at most a year"


def asked_deadline_us(raw: bytes, now_us: int) -> int:
    """The deadline that a header's value states, by the clock of `now_us`. Raises InvalidHeader."""
    text = raw.decode("latin-1").strip()
    try:
        return now_us + round(_left_s(text) * 1e6)
    except ValueError:
        raise InvalidHeader(f"{DEADLINE_HEADER.decode()}: {text[:40]!r} is no deadline; {_WRITE}") from None


def latest_deadline_us(policy: Policy, level: int, asked_us: int, arrived_us: int) -> int:
    """The deadline that counts in a tier: at most as late as its `max_deadline` allows.

    Raises InvalidHeader where the tier has none.
    """
    if (most_s := policy.tiers[level].queue.max_deadline_s) is None:
        raise InvalidHeader(f"{DEADLINE_HEADER.decode()}: {no_deadline(policy, level)}")
    return min(asked_us, arrived_us + round(most_s * 1e6))


def no_deadline(policy: Policy, level: int) -> str:
    """Half a sentence: a tier takes no deadline, and which others do."""
    others = ", ".join(tier.name for tier in policy.tiers if tier.queue.max_deadline_s is not None)
    asked = f"ask for one of {others}" if others else "no tier here does, as none has `queue: {max_deadline: ...}`"
    return f"tier {policy.tiers[level].name} takes no request with a deadline; {asked}"


def _left_s(text: str) -> float:
    """The seconds from now to a deadline. Raises ValueError for what is none, has no zone, or is in no calendar."""
    if (moment := _MOMENT.fullmatch(text)) is None:
        return float(duration_s(text))
    day, clock, zone = moment.groups()
    if zone is None:
        raise ValueError(text)
    return seconds_until(datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone in 'Zz' else zone}"))


def seconds_until(moment: datetime) -> float:
    """The seconds from now to a moment that has a zone, by the wall clock; negative where it has passed."""
    return moment.timestamp() - time.time()


class RisingWait:
    """One wait of a request with a deadline: it looks now and then, and raises the request by a tier where that is due.

    That is so where what remains is no longer than the wait in the request's present tier: the longest of those that
    ended there lately, or what it has waited there itself. So each tier gets at most half of what remains, also where
    nothing moves in it. It rises to the tier `best` at most. It is not raised to a tier that has no place for it, or
    that could never admit it: it keeps its place, and looks again.

    Between two looks half of the time passes that remains before it would be due, so that a day's wait costs some 20.
    `rose` is called after each rise. Call `stop` at the end of the wait.
    """

    def __init__(self, pool: Pool, lease: Lease, deadline_us: int, best: int, rose: Callable[[], None]) -> None:
        self._pool, self._lease = pool, lease
        self._deadline_us, self._best, self._rose = deadline_us, best, rose
        self._since_us = pool.now_us()
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def stop(self) -> None:
        """It looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        pool, lease, now_us = self._pool, self._lease, self._pool.now_us()
        left_us, pause_us = self._deadline_us - now_us, 0
        while lease.grant is None and left_us > 0 and lease.tier > self._best:
            pause_us = self._pause_us(now_us, left_us)
            if not pause_us:
                if pool.rise(lease, lease.tier - 1):
                    self._since_us = now_us
                    self._rose()
                    continue
                pause_us = left_us // 8
            delay_s = max(LEAST_US, pause_us) / 1e6
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)
            return

    def _pause_us(self, now_us: int, left_us: int) -> int:
        """The time until the next look; 0 where it is to rise now."""
        own_us, lately_us = now_us - self._since_us, self._pool.longest_wait_us(self._lease.tier)
        if left_us <= max(own_us, lately_us):
            return 0
        return max(1, min((left_us - own_us + 1) // 2, (left_us - lately_us) // 2))
