"""Batches of operations: everything that a replica has to say since its last call to the store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sidecar.pools.base import Grant, Lease, WaitOutcome
from sidecar.pools.redis.protocol import BACK, CUT_OFF, KEEP, RESIZE, Argument, end, enter, requeue

MOST_OPERATIONS = 128
"""Of one call. The script needs some 30 us for each; further operations travel in the next call."""


def resolve(outcome: WaitOutcome | None, wait: Grant | None) -> None:
    """Reports how a wait had gone, where the caller still wants to know."""
    if outcome is not None and not outcome.done():
        outcome.set_result(wait)


@dataclass(slots=True)
class Batch:
    """One call's operations, and the requests that its answer is about.

    `ends` counts the leases and waits that it ends; `freed_tokens` and `freed_requests` are what the store may give to
    other requests once it has done them. `leaving` are the waits that were given up.
    """

    arguments: list[Argument] = field(default_factory=list)
    entering: list[Lease] = field(default_factory=list)
    leaving: dict[int, tuple[Lease, WaitOutcome]] = field(default_factory=dict)
    operations: int = 0
    ends: int = 0
    freed_tokens: int = 0
    freed_requests: int = 0
    is_beat: bool = False

    def free(self, lease: Lease) -> None:
        """A lease gives back all that it holds."""
        self.freed_tokens += lease.ask.tokens
        self.freed_requests += lease.ask.requests

    def resolve_leaving(self, own_figures: Callable[[Lease], Grant]) -> None:
        """Reports the waits that the store said nothing about, by the figures of this process."""
        for lease, outcome in self.leaving.values():
            resolve(outcome, own_figures(lease))


class BatchQueue:
    """Collects operations, and wakes the one task that sends them."""

    def __init__(self) -> None:
        self._batches = deque([Batch()])
        self._reason = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, lease: Lease, lower: int | None = None, promised: int | None = None) -> None:
        """A lease asks to be admitted. Over its tenant's limits it falls to the level `lower`."""
        self._add(enter(lease.id, lease.ask, lower, promised)).entering.append(lease)

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None) -> None:
        """A lease, or its wait, is over. The answer resolves `outcome` with how it had waited."""
        batch = self._add(end(lease.id, lease.ask, used_tokens, is_counted=lease.is_counted))
        batch.ends += 1
        if lease.grant is not None:
            batch.free(lease)
        if outcome is not None:
            batch.leaving[lease.id] = (lease, outcome)

    def resize(self, lease: Lease, freed_tokens: int) -> None:
        """A lease holds so many tokens less, or more where they are negative."""
        self._add((RESIZE, lease.id, lease.ask.tokens)).freed_tokens += freed_tokens

    def keep(self, lease: Lease, *, is_urgent: bool) -> None:
        """A lease is not to be preempted any more. Where it was not chosen that can wait for the next call."""
        self._add((KEEP, lease.id, lease.ask.tier), wakes=is_urgent)

    def requeue(self, lease: Lease, waited_us: int, *, is_handed_back: bool = False) -> None:
        """A lease gives its room back and waits again."""
        said = requeue(lease.id, lease.ask, waited_us, lease.returns, is_handed_back=is_handed_back)
        self._add(said).free(lease)

    def cut_off(self) -> None:
        """The replica cannot reach the engine, until its next statement."""
        self._add((CUT_OFF,))

    def hold_back(self, for_us: int) -> None:
        """The pool is to admit one request at a time for so long."""
        self._add((BACK, for_us))

    def beat(self) -> None:
        """It is time for a heartbeat."""
        self._batches[0].is_beat = True
        self._reason.set()

    def wake(self) -> None:
        """There is a reason for a call without an operation."""
        self._reason.set()

    def wake_after(self, change_us: int | None) -> None:
        """Time alone may change which request is next after so many microseconds; None where it does not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if change_us is not None:
            self._timer = asyncio.get_running_loop().call_later(change_us / 1e6, self.wake)

    async def filled(self) -> None:
        """Returns when there is a reason for a call."""
        await self._reason.wait()

    def take(self) -> Batch:
        """The operations of the next call. Where they do not all fit into one, the reason for a call stays."""
        batch = self._batches.popleft()
        if not self._batches:
            self._batches.append(Batch())
            self._reason.clear()
        return batch

    def take_all(self) -> Sequence[Batch]:
        """All operations that were not sent."""
        batches, self._batches = self._batches, deque([Batch()])
        self._reason.clear()
        return batches

    @property
    def has_more(self) -> bool:
        """Whether one call is not enough."""
        return len(self._batches) > 1

    def _add(self, operation: Sequence[Argument], *, wakes: bool = True) -> Batch:
        batch = self._batches[-1]
        if batch.operations >= MOST_OPERATIONS:
            batch = Batch()
            self._batches.append(batch)
        batch.operations += 1
        batch.arguments += operation
        if wakes:
            self._reason.set()
        return batch
