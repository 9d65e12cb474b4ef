"""What the next call will say: everything that happened since the last one was sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sidecar.pools.pool import Grant
from sidecar.pools.redis.lease import Left, RedisLease
from sidecar.pools.redis.protocol import BACK, KEEP, RESIZE, Argument, end, enter, requeue

MOST_OPERATIONS = 128
"""Of one call. The script needs some 30 us for each; what is more travels in the next call."""


def tell(left: Left | None, wait: Grant | None) -> None:
    """Says how a wait had gone to whoever left, where somebody still wants to know."""
    if left is not None and not left.done():
        left.set_result(wait)


@dataclass(slots=True)
class Batch:
    """One call's operations, and who is to be told of its answer.

    `ends` counts the leases and waits that it ends, `freed_tokens` and `freed_requests` what the store may give to
    others when it has done them.
    """

    arguments: list[Argument] = field(default_factory=list)
    entering: list[RedisLease] = field(default_factory=list)
    leaving: dict[int, tuple[RedisLease, Left]] = field(default_factory=dict)
    operations: int = 0
    ends: int = 0
    freed_tokens: int = 0
    freed_requests: int = 0
    is_beat: bool = False

    def tell_who_left(self, own_figures: Callable[[RedisLease], Grant]) -> None:
        """Whoever left, and was not told what the store says, is told what this process knows."""
        for lease, left in self.leaving.values():
            tell(left, own_figures(lease))


class Outbox:
    """Collects operations, and wakes the one task that sends them."""

    def __init__(self) -> None:
        self._batches = deque([Batch()])
        self._reason = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, lease: RedisLease, lower: int | None = None, promised: int | None = None) -> None:
        """A lease asks to be admitted. What is over its tenant's limits falls to the level `lower`."""
        batch = self._add(enter(lease.id, lease.ask, lower, promised))
        batch.entering.append(lease)
        self._reason.set()

    def end(self, lease: RedisLease, left: Left | None, used_tokens: int | None) -> None:
        """A lease, or its wait, is over; `left` is to be told how it had waited."""
        batch = self._add(end(lease.id, lease.ask, used_tokens))
        batch.ends += 1
        if lease.grant is not None:
            batch.freed_tokens += lease.ask.tokens
            batch.freed_requests += lease.ask.requests
        if left is not None:
            batch.leaving[lease.id] = (lease, left)
        self._reason.set()

    def resize(self, lease: RedisLease, freed_tokens: int) -> None:
        """A lease holds something else: so many tokens less, or more where they are negative."""
        self._add((RESIZE, lease.id, lease.ask.tokens)).freed_tokens += freed_tokens
        self._reason.set()

    def keep(self, lease: RedisLease, *, is_urgent: bool) -> None:
        """A lease is not to be preempted any more. That can wait for the next call, but where it was chosen."""
        self._add((KEEP, lease.id, lease.ask.tier))
        if is_urgent:
            self._reason.set()

    def requeue(self, lease: RedisLease, waited_us: int) -> None:
        """A lease gives its room back and waits again."""
        batch = self._add(requeue(lease.id, lease.ask, waited_us, lease.preemptions))
        batch.freed_tokens += lease.ask.tokens
        batch.freed_requests += lease.ask.requests
        self._reason.set()

    def hold_back(self, for_us: int) -> None:
        """The pool is to admit nobody for so long."""
        self._add((BACK, for_us))
        self._reason.set()

    def beat(self) -> None:
        """It is time for a heartbeat."""
        self._batches[0].is_beat = True
        self._reason.set()

    def wake(self) -> None:
        """There is a reason for a call, though nothing to say."""
        self._reason.set()

    def wake_after(self, change_us: int | None) -> None:
        """Time alone may have changed who is next after so many microseconds; None where it does not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if change_us is not None:
            self._timer = asyncio.get_running_loop().call_later(change_us / 1e6, self.wake)

    async def filled(self) -> None:
        """Returns when there is a reason for a call."""
        await self._reason.wait()

    def take(self) -> Batch:
        """What is to be said now. Where there is more than one call may do, the reason for a call stays."""
        batch = self._batches.popleft()
        if not self._batches:
            self._batches.append(Batch())
            self._reason.clear()
        return batch

    def take_all(self) -> Sequence[Batch]:
        """Everything that was to be said."""
        batches, self._batches = self._batches, deque([Batch()])
        self._reason.clear()
        return batches

    @property
    def has_more(self) -> bool:
        """Whether one call is not enough."""
        return len(self._batches) > 1

    def _add(self, operation: Sequence[Argument]) -> Batch:
        batch = self._batches[-1]
        if batch.operations >= MOST_OPERATIONS:
            batch = Batch()
            self._batches.append(batch)
        batch.operations += 1
        batch.arguments += operation
        return batch
