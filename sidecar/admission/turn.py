"""A request's turn in the pool: it enters, waits, holds its lease, and may wait again.

    ENTERING -> WAITING -> HELD -> OVER       (WAITING is passed at once where there is room)
                  ^          |
                  +----------+                (preempted, or no engine took it)

Enforcing, the dry run and leases from Python take this one way. They differ in what they do with a grant.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from sidecar.admission.attempt import no_engine
from sidecar.admission.client import ClientComments
from sidecar.admission.event_reporter import EventReporter
from sidecar.admission.intake import SizedRequest
from sidecar.durations import short_duration
from sidecar.engines.watch import EngineHealth
from sidecar.errors import (
    AdmissionError,
    DeadlinePassed,
    Draining,
    QueueFull,
    QueueTimeout,
    TenantLimit,
)
from sidecar.events import Obstacle, Risen
from sidecar.lengths.lease_size import LeaseSizes
from sidecar.policy.model import Policy
from sidecar.policy.tier import Tier
from sidecar.pools import Ask, Grant, Lease, Pool
from sidecar.pools.base import QueueMark, QueueStanding, WaitGivenUp, WaitOutcome
from sidecar.tenants.tenant_usage import TenantUsage

_PREEMPTED = (Obstacle.PREEMPTED, "its room went to a more important request")
_UNANSWERED = (Obstacle.ENGINE, "its engine did not answer it")


class Stage(IntEnum):
    """The stages of one admitted request.

        READING -> WAITING -> RUNNING -> OVER      (WAITING ends at once where there is room)
           |        |  ^       |  |       ^
           |        |  +-------+  |       |        (preempted, or the engine could not be reached)
           |        |             +-> FOLLOWED     (a background response runs on after its request is answered)
           +--------+-> OVER                       (refused, or the client disconnected)

    A request costs less where nothing checks this while it runs. The tests check every step of every request in them.
    """

    READING = 0
    WAITING = 1
    RUNNING = 2
    FOLLOWED = 3
    OVER = 4


class EndCause(Enum):
    """Reason why a turn ended without a grant."""

    DISCONNECTED = "disconnected"
    TOO_LONG = "too long"
    DEADLINE = "deadline"
    GIVEN_UP = "given up"
    """The process is about to end, or every request passes from now on."""
    BUDGET = "budget"


class TurnEnded(Exception):
    """A wait ended without a grant. `wait` says how it went. `refusal` is there where a budget was used up meanwhile.

    `most_s` was the longest that it could take, None where it had no limit.
    """

    def __init__(
        self, cause: EndCause, wait: Grant | None, refusal: TenantLimit | None = None, most_s: float | None = None
    ) -> None:
        self.cause = cause
        self.wait = wait
        self.refusal = refusal
        self.most_s = most_s

    @property
    def code(self) -> str:
        """The code of its refusal, where the time of the wait is over."""
        return DeadlinePassed.code if self.cause is EndCause.DEADLINE else QueueTimeout.code


class TurnUser:
    """One who takes a turn, with what the turn asks of it: a request, its shadow, or a lease from Python.

    Each may leave out what it has no use for.
    """

    __slots__ = ()

    def entered(self, lease: Lease | None) -> None:
        """The pool has taken the request, or has refused it: None. Only now it is known which tier is charged."""

    def rose(self, request: SizedRequest) -> None:
        """The waiting request rose to a better tier."""

    def disconnect(self) -> asyncio.Future[Any] | None:
        """The future that is done when the client has left; None where there is no client."""
        return None

    def comments(self, lease: Lease) -> ClientComments | None:  # noqa: ARG002
        """The comments that a waiting client gets about its lease; None for none. Called when a wait begins."""
        return None

    @property
    def passes(self) -> bool:
        """True if nothing waits any more, because every request passes."""
        return False


ALONE = TurnUser()


class Turn(msgspec.Struct, eq=False):
    """The turn of one request, by the policy under which it came. It owns the request's lease.

        async with Turn(...) as grant:
            ...

    holds the lease in the block, and waits for it before. Where the wait ends without a grant it raises TurnEnded, or
    the pool's refusal. However the block ends, the lease is settled or the queue is left, once: by `settle` in the
    block, else at its end. A lease that `outlasts` the block is its user's: the engine may compute on for it.

    `request` is the request as it is now. `sizes` know while it waits what it is expected to use; None where it holds
    what it asked for.
    Where neither the client nor the tier limits a wait, it ends after `unlimited_s`, None for never.
    `preemptions` and `hand_backs` count how often it waited again, because a more important request needed the room,
    and because no engine took it.
    """

    _pool: Pool
    _policy: Policy
    request: SizedRequest
    _ask: Ask
    _user: TurnUser = ALONE
    reports: EventReporter = msgspec.field(default_factory=EventReporter)
    budgets: TenantUsage | None = None
    sizes: LeaseSizes | None = None
    unlimited_s: float | None = None
    preemptions: int = 0
    hand_backs: int = 0
    _lease: Lease | None = None
    _left: WaitOutcome | None = None
    _outlasts: bool = False
    _ends_us: int | None = None
    _most_s: float | None = None
    _mark: QueueMark = QueueMark(0, 0)

    @property
    def lease(self) -> Lease:
        """The request's lease, once the pool has taken it."""
        assert self._lease is not None
        return self._lease

    async def take(self) -> Grant:
        """The first grant. Raises TurnEnded where the wait ends without one, or what `enter` raises."""
        try:
            lease = await self.enter()
            grant = lease.grant
            if grant is None:
                self._limit_wait(lease.entered_us, self.request.longest_wait_s(self._policy))
                self.reports.queued(self._obstacle, self._pool.mark(lease.tier))
                return await self._wait(lease.wait())
        except BaseException:
            self.leave()
            raise
        if grant.queue_wait_us:
            self.reports.waited_for_store(grant.at_us - grant.queue_wait_us)
        return grant

    __aenter__ = take

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    async def enter(self) -> Lease:
        """Enters the pool, at the level that the tenant's budgets and limits leave it.

        `request` has the level from then on that is charged, or whose queue is full. Raises what `Pool.enter`
        raises, TenantLimit where a budget is used up, and DeadlinePassed. Nothing is left in the pool then.
        """
        ask, lease, tenant, beside = self._ask, None, self.request.classification.tenant, self.request.beside
        level, deadline_us = ask.tier, self.request.deadline_us
        try:
            if deadline_us is not None and deadline_us <= self._pool.now_us():
                raise DeadlinePassed("the deadline had passed when the request came; send it with a later one")
            if self.budgets is not None and (beside or tenant.limits.budgets):
                ask = self.budgets.within(ask, tenant, self._pool, beside)
                level = ask.tier
            self._lease = lease = await self._pool.enter(ask)
            level = lease.ask.tier
            if lease.grant is None and self.sizes is not None and self.request.expected is not None:
                lease.size_now = partial(self._size_now, self.sizes)
        except QueueFull as full:
            level = level if full.level is None else full.level
            raise
        finally:
            if level != self.request.classification.level:
                self._move_down(level)
            self._user.entered(lease)
        return lease

    def _move_down(self, level: int) -> None:
        """The request is charged in another tier than it asked for, and waits for as long as that lets it."""
        self.request = request = self.request.charged(level)
        if request.deadline_us is not None:
            from sidecar.admission.deadline import bounded_deadline_us

            until_us = bounded_deadline_us(self._policy, level, request.deadline_us, self._pool.now_us())
            self.request = replace(request, deadline_us=until_us)

    def settle(self, used_tokens: int | None = None, is_counted: bool = True) -> None:
        """Gives the lease back, if it is held: see `Lease.settle`."""
        self.lease.settle(used_tokens, is_counted)

    def outlast(self) -> None:
        """The lease stays after the block: its user settles it, as the engine may compute on for it."""
        self._outlasts = True

    def leave(self) -> None:
        """Leaves nothing in the pool. Called at the end of the block, and harmless where the lease was settled."""
        lease, self._user = self._lease, ALONE  # it has this turn: a cycle would wait for the garbage collector
        if lease is None:
            return
        lease.size_now = None
        if lease.is_over or self._outlasts:
            return
        if not lease.settle(0):
            self._left = lease.leave()

    def when_left(self, report: Callable[[Grant | None], None]) -> None:
        """Calls `report` with how a wait went that was canceled, as soon as the pool has said it."""
        if self._left is None:
            report(None if self._lease is None else self._lease.grant)
        elif self._left.done():
            report(self._left.result())
        else:
            self._left.add_done_callback(lambda left: report(left.result()))

    async def requeue(self) -> Grant:
        """The next grant of a preempted request. It gives its room back, and waits by its original arrival.

        The tier's longest wait is kept already: from now on only the client limits the wait. Raises TurnEnded, or the
        pool's refusal.
        """
        self.report_preempted()
        self._limit_wait(self._pool.now_us(), self.request.max_wait_s)
        return await self._wait(self.lease.requeue())

    async def hand_back(self, barred: tuple[str, ...] = (), *, others_answer: bool) -> Grant:
        """The next grant of a request that no engine has taken. It gives its room back, and waits by its arrival.

        The engines named `barred` do not get it; `others_answer` says whether there are others, as far as is known.
        The time that passed at the engine is no wait. Raises as `requeue`.
        """
        grant = self._held()
        self.hand_backs += 1
        self.reports.preempted(grant.at_us, self.hand_backs, is_unreached=True)
        self.reports.queued(lambda: _UNANSWERED if others_answer else self._obstacle())
        if not self.preemptions and self._ends_us is None:
            self._limit_wait(self.lease.entered_us, self.request.longest_wait_s(self._policy))
        if self._ends_us is not None:
            self._ends_us += max(0, self._pool.now_us() - grant.at_us)
        return await self._wait(self.lease.hand_back(barred))

    def report_preempted(self) -> None:
        """Reports that the request gives its room back to a more important one, and waits from now on."""
        self.preemptions += 1
        self.reports.preempted(self._held().at_us, self.preemptions)
        self.reports.queued(lambda: _PREEMPTED)

    def give_up(self) -> None:
        """Ends the wait, where the request waits: it raises TurnEnded."""
        if self.lease.grant is None:
            self.lease.give_up()

    def _size_now(self, sizes: LeaseSizes) -> int:
        self.request = self.request.expecting(sizes, self._pool)
        return self.request.tokens

    def _held(self) -> Grant:
        assert self.lease.grant is not None
        return self.lease.grant

    def _limit_wait(self, since_us: int, most_s: float | None) -> None:
        self._most_s, within_s = most_s, self.unlimited_s if most_s is None else most_s
        self._ends_us = None if within_s is None else since_us + round(within_s * 1e6)

    def _obstacle(self) -> tuple[Obstacle, str]:
        return self._pool.obstacle(self.lease.ask)

    async def _wait(self, granted: asyncio.Future[Grant]) -> Grant:
        """Waits for the grant, a disconnect or the end of the wait's time, whichever comes first."""
        lease, user = self.lease, self._user
        disconnect, comments = user.disconnect(), user.comments(lease)
        if user.passes:
            lease.give_up()
        events: set[asyncio.Future[Any]] = {granted} if disconnect is None else {granted, disconnect}
        rising, deadline_us = None, self.request.deadline_us
        if deadline_us is not None:
            from sidecar.admission.deadline import RisingWait

            best = self.request.classification.best_level
            rising = RisingWait(self._pool, lease, deadline_us, best, self._rose)
        try:
            await self._wait_for(events, comments)
        finally:
            if rising is not None:
                rising.stop()
        if disconnect is not None and disconnect.done():  # even at the moment of the grant: no one reads the response
            raise TurnEnded(EndCause.DISCONNECTED, await self._how_it_went())
        if not granted.done():
            cause = EndCause.DEADLINE if self._is_by_deadline else EndCause.TOO_LONG
            raise TurnEnded(cause, await lease.leave(), most_s=self._most_s)
        if isinstance(granted.exception(), WaitGivenUp):
            raise TurnEnded(EndCause.GIVEN_UP, await self._how_it_went())
        grant = granted.result()
        if comments is not None:
            await comments.admitted(grant.queue_wait_us / 1e6)
        if self.budgets is not None and not self.preemptions and not self.hand_backs:
            over = self.budgets.used_up(self.request.classification.tenant, self.request.beside)
            if over is not None:
                raise TurnEnded(EndCause.BUDGET, await self._how_it_went(), over)
        return grant

    @property
    def _is_by_deadline(self) -> bool:
        """True if the request's deadline ends its wait, and no shorter time does."""
        deadline_us, ends_us = self.request.deadline_us, self._ends_us
        return deadline_us is not None and (ends_us is None or deadline_us <= ends_us)

    def _rose(self, at_us: int) -> None:
        level = self.lease.tier
        self._mark, self.request = self._pool.mark(level), self.request.charged(level)
        self.reports.event(Risen(at_us, self._policy.tiers[level].name, self._mark))
        self._user.rose(self.request)

    async def _how_it_went(self) -> Grant | None:
        """How the wait went, after the lease was given back, or the queue left."""
        return self.lease.grant if self.lease.settle(0) else await self.lease.leave()

    async def _wait_for(self, events: set[asyncio.Future[Any]], comments: ClientComments | None) -> None:
        """Returns when one of the events has come, or the time of the wait is over. Comments go out meanwhile."""
        ends_us = self.request.deadline_us if self._is_by_deadline else self._ends_us
        left_s = math.inf if ends_us is None else max(0, ends_us - self._pool.now_us()) / 1e6
        if comments is None:
            most_s = None if math.isinf(left_s) else left_s
            await asyncio.wait(events, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
            return
        self._mark, now_s = self._pool.mark(self.lease.tier), asyncio.get_running_loop().time
        ends_s = now_s() + left_s
        while (left_s := ends_s - now_s()) > 0:
            timeout_s = min(comments.every_s, left_s)
            done, _ = await asyncio.wait(events, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            if now_s() < ends_s:
                await comments.comment(_place(self._pool.standing(self.lease.tier, self._mark)))


def _place(standing: QueueStanding) -> str:
    """The place of a waiting request, for its client: `queued, 14 ahead, about 20 s`."""
    if standing.wait_s is None:
        return f"queued, {standing.ahead} ahead"
    whole_s = max(1, round(standing.wait_s))
    return f"queued, {standing.ahead} ahead, about {f'{whole_s} s' if whole_s < 60 else short_duration(whole_s)}"


def refusal_for(
    watch: EngineHealth, pool: Pool, policy: Policy, end: Exception, *, level: int | None
) -> AdmissionError:
    """The refusal of a request, or of a lease from Python, that ended without a grant.

    `end` is TurnEnded or an AdmissionError. `level` is the level that is charged, None before that is known.
    """
    if isinstance(end, TurnEnded):
        assert level is not None
        return end.refusal or _end_of_wait(watch, pool, policy.tiers[level], end)
    assert isinstance(end, AdmissionError)
    if isinstance(end, QueueFull) and level is not None and policy.tiers[level].queue.max_requests == 0:
        # A tier that never queues has no place while there is no engine: that is the reason, then.
        return end if watch.is_usable else no_engine(watch)
    return end


def _end_of_wait(watch: EngineHealth, pool: Pool, tier: Tier, end: TurnEnded) -> AdmissionError:
    """The refusal of a request whose wait is over."""
    if end.cause is EndCause.GIVEN_UP:
        return Draining("this server is shutting down, and the request still waited; try another", retry_after_s=1)
    if end.cause is EndCause.DEADLINE:
        why = f"no room came free for tier {tier.name}" if watch.is_usable else "no engine answered"
        return DeadlinePassed(f"{why} before the deadline of the request; send it again with a later one")
    if not watch.is_usable:
        return no_engine(watch)
    assert end.most_s is not None
    return no_room(pool, tier, end.most_s)


def no_room(pool: Pool, tier: Tier, most_s: float) -> QueueTimeout:
    """The refusal of a request of a tier that has waited for as long as it may."""
    return QueueTimeout(
        f"no room came free for tier {tier.name} within {most_s:g} s; try again later",
        retry_after_s=pool.retry_after_s(tier.level),
    )
