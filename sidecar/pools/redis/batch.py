"""Batches of operations: everything that a replica has to say since its last call to the store.

Leases change their size many times while they run, and no request waits for the answer. So a change makes no call of
its own: the last size of each lease travels with the next call, whatever that is for, at the latest with a heartbeat.
Where a lease frees tokens and requests wait in the pool, a call follows within SHRINKS_WITHIN_S. A lease that ends or
waits again says its size no more: the store frees what it has of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from sidecar.pools.base import Grant, Lease, WaitOutcome
from sidecar.pools.redis.protocol import (
    BACK,
    CHARGE_TENANT,
    CUT_OFF,
    KEEP,
    PREFILLED,
    RESIZE,
    Argument,
    end,
    enter,
    gain,
    placing,
    requeue,
)

MOST_OPERATIONS = 128
"""Of one call. The script needs some 30 us for each; further operations travel in the next call."""
MOST_OPERATIONS_IN_LINE = 32
"""The same while many requests wait: each then costs some 100 us, with the admission that it leads to. That is a pool
of one engine that orders by level: see `operations_in_line`."""
SHORT_LINE = 1_000
"""Up to so many waiting requests, such a pool's operations cost no more than without any."""
MOST_RESIZES = 32
"""Of one call, beside its operations. The script needs 10 to 40 us for each; the rest travels in the next call."""
SHRINKS_WITHIN_S = 0.25
"""The longest that a waiting request of a busy pool waits for room that a lease has freed by shrinking. Shorter waits
would cost calls: four a second and replica are few beside those of the requests."""


class OperationsInLine(NamedTuple):
    """The most operations of one call while more than `after` requests wait."""

    most: int
    after: int


_BY_LEVEL = OperationsInLine(MOST_OPERATIONS_IN_LINE, SHORT_LINE)


def operations_in_line(*, has_engines: bool, is_by_gain: bool) -> OperationsInLine:
    """Those of a kind of pool. Several engines cost up to four times as much. So does gain, with the requests that
    become urgent at one time. Both cost eight times as much.
    """
    if has_engines or is_by_gain:
        return OperationsInLine(MOST_OPERATIONS_IN_LINE // (8 if has_engines and is_by_gain else 4), 0)
    return _BY_LEVEL


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
    """Collects operations, and wakes what sends them: fewer in one call while requests wait.

    `on_reason` is called whenever there is a reason for a call; with True where a request waits for the answer.
    """

    def __init__(self, in_line: OperationsInLine = _BY_LEVEL) -> None:
        self._in_line = in_line
        self._most = MOST_OPERATIONS
        self._batches = deque([Batch()])
        self._reason = asyncio.Event()
        self.on_reason: Callable[[bool], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._resized: dict[int, tuple[Lease, int]] = {}  # each with the tokens that the store does not know to be free
        self._charges: dict[tuple[int, str], tuple[int, int]] = {}  # (level, tenant) -> (weight, tokens)
        self._shrinks_timer: asyncio.TimerHandle | None = None

    def enter(self, lease: Lease, lower: int | None = None, promised: int | None = None) -> None:
        """A lease asks to be admitted. Over its tenant's limits it falls to the level `lower`."""
        said = enter(lease.id, lease.ask, lower, promised)
        if lease.ask.gain is not None:
            said = (*gain(lease.id, lease.ask), *said)
        self._add(said, wakes=False).entering.append(lease)
        self._give_reason(is_awaited=True)

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None) -> None:
        """A lease, or its wait, is over. The answer resolves `outcome` with how it had waited."""
        batch = self._add(end(lease.id, lease.ask, used_tokens, is_counted=lease.is_counted))
        batch.ends += 1
        if lease.grant is not None:
            self._free(lease, batch)
        if outcome is not None:
            batch.leaving[lease.id] = (lease, outcome)

    def resize(self, lease: Lease, freed_tokens: int, *, is_awaited: bool) -> None:
        """A lease holds so many tokens less, or more where they are negative. It waits for a call: see above.

        `is_awaited`: requests wait in the pool.
        """
        _, before = self._resized.get(lease.id, (lease, 0))
        self._resized[lease.id] = (lease, before + freed_tokens)
        if is_awaited and freed_tokens > 0:
            self.wake_for_shrinks()

    def charge(self, lease: Lease, tokens: int) -> None:
        """A lease uses so many tokens more than its tenant was charged for. It waits for a call, as a new size does."""
        place = (lease.tier, lease.ask.tenant)
        _, before = self._charges.get(place, (0, 0))
        self._charges[place] = (lease.ask.weight, before + tokens)

    def keep(self, lease: Lease, *, is_urgent: bool) -> None:
        """A lease is not to be preempted any more. Where it was not chosen that can wait for the next call."""
        self._add((KEEP, lease.id, lease.ask.tier), wakes=is_urgent)

    def requeue(self, lease: Lease, waited_us: int, *, is_handed_back: bool = False) -> None:
        """A lease gives its room back and waits again."""
        said = requeue(lease.id, lease.ask, waited_us, lease.returns, is_handed_back=is_handed_back)
        self._free(lease, self._add((*gain(lease.id, lease.ask), *said)))

    def cut_off(self) -> None:
        """The replica cannot reach the engine, until its next statement."""
        self._add((CUT_OFF,))

    def hold_back(self, for_us: int) -> None:
        """The pool is to admit one request at a time for so long."""
        self._add((BACK, for_us))

    def beat(self) -> None:
        """It is time for a heartbeat."""
        self._batches[0].is_beat = True
        self._give_reason()

    def wake(self) -> None:
        """There is a reason for a call without an operation."""
        self._give_reason()

    def wake_after(self, change_us: int | None) -> None:
        """Time alone may change which request is next after so many microseconds; None where it does not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if change_us is not None:
            self._timer = asyncio.get_running_loop().call_later(change_us / 1e6, self.wake)

    def note_line(self, waiting: int) -> None:
        """So many requests wait in the pool. Calls are shorter then, and shrinks are said before long."""
        self._most = self._in_line.most if waiting > self._in_line.after else MOST_OPERATIONS
        if waiting:
            self.wake_for_shrinks()

    def wake_for_shrinks(self) -> None:
        """Requests wait in the pool: tokens that leases have freed by shrinking are said before long."""
        if self._resized and self._shrinks_timer is None:
            self._shrinks_timer = asyncio.get_running_loop().call_later(SHRINKS_WITHIN_S, self._say_shrinks)

    @property
    def is_filled(self) -> bool:
        """Whether there is a reason for a call."""
        return self._reason.is_set()

    async def filled(self) -> None:
        """Returns when there is a reason for a call."""
        await self._reason.wait()

    def take(self) -> Batch:
        """The operations of the next call. Where they do not all fit into one, the reason for a call stays."""
        batch = self._batches.popleft()
        if self._charges:
            self._say_charges(batch)
        if self._resized:
            self._say_resizes(batch)
        if not self._batches:
            self._batches.append(Batch())
            if not self._resized and not self._charges:
                self._reason.clear()
        return batch

    def forget_charges(self) -> None:
        """The store is lost, and with it all that its queue knows of tenants."""
        self._charges.clear()

    def take_all(self) -> Sequence[Batch]:
        """All operations that were not sent. A statement makes up for them, but not for charges: they stay."""
        batches, self._batches = self._batches, deque([Batch()])
        self._resized.clear()
        self._stop_shrinks_timer()
        self._reason.clear()
        return batches

    @property
    def has_more(self) -> bool:
        """Whether one call is not enough."""
        return len(self._batches) > 1

    def _free(self, lease: Lease, batch: Batch) -> None:
        """A lease gives back all that the store has of it."""
        batch.free(lease)
        if (resized := self._resized.pop(lease.id, None)) is not None:
            batch.freed_tokens += resized[1]

    def _say_resizes(self, batch: Batch) -> None:
        """Adds the sizes that the store does not know to a call, before its operations: these may need the room."""
        taken = [self._resized.pop(lease_id) for lease_id in list(islice(self._resized, MOST_RESIZES))]
        batch.freed_tokens += sum(freed_tokens for _, freed_tokens in taken)
        said = [argument for lease, _ in taken for argument in (RESIZE, lease.id, lease.ask.tokens)]
        batch.arguments = [*said, *batch.arguments]
        if not self._resized:
            self._stop_shrinks_timer()

    def _say_charges(self, batch: Batch) -> None:
        """Adds charges to a call. Those that one call does not take follow with the next."""
        said: list[Argument] = []
        for level, tenant in list(islice(self._charges, MOST_OPERATIONS)):
            weight, tokens = self._charges.pop((level, tenant))
            said += (CHARGE_TENANT, level, tenant, weight, tokens)
        batch.arguments = [*said, *batch.arguments]

    def _say_shrinks(self) -> None:
        self._shrinks_timer = None
        if any(freed_tokens > 0 for _, freed_tokens in self._resized.values()):
            self._give_reason()

    def _stop_shrinks_timer(self) -> None:
        if self._shrinks_timer is not None:
            self._shrinks_timer.cancel()
            self._shrinks_timer = None

    def _add(self, operation: Sequence[Argument], *, wakes: bool = True) -> Batch:
        batch = self._batches[-1]
        if batch.operations >= self._most:
            batch = Batch()
            self._batches.append(batch)
        batch.operations += 1
        batch.arguments += operation
        if wakes:
            self._give_reason()
        return batch

    def _give_reason(self, *, is_awaited: bool = False) -> None:
        self._reason.set()
        if self.on_reason is not None:
            self.on_reason(is_awaited)


class EngineBatchQueue(BatchQueue):
    """The operations of a pool of several engines: those of a request say more, and there are some for engines."""

    def enter(self, lease: Lease, lower: int | None = None, promised: int | None = None) -> None:
        """See `BatchQueue.enter`."""
        said = (*placing(lease.ask), *gain(lease.id, lease.ask), *enter(lease.id, lease.ask, lower, promised))
        self._add(said, wakes=False).entering.append(lease)
        self._give_reason(is_awaited=True)

    def requeue(self, lease: Lease, waited_us: int, *, is_handed_back: bool = False) -> None:
        """See `BatchQueue.requeue`."""
        again = requeue(lease.id, lease.ask, waited_us, lease.returns, is_handed_back=is_handed_back)
        self._free(lease, self._add((*placing(lease.ask), *gain(lease.id, lease.ask), *again)))

    def prefilled(self, lease: Lease) -> None:
        """The first byte of a lease came. No request waits for the answer."""
        self._add((PREFILLED, lease.id))

    def say(self, operation: Sequence[Argument]) -> Batch:
        """An operation that concerns engines. Returns the batch that has it."""
        return self._add(operation)
