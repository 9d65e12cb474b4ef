"""One lease from Python, from its wait in the pool's queue to its end.

Everything here runs in the event loop of the pool. `admission` gives it to coroutines, `threads` to other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from uuid import uuid4

from sidecar.errors import AdmissionError, Draining, QueueFull, QueueTimeout
from sidecar.events import (
    Admitted,
    Classified,
    Event,
    Observation,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.leases.lease_request import LeaseRequest, refuse_other_counts
from sidecar.middleware.controller import AdmissionController
from sidecar.pools import Grant, Lease
from sidecar.pools.base import WaitGivenUp

METHOD, PATH, API = "LEASE", "/python", "lease"
"""In place of an HTTP request's, in traces, metrics and pages."""
_CANCELED, _PREEMPTED = "canceled", "preempted"


class LeasePreempted(Exception):
    """A more important request needed the room of a lease before `HeldLease.keep` was called.

    What the lease's block has done is lost; `Admission.run` does it again by itself, at its place in the queue.
    """


class HeldLease:
    """A lease that is held, or waits again. `Admission.lease` makes it.

    `is_preempted` says that a more important request waits for its room: whoever holds it should end soon.
    """

    def __init__(self, controller: AdmissionController, request: LeaseRequest) -> None:
        self.is_preempted = False
        self._controller = controller
        self._request = request
        self._policy = controller.policy
        self._snapshot = controller.snapshot
        self._ask, self._tenant = request.ask(self._policy)
        self._lease: Lease | None = None
        self._grant: Grant | None = None
        self._used: int | None = None
        self._observation: Observation | None = None
        self._when_preempted: Callable[[], None] | None = None
        self._is_over = self._was_admitted = False
        self._returns = 0

    # -- what the holder reads

    @property
    def tier(self) -> str:
        """The tier that is charged: a lower one than was asked for where the tenant is over its limits."""
        return self._policy.tiers[self._level].name

    @property
    def tenant(self) -> str:
        """The tenant that it counts for."""
        return self._tenant.name

    @property
    def tokens(self) -> int:
        """The tokens that it holds."""
        return self._ask.tokens if self._lease is None else self._lease.ask.tokens

    @property
    def level(self) -> int:
        """The level it was admitted at, 0 for the most important: less than its tier's where it waited for long."""
        return self._granted().level

    @property
    def priority(self) -> int | float:
        """What the engine should get as the request's priority, in its own range and direction."""
        return self._snapshot.priorities[self._granted().level]

    @property
    def queue_wait_s(self) -> float:
        """How long it waited, in seconds."""
        return self._granted().queue_wait_us / 1e6

    @property
    def starvation_s(self) -> float:
        """How long it waited after a later request was admitted first, in seconds."""
        return self._granted().starvation_us / 1e6

    @property
    def engine(self) -> str | None:
        """The engine that the request is to be sent to, by its name in the policy; None in a pool of one engine."""
        engine = self._granted().engine
        return None if engine is None else engine.partition("#")[0]

    @property
    def engine_url(self) -> str | None:
        """The address of that engine; None in a pool of one engine."""
        engine, routing = self._granted().engine, self._controller.routing
        return None if engine is None or routing is None else routing.url_of(engine)

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
        lease = self._lease
        if lease is not None and lease.resize(tokens):
            lease.charge_tenant(tokens - lease.paid_tokens)

    def keep(self) -> None:
        """The engine's first output is there: from now on the lease is never preempted.

        Too late where it is preempted already: then its holder is being canceled, and its room is needed.
        """
        if self._lease is not None and not self.is_preempted:
            self._lease.keep()
            self._lease.prefilled()

    def _granted(self) -> Grant:
        if self._grant is None:
            raise RuntimeError("the lease was not admitted: use it inside of its block")
        return self._grant

    @property
    def _level(self) -> int:
        return self._ask.tier if self._lease is None else self._lease.tier

    # -- its life

    async def acquire(self, when_preempted: Callable[[], None] | None) -> None:
        """Waits until it is held. Raises AdmissionError where it is refused.

        `when_preempted` is called once, in the event loop, where the room is needed before `keep`; None: it is kept at
        once. Where that is so before the holder has the lease, it waits again instead. Raises RuntimeError in another
        event loop than its pool's.
        """
        self._refuse_other_loops()
        self._when_preempted = when_preempted
        observer = self._controller.observer
        if observer is not None and observer.listens():
            request_id = uuid4().hex
            now_us, wall_ns = self._now_us(), time.time_ns()
            self._observation = observer.received(Received(now_us, wall_ns, METHOD, PATH, (), request_id))
        self._controller.watchdog.add(self)
        try:
            self._admitted(self._passed() if self._controller.passes_all else await self._enter())
        except AdmissionError as error:
            self._refused(error, None)
            raise
        except BaseException:
            self._withdraw()
            raise
        await self.acquire_again()

    async def acquire_again(self) -> None:
        """Where it is preempted: gives its room back, and waits again at its place in the queue."""
        while self.is_preempted:
            await self._give_back_and_wait()

    async def _give_back_and_wait(self) -> None:
        lease, grant = self._lease, self._grant
        assert lease is not None
        assert grant is not None
        self._gave_room(grant)
        self._grant, self._used, self.is_preempted = None, None, False
        try:
            # The tier's longest wait is kept already: from now on only the holder limits the wait.
            self._admitted(await self._wait(lease, lease.requeue(), self._request.max_wait_s))
        except AdmissionError as error:
            self._refused(error, None)
            raise
        except BaseException:
            self._withdraw()
            raise

    def release(self, error: BaseException | None = None) -> None:
        """Gives the lease back. `error` is what ended its block."""
        if self._is_over or not self._was_admitted:
            return
        is_lost = self.is_preempted and error is not None
        if is_lost and self._used is None:
            self._used = 0  # its tenant does not pay for what others needed
        tokens = self._ask.tokens if self._used is None else self._used
        if self._lease is not None:
            self._lease.settle(self._used)
        if self._controller.usage is not None:
            self._controller.usage.add(self.tenant, self.tier, self._request.model, *self._request.split(tokens))
        self._end(self._lost(tokens) if is_lost else self._settled(tokens, error))

    def check(self) -> None:
        """See `Watched`. A lease's holder ends it, however long that takes."""

    def give_up(self) -> None:
        """See `Watched`."""
        if self._lease is not None and self._grant is None:
            self._lease.give_up()

    async def _enter(self) -> Grant:
        controller, ask, at_us = self._controller, self._ask, self._now_us()
        if controller.is_draining:
            raise self._draining("takes no new lease")
        if controller.routing is not None:
            controller.routing.wake()
        try:
            pool = controller.pool
            if controller.usage is not None and self._tenant.limits.have_budgets:
                ask = self._ask = controller.usage.within(ask, self._tenant, pool)
            lease = self._lease = await pool.enter(ask)
        except QueueFull as full:
            self._classified(at_us, ask.tier if full.level is None else full.level)
            raise
        except AdmissionError:
            self._classified(at_us, ask.tier)
            raise
        self._classified(at_us, lease.tier)
        if self._when_preempted is None or not self._request.is_preemptible:
            lease.on_preempt = None
        else:
            lease.on_preempt = self._preempt
        if lease.grant is not None:
            return lease.grant
        self._report(Queued(self._now_us(), *controller.pool.obstacle(ask), controller.pool.mark(lease.tier)))
        return await self._wait(lease, lease.wait(), self._most_wait_s())

    async def _wait(self, lease: Lease, granted: asyncio.Future[Grant], most_s: float | None) -> Grant:
        if self._controller.is_passing:
            lease.give_up()
        await asyncio.wait((granted,), timeout=most_s)
        if not granted.done():
            self._refuse_after(await lease.leave(), self._timeout(most_s))
        if isinstance(granted.exception(), WaitGivenUp):
            left = lease.grant if lease.settle(0) else await lease.leave()
            if self._controller.is_passing and left is not None:
                self._lease = None
                return left
            self._refuse_after(left, self._draining("ended while the lease waited"))
        usage = self._controller.usage
        over = None if usage is None or self._returns else usage.used_up(self._tenant)
        if over is not None:
            self._refuse_after(granted.result() if lease.settle(0) else await lease.leave(), over)
        return granted.result()

    def _refuse_after(self, wait: Grant | None, error: AdmissionError) -> None:
        """Raises the error of a wait that has ended without a grant."""
        self._refused(error, wait)
        raise error

    def _most_wait_s(self) -> float | None:
        limits = (self._request.max_wait_s, self._policy.tiers[self._level].max_wait_s)
        return min((limit for limit in limits if limit is not None), default=None)

    def _timeout(self, most_s: float | None) -> QueueTimeout:
        return QueueTimeout(
            f"no room came free for tier {self.tier} within {most_s:g} s; try again later",
            retry_after_s=self._controller.pool.retry_after_s(self._level),
        )

    def _draining(self, what: str) -> Draining:
        return Draining(f"this process is shutting down and {what}", retry_after_s=1)

    def _passed(self) -> Grant:
        """Where every request passes, a lease holds nothing."""
        self._classified(self._now_us(), self._ask.tier)
        return Grant(self._now_us(), 0, 0, None, {}, self._ask.tier)

    def _preempt(self) -> None:
        self.is_preempted = True
        assert self._when_preempted is not None
        if self._grant is not None:
            self._when_preempted()

    def _refuse_other_loops(self) -> None:
        """Raises RuntimeError where the pool's event loop is another one: no grant would ever be heard of here."""
        server = self._controller.server
        if server is not None and not server.done() and server.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(
                "the admission belongs to another event loop: take the lease there, or connect in this thread with "
                "`sidecar.connect_threads`"
            )

    def _withdraw(self) -> None:
        """Its holder was canceled while it waited: it leaves the queue."""
        lease, wait = self._lease, None
        if lease is not None and not lease.settle(0):
            left = lease.leave()
            wait = left.result() if left.done() else None
        self._refused(None, wait)

    # -- what is reported of it

    def _admitted(self, grant: Grant) -> None:
        self._grant, self._was_admitted = grant, True
        is_dry_run = self._lease is None
        priority = None if is_dry_run else self.priority
        self._report(
            Admitted(
                grant.at_us,
                grant.queue_wait_us,
                grant.starvation_us,
                grant.overtaken_at_us,
                grant.served_ahead,
                grant.level,
                priority,
                grant.passed,
                is_dry_run,
                grant.engine,
                grant.placed,
            )
        )

    def _classified(self, at_us: int, level: int) -> None:
        ask, tiers = self._ask, self._policy.tiers
        self._report(
            Classified(
                at_us=at_us,
                tier=tiers[level].name,
                tenant=ask.tenant,
                source="key" if self._request.tier is None else "lease",
                clamped_from=None,
                api=API,
                model=self._request.model,
                max_output_tokens=None,
                stream=False,
                tokens=ask.tokens,
                requests=ask.requests,
                preemptible=self._request.is_preemptible and self._policy.rules.is_preemptible(level),
                downgraded_from=None if level == ask.tier else tiers[ask.tier].name,
            )
        )

    def _settled(self, tokens: int, error: BaseException | None) -> Settled:
        if error is None:
            outcome, name = Outcome.COMPLETED, None
        else:
            is_canceled = isinstance(error, asyncio.CancelledError)
            outcome, name = (Outcome.CLIENT_LEFT if is_canceled else Outcome.FAILED), type(error).__name__
        return Settled(self._now_us(), outcome, None, tokens, None, None, name)

    def _gave_room(self, grant: Grant) -> None:
        self._returns += 1
        at_us = self._now_us()
        self._report(Preempted(at_us, grant.at_us, self._returns))
        self._report(Queued(at_us, Obstacle.PREEMPTED, "its room went to a more important request"))

    def _lost(self, tokens: int) -> Settled:
        """It was preempted, and its block has ended for that: it does not wait again."""
        grant = self._granted()
        self._gave_room(grant)
        at_us = self._now_us()
        wait = Refused(
            at_us,
            _PREEMPTED,
            "its block ended, because a more important request needed its room",
            None,
            grant.queue_wait_us,
            grant.starvation_us,
            grant.overtaken_at_us,
            grant.served_ahead,
            self._ask.tenant,
        )
        return Settled(at_us, Outcome.FAILED, None, tokens, None, None, _PREEMPTED, wait)

    def _refused(self, error: AdmissionError | None, wait: Grant | None) -> None:
        """It ended without a grant: refused by `error`, or canceled."""
        if self._is_over:
            return
        code = _CANCELED if error is None else error.code
        message = "the holder was canceled before it was admitted" if error is None else error.message
        status = None if error is None else error.status
        at_us = self._now_us() if wait is None else wait.at_us
        waited: tuple[int, int, int | None, Mapping[str, int]] = (0, 0, None, {})
        if wait is not None:
            waited = (wait.queue_wait_us, wait.starvation_us, wait.overtaken_at_us, wait.served_ahead)
        tier = self._policy.tiers[self._ask.tier].name
        refused = Refused(at_us, code, message, status, *waited, self._ask.tenant, None, tier)
        if not self._was_admitted:
            self._end(refused)
        else:
            self._end(Settled(self._now_us(), Outcome.FAILED, status, 0, None, None, code, refused))

    def _end(self, event: Event) -> None:
        self._is_over = True
        self._report(event)
        self._controller.watchdog.discard(self)

    def _report(self, event: Event) -> None:
        if self._observation is not None:
            self._observation.on_event(event)

    def _now_us(self) -> int:
        return self._controller.pool.now_us()
