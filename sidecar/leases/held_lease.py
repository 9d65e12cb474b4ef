"""One lease from Python, from its wait in the pool's queue to its end.

Everything here runs in the event loop of the pool. `admission` gives it to coroutines, `threads` to other threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import uuid4

import msgspec

from sidecar.admission.answer import learn
from sidecar.admission.controller import AdmissionController
from sidecar.admission.event_reporter import EventReporter
from sidecar.admission.intake import SizedRequest
from sidecar.admission.turn import EndCause, Turn, TurnEnded, TurnUser, refusal_for
from sidecar.errors import AdmissionError, Draining
from sidecar.events import Outcome, Received
from sidecar.leases.lease_request import PATH, LeaseRequest, refuse_other_counts
from sidecar.policy.tenant import Tenant
from sidecar.pools import Grant, Lease

_CANCELED, _PREEMPTED = "canceled", "preempted"
_LOST = "its block ended, because a more important request needed its room"


class LeasePreempted(Exception):
    """A more important request needed the room of a lease before `HeldLease.keep` was called.

    What the lease's block has done is lost; `Admission.run` does it again by itself, at its place in the queue.
    """


class _Asker(msgspec.Struct):
    """The tenant of a lease and its tier, for reports."""

    tenant: Tenant
    tier: str


class HeldLease(TurnUser):
    """A lease that is held, or waits again. `Admission.lease` makes it.

    `is_preempted` says that a more important request waits for its room: whoever holds it should end soon. Any thread
    may use it: what it says then reaches the pool in a moment.
    """

    def __init__(self, controller: AdmissionController, asked: LeaseRequest) -> None:
        self.is_preempted = False
        self._controller, self._snapshot = controller, controller.snapshot
        self._asked = asked
        now_us = controller.pool.now_us()
        self._request = request = asked.sized(self._snapshot.policy, now_us, self._snapshot.names)
        self._tokens = request.tokens
        self._asker = _Asker(request.classification.tenant, self.tier)
        self._reporter = EventReporter(controller.pool.now_us, self._asker)
        self._turn: Turn | None = None
        self._lease: Lease | None = None
        self._grant: Grant | None = None
        self._used: int | None = None
        self._when_preempted: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._is_over = False

    # -- what the holder reads

    @property
    def tier(self) -> str:
        """The tier that is charged: a lower one than was asked for where the tenant is over its limits."""
        return self._snapshot.policy.tiers[self._request.classification.level].name

    @property
    def tenant(self) -> str:
        """The tenant that it counts for."""
        return self._request.classification.tenant.name

    @property
    def tokens(self) -> int:
        """The tokens that it holds."""
        return self._tokens

    @property
    def level(self) -> int:
        """The level it was admitted at, 0 for the most important: less than its tier's where it waited for long."""
        return self._require_grant().level

    @property
    def priority(self) -> int | float:
        """Priority of the request for the engine, in its own range and direction."""
        return self._snapshot.priorities[self._require_grant().level]

    @property
    def queue_wait_s(self) -> float:
        """How long it waited, in seconds."""
        return self._require_grant().queue_wait_us / 1e6

    @property
    def starvation_s(self) -> float:
        """How long it waited after a later request was admitted first, in seconds."""
        return self._require_grant().starvation_us / 1e6

    @property
    def engine(self) -> str | None:
        """The engine that the request is to be sent to, by its name in the policy; None in a pool of one engine."""
        engine = self._require_grant().engine
        return None if engine is None else engine.partition("#")[0]

    @property
    def engine_url(self) -> str | None:
        """The address of that engine; None in a pool of one engine."""
        engine, routing = self._require_grant().engine, self._controller.routing
        return None if engine is None or routing is None else routing.url_for(engine)

    # -- what the holder says

    def used(self, tokens: int) -> None:
        """It has used so many tokens so far, prompt and output. The last figure counts when the lease ends.

        Without one, what was asked for counts in its tenant's limits. Raises RuntimeError after the lease's end, where
        it would count for nothing.
        """
        refuse_other_counts("tokens", tokens, at_least=0)
        if self._is_over:
            raise RuntimeError("the lease has ended, and this would not be counted: call `used` inside of its block")
        self._used = tokens

    def resize(self, tokens: int) -> None:
        """It holds so many tokens from now on, at least 1. More are never refused: nothing else is admitted then,
        until the leases fit the pool again.
        """
        refuse_other_counts("tokens", tokens, at_least=1)
        if self._lease is not None and not self._is_over:
            self._tokens = tokens
            self._in_loop(self._resize)

    def keep(self) -> None:
        """The engine's first output is there: from now on the lease is never preempted.

        Too late where it is preempted already: then its holder is being canceled, and its room is needed.
        """
        if self._lease is not None:
            self._in_loop(self._keep)

    def _in_loop(self, do: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            do()
        elif self._loop is not None:
            with suppress(RuntimeError):  # it has ended, and its leases with it
                self._loop.call_soon_threadsafe(do)

    def _resize(self) -> None:
        lease = self._lease
        if lease is not None and lease.resize(self._tokens):
            lease.charge_tenant(self._tokens - lease.paid_tokens)

    def _keep(self) -> None:
        if self._lease is not None and not self.is_preempted:
            self._lease.keep()
            self._lease.prefilled()

    def _require_grant(self) -> Grant:
        if self._grant is None:
            raise RuntimeError("the lease was not admitted: use it inside of its block")
        return self._grant

    # -- its life

    async def acquire(self, when_preempted: Callable[[], None] | None) -> None:
        """Waits until it is held. Raises AdmissionError where it is refused.

        `when_preempted` is called once, in the event loop, where the room of a preemptible lease is needed before
        `keep`. Where that is so before the holder has the lease, it waits again instead. Raises RuntimeError in another
        event loop than its pool's.
        """
        self._refuse_other_loops()
        self._when_preempted = when_preempted
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        observer, now_us = self._controller.observer, self._controller.pool.now_us
        if observer is not None and observer.listens():
            received = Received(now_us(), time.time_ns(), "LEASE", PATH, (), uuid4().hex)
            self._reporter = EventReporter(now_us, self._asker, observer.received(received))
        self._controller.watchdog.add(self)
        await self._hold(self._enter)
        await self.acquire_again()

    async def acquire_again(self) -> None:
        """Where it is preempted: gives its room back, and waits again at its place in the queue."""
        while self.is_preempted:
            assert self._turn is not None
            self._grant, self._used, self.is_preempted = None, None, False
            await self._hold(self._turn.requeue)

    async def _hold(self, granted: Callable[[], Awaitable[Grant]]) -> None:
        """Holds the lease by the next grant. Raises AdmissionError where there is none; nothing is left then."""
        controller, policy = self._controller, self._snapshot.policy
        try:
            grant = await granted()
        except TurnEnded as end:
            level = self._request.classification.level
            if end.cause is EndCause.GIVEN_UP and controller.is_passing:
                self._lease, grant = None, end.wait or self._passing(self._now_us())
            else:
                error = refusal_for(controller.engine_watch, controller.pool, policy, end, level=level)
                self._refused(error, end.wait)
                raise error from None
        except AdmissionError as error:
            self._refused(error, None)
            raise
        except BaseException:
            self._withdraw()
            raise
        self._grant, passes = grant, self._lease is None
        self._reporter.admitted(grant, None if passes else self.priority, is_dry_run=passes)

    def release(self, error: BaseException | None = None) -> None:
        """Gives the lease back. `error` is what ended its block."""
        if self._is_over or self._grant is None:
            return
        is_lost = self.is_preempted and error is not None
        if is_lost and self._used is None:
            self._used = 0  # its tenant does not pay for what others needed
        if self._lease is not None:
            cost = self._lease.ask.cost
            self._lease.settle(self._used if cost is None or self._used is None else cost.of(self._used))
        usage, policy = self._asked.usage(self._used), self._snapshot.policy
        learn(self._controller, self._request, policy, usage, None, is_complete=error is None, is_failure=False)
        tokens = self._request.tokens if self._used is None else self._used
        if is_lost:
            self._lost(tokens)
        else:
            self._settled(tokens, error)
        self._end()

    def check(self) -> None:
        """See `Watched`. A lease's holder ends it, however long that takes."""

    def give_up(self) -> None:
        """See `Watched`."""
        if self._turn is not None and self._lease is not None and self._grant is None:
            self._turn.give_up()

    async def _enter(self) -> Grant:
        """The first grant."""
        controller, at_us = self._controller, self._now_us()
        if controller.passes_all:  # it holds nothing
            self._classified(at_us)
            return self._passing(at_us)
        if controller.is_draining:
            raise Draining("this process is shutting down and takes no new lease", retry_after_s=1)
        if controller.routing is not None:
            controller.routing.wake()
        pool, policy, request, budgets = controller.pool, self._snapshot.policy, self._request, controller.usage
        self._turn = Turn(pool, policy, request, request.ask(), self, reports=self._reporter, budgets=budgets)
        return await self._turn.take()

    def entered(self, lease: Lease | None) -> None:
        """See `TurnUser`."""
        assert self._turn is not None
        self._request = self._turn.request
        self._classified(self._now_us() if lease is None else lease.entered_us)
        self._lease = lease
        if lease is not None and self._asked.is_preemptible:
            lease.on_preempt = self._preempt

    def rose(self, request: SizedRequest) -> None:
        """See `TurnUser`."""
        self._request = request
        self._asker.tier = self.tier

    @property
    def passes(self) -> bool:
        """See `TurnUser`."""
        return self._controller.is_passing

    def _passing(self, at_us: int) -> Grant:
        return Grant(at_us, 0, 0, None, {}, self._request.classification.level)

    def _preempt(self) -> None:
        self.is_preempted = True
        assert self._when_preempted is not None
        if self._grant is not None:
            self._when_preempted()

    def _refuse_other_loops(self) -> None:
        """Raises RuntimeError where the pool's event loop is another one: no grant would ever arrive here."""
        server = self._controller.server
        if server is not None and not server.done() and server.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(
                "the admission belongs to another event loop: take the lease there, or connect in this thread with "
                "`sidecar.connect_threads`"
            )

    def _withdraw(self) -> None:
        """Its holder was canceled while it waited: it leaves the queue."""
        self._end()
        if self._turn is None:
            self._report_canceled(None)
        else:
            self._turn.when_left(self._report_canceled)

    # -- what is reported of it

    def _classified(self, at_us: int) -> None:
        self._asker.tier, is_kept = self.tier, not self._asked.is_preemptible
        self._reporter.classified(self._request, self._snapshot, at_us, api="lease", is_kept=is_kept)

    def _settled(self, tokens: int, error: BaseException | None) -> None:
        if error is None:
            outcome, name = Outcome.COMPLETED, None
        else:
            is_canceled = isinstance(error, asyncio.CancelledError)
            outcome, name = (Outcome.CLIENT_LEFT if is_canceled else Outcome.FAILED), type(error).__name__
        self._reporter.settled(outcome, None, (tokens, None, None, None), name)

    def _lost(self, tokens: int) -> None:
        """It was preempted, and its block has ended for that: it does not wait again."""
        turn = self._turn
        assert turn is not None
        turn.report_preempted()
        assert self._grant is not None
        wait = msgspec.structs.replace(self._grant, at_us=self._now_us())
        self._reporter.ended(_PREEMPTED, _LOST, None, wait, tokens)

    def _refused(self, error: AdmissionError, wait: Grant | None) -> None:
        """It ended without a grant."""
        self._reporter.refused(error, wait)
        self._end()

    def _report_canceled(self, wait: Grant | None) -> None:
        self._reporter.ended(_CANCELED, "the holder was canceled before it was admitted", None, wait)

    def _end(self) -> None:
        self._is_over = True
        if self._turn is not None:
            self._turn.leave()
        self._controller.watchdog.discard(self)

    def _now_us(self) -> int:
        return self._controller.pool.now_us()
