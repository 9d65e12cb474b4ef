"""The pool over a ledger: leases that wait, run and end by what the ledger grants, wherever it is."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from itertools import count

from sidecar.errors import AdmissionError, QueueFull, RemainingLimits
from sidecar.events import StoreObserver
from sidecar.policy.model import Limits, Policy, StoreLoss
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools import calls
from sidecar.pools.alarm import Alarm
from sidecar.pools.base import Ask, Lease, WaitOutcome
from sidecar.pools.calls import Cap, Drain, EngineView, Metered, Reply, WakeUp
from sidecar.pools.clock import Clock, monotonic_us
from sidecar.pools.engine_reports import change_sizes, found_by, placed
from sidecar.pools.engine_size import EngineSize
from sidecar.pools.engines import NORMAL_SPEED, WEIGHT_PERCENT, EngineOffer
from sidecar.pools.ledger_link import Link, LocalLink
from sidecar.pools.ledger_rules import rules_of, ticket_of, views_of
from sidecar.pools.limits import downgraded, metered, refusal, remaining
from sidecar.pools.member import Member
from sidecar.pools.member_events import Entered, Mode, TakeBack
from sidecar.pools.meter import Judged
from sidecar.pools.outgrown import OutgrownRequests
from sidecar.pools.pool_figures import PoolFigures, ReportedPool
from sidecar.pools.pool_requests import PoolRequest, PoolRequests
from sidecar.pools.store_watch import Elsewhere, StoreWatch
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.rate_limit import RateLimiter
from sidecar.scheduling.tickets import Ticket

POOL = "pool#1"
"""The engine of a pool whose engines are not named: one engine is a fleet of one."""

MOST_ADMITTED = 16
"""After so many admissions the rest waits for the next turn of the event loop. One reply may have more of them."""


class LedgerPool(ReportedPool):
    """See `Pool` and `EnginePool`. Without `set_engines` it has one engine, of the policy's size.

    Use it from one event loop. `weight_percent` is the weight of a predicted hit, None for a pool whose engines are not
    named. `allowances` are the tenants' limits where other pools of the process count in them, too. `link` leads to the
    ledger; without one it is in this process. `size` is that of a pool that is as large as its engine says. `clock` is
    for tests.

    For a ledger in a store: `observer` is called when that is lost and when it is back. `takes_over`: where the pool
    has other tiers, it is made anew with this policy's, once. `is_sole_user`: no other replica can use the engines that
    are set here, so that they are not divided while the store is lost.
    """

    def __init__(
        self,
        policy: Policy,
        clock: Clock = monotonic_us,
        *,
        link: Link | None = None,
        observer: StoreObserver | None = None,
        takes_over: bool = False,
        is_sole_user: bool = False,
        weight_percent: int | None = None,
        allowances: RateLimiter | None = None,
        size: EngineSize | None = None,
    ) -> None:
        self.name = uuid.uuid4().hex[:16]
        self.now_us = clock
        self._has_names, self._weight_percent = weight_percent is not None, weight_percent
        self._rules = self._rules_of(policy)
        self._sizes = SizeLimits(policy)
        self._outgrown = OutgrownRequests(self._sizes, self._refuse_waiting)
        names = tuple(tier.name for tier in policy.tiers)
        self._requests = PoolRequests(self._sizes, names)
        self._questions: dict[int, asyncio.Future[Judged | None]] = {}
        self._ids = count(1)
        self._drained: set[str] = set()
        self._run_at_us: int | None = None
        self._alarm = Alarm(self._run_in_turn)
        self._goes_on_soon = False  # this turn of the event loop has admitted as many as it may
        self._link = link or LocalLink(self._moment_us, allowances)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch = StoreWatch(policy.pool, names, clock, observer)
        self._figures = PoolFigures(
            self._sizes, self._requests, self._watch, self._link, size, has_names=self._has_names
        )
        self.status, self.elsewhere = self._watch.status, Elsewhere()
        self._takes_over, self._is_sole_user = takes_over, is_sole_user
        self._member = self._new_member()
        self.most_tokens, self.most_requests = self._sizes.most_tokens, self._sizes.most_requests
        self._size = size
        if size is not None:
            size.follow(self.change_rules, partial(self.cap_engine, POOL))
        self._set_size(policy.rules)

    async def open(self) -> None:
        """See `Pool.open`. Returns when its size is known, and the pool in the store admits, a new one after HOLD_US;
        or in vain.
        """
        if self._size is not None:
            await self._size.open()
        self._begin()
        if self._link.is_shared:
            await self._watch.decided.wait()

    async def close(self) -> None:
        """See `Pool.close`. A replica says goodbye in a store that can be reached: what it held is free at once."""
        if self._size is not None:
            await self._size.reader.close()
        now_us = self.now_us()
        for request in self._requests.all():
            if request.held is not None:
                self._member.end(request.held, now_us)
            else:
                self._member.cancel(request.ticket, now_us)
        self._member.close(now_us)
        self._run()
        if self._loop is not None and self._link.is_shared:
            await self._watch.gone(self._member)
        await self._link.close()
        self._start_over()

    def _begin(self) -> None:
        """Calls are made from now on. In another event loop than before a replica begins anew; a ledger in the process
        goes on with what it holds.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._link.is_shared:
                self._start_over()
            self._stop_timers()
            self._loop = loop
            self._run()

    def _start_over(self) -> None:
        """Forgets everything of an event loop that has ended, or of a pool that was closed."""
        self._stop_timers()
        self._loop = None
        self._requests.clear()
        self._watch.forget()
        views = self._member.views.values()
        self._member = self._new_member(self._member.number)
        self._member.view(views, self.now_us())
        self._run()

    def _stop_timers(self) -> None:
        self._outgrown.stop()
        self._alarm.stop()
        self._goes_on_soon = False

    def _new_member(self, last_number: int = 0) -> Member:
        policy, link = self._sizes.policy, self._link
        return Member(
            self.name,
            self._rules,
            divides=policy.on_store_loss is StoreLoss.DIVIDE,
            takes_over=self._takes_over,
            presumed=policy.replicas,
            shares_engines=not self._is_sole_user,
            heartbeat_us=link.heartbeat_us,
            lazy_us=link.lazy_us,
            size_now=self._requests.size_now,
            near=link.near,
            last_number=last_number,
        )

    # -- size and rules

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`. The pool of named engines is as large as they are."""
        if not self._has_names:
            self._set_size(rules)

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`."""
        policy = policy if self._size is None else self._size.sized(policy)
        self._sizes.policy = policy
        self._rules = self._rules_of(policy)
        self._member.change_rules(self._rules, self.now_us())
        self._set_size(policy.rules)

    def change_weight(self, weight_percent: int) -> None:
        """See `EnginePool.change_weight`."""
        self._weight_percent = weight_percent

    def set_engines(self, offers: Sequence[EngineOffer]) -> None:
        """See `EnginePool.set_engines`. An operator's word on an engine ends with its incarnation."""
        known = {offer.id for offer in self._figures.offers}
        for name in {offer.id.rpartition("#")[0] for offer in offers if offer.id not in known} & self._drained:
            self.drain_engine(name, drains=False)
        self._figures.offers = offers
        self._set_size(self._sizes.rules)

    def drain_engine(self, name: str, *, drains: bool) -> None:
        """See `EnginePool.drain_engine`."""
        if drains or name in self._drained:
            (self._drained.add if drains else self._drained.discard)(name)
            self._member.tell(Drain(name, drains), self.now_us())
            self._run()

    def cap_engine(self, engine: str, for_s: float, refused: int = 1) -> None:
        """See `EnginePool.cap_engine`."""
        now_us = self.now_us()
        of = self._member.mirror(now_us).engines.get(engine)
        if of is not None:
            self._member.tell(Cap(engine, max(0 if refused else 1, of.held[1] - refused), round(for_s * 1e6)), now_us)
            self._run()

    def pause(self, reason: str | None) -> None:
        """See `Pool.pause`."""
        self._figures.paused = reason
        self._member.pause(reason is not None, self.now_us())
        self._run()

    def _rules_of(self, policy: Policy) -> calls.PoolRules:
        return rules_of(policy, WEIGHT_PERCENT if self._weight_percent is None else self._weight_percent)

    def _set_size(self, rules: PoolRules) -> None:
        """The pool has another size: some waiting requests may be too large, and others fit."""
        now_us = self.now_us()
        if self._has_names:
            change_sizes(self._sizes, self._figures.offers)
            engines = views_of(self._figures.offers, now_us)
        else:
            self._sizes.change_rules(rules, self._sizes.policy.largest_engine)
            is_known = self._size is None or self._size.is_known
            engines = [EngineView(POOL, rules.tokens, rules.requests, UNBOUNDED, NORMAL_SPEED, is_reachable=is_known)]
        self._member.view(engines, now_us)
        self._outgrown.look(request.lease for request in self._requests.waiting.values())
        self._run()

    # -- requests

    async def enter(self, ask: Ask) -> Lease:
        """See `Pool.enter`. Raises CapacityUnknown, too, where its engine says how large it is."""
        if self._size is not None:
            await self._size.require()
        loop, is_shared = asyncio.get_running_loop(), self._link.is_shared
        if loop is not self._loop:
            self._begin()
        self._sizes.refuse_what_never_fits(ask)
        if is_shared and (refused := self._watch.refusal(ask, self._sizes.policy, self._member)) is not None:
            raise refused
        answered = loop.create_future() if is_shared and ask.limits is None else None
        now_us = self.now_us()
        number = next(self._ids)
        lease = Lease(self, number, ask, now_us, str(number), ask.tokens, answered)
        if ask.limits is not None:
            await self._enter_within(ask.limits, lease, now_us)
        elif is_shared or not self._enters(lease, now_us):
            await self._enter(lease, answered, now_us)
        self._requests.places.taken(lease.ask)
        return lease

    def _enters(self, lease: Lease, now_us: int) -> bool:
        """Whether a request enters at once, without a call to the ledger in this process. Most find the pool idle."""
        ticket = ticket_of(lease)
        if self._requests.waiting or (held := self._member.enter(ticket, now_us)) is None:
            return False
        grant = self._requests.entered(lease, ticket, held, now_us)
        if self._has_names:
            grant = placed(grant, lease.ask, held.engine, found_by(held, self._member.mirror(now_us), now_us))
        lease.grant = grant
        return True

    async def _enter(self, lease: Lease, answered: asyncio.Future[None] | None, now_us: int) -> None:
        ask, others_wait = lease.ask, bool(self._requests.waiting)
        most, queued = self._sizes.places(ask.tier), self._requests.queued(ask.tier) if others_wait else 0
        displaced = self._requests.find_place(ask, queued, most, now_us) if most and others_wait else None
        if displaced is not None:
            self._refuse_waiting(displaced, self._requests.queue_full(displaced.ask, queued, now_us))
        is_busy = self._member.is_awaiting
        request = self._requests.came(lease, ticket_of(lease), self._member.mode)
        self._member.submit(request.ticket, now_us)
        self._run(now_us, MOST_ADMITTED if most != 0 and others_wait else UNBOUNDED)
        if lease.grant is None and answered is not None and most == 0:
            await self._looked_at(lease, answered, is_busy=is_busy)
        if lease.grant is None:
            if most is not None and not (most and others_wait):
                self._find_place_or_leave(request, queued, most, now_us)
            self._requests.begins_to_wait(request)
            if answered is not None and most != 0:
                await self._looked_at(lease, answered, is_busy=is_busy)

    async def _looked_at(self, lease: Lease, answered: asyncio.Future[None], *, is_busy: bool) -> None:
        """Returns when the ledger has looked at a new request, or cannot for now. Raises its refusal.

        It does so with the call that is on its way; with the one after it where one was before (`is_busy`).
        """
        self._watch.enters(lease, self._member.number + (is_busy or not self._member.is_awaiting), self._member)
        if self._watch.is_away:
            self._look_at_store()
        try:
            await answered
        except asyncio.CancelledError:
            if not lease.settle(0):
                lease.leave()
            raise

    async def _enter_within(self, limits: Limits, lease: Lease, now_us: int) -> None:
        """The same within a tenant's limits: the ledger is asked by the call that shows the request."""
        ask, full, request = lease.ask, None, None
        most, queued = self._sizes.places(ask.tier), self._requests.queued(ask.tier)
        try:
            if most and self._requests.waiting:
                self._requests.find_place(ask, queued, most, now_us)
            request = self._requests.came(lease, ticket_of(lease), self._member.mode)
        except QueueFull as error:
            full = error
        asked = metered(lease.id, ask.tenant, ask.charged_tokens, limits, charges=full is None)
        try:
            judged = await self._judged(asked, None if request is None else request.ticket, now_us)
        except asyncio.CancelledError:
            if request is not None and self._requests.get(lease.ticket_id) is not None:
                lease.is_over = True
                self.end(lease, None)
            raise
        if judged is not None and judged.verdict.over is not None:
            lower = downgraded(ask, self._sizes)
            if lower is None:
                raise refusal(ask, judged)
            lease.ask, lease.allowance = lower, remaining(judged, is_downgraded=True)
            await self._enter(lease, lease.enters_again() if self._link.is_shared else None, self.now_us())
        elif request is None:
            assert full is not None
            raise full
        elif judged is None and (refused := self._watch.refusal(ask, self._sizes.policy, self._member)) is not None:
            self._cancel(request, self.now_us())
            raise refused
        else:
            if judged is not None:
                lease.allowance = remaining(judged)
            if lease.grant is None and self._requests.get(lease.ticket_id) is request:
                if most is not None:
                    self._find_place_or_leave(request, self._requests.queued(ask.tier), most, self.now_us())
                self._requests.begins_to_wait(request)
                if outgrown := self._sizes.outgrown(ask):
                    self._refuse_waiting(lease, outgrown)

    async def _judged(self, asked: Metered, ticket: Ticket | None, now_us: int) -> Judged | None:
        """The ledger's verdict on a request, without a ticket on a question. None: it gives none for now."""
        judged: asyncio.Future[Judged | None] = asyncio.get_running_loop().create_future()
        self._questions[asked.number] = judged
        self._member.meter.ask(asked, ticket, now_us)
        self._run(now_us)
        try:
            return await judged
        finally:
            del self._questions[asked.number]
            if ticket is None:
                self._member.meter.give_up(asked.number)

    def _find_place_or_leave(self, request: PoolRequest, queued: int, most: int, now_us: int) -> None:
        """A request was not admitted at once: there may be no place for it all the same."""
        try:
            displaced = self._requests.find_place(request.lease.ask, queued, most, now_us)
        except QueueFull:
            self._member.meter.settle(request.lease.id, 0, now_us, is_counted=False, was_held=False)
            self._cancel(request, now_us)
            self._run(now_us)
            raise
        if displaced is not None:
            self._refuse_waiting(displaced, self._requests.queue_full(displaced.ask, queued, now_us))

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None = 0) -> None:
        """See `LeaseOwner.end`."""
        now_us, member, grant = self.now_us(), self._member, None
        if lease.ask.limits is not None:
            is_held, used = (True, used_tokens) if lease.grant is not None else (False, 0)
            is_counted = lease.is_counted and (is_held or self._figures.paused is None)
            member.meter.settle(lease.id, used, now_us, is_counted=is_counted, was_held=is_held)
        request = self._requests[lease.ticket_id]
        if request.held is not None:
            self._requests.ended(request)
            member.end(request.held, now_us)
        else:
            grant = self._requests.so_far(request, now_us)
            self._cancel(request, now_us)
        if not member.is_quiet:
            self._run(now_us)
        if outcome is not None:
            outcome.set_result(grant)

    def change_size(self, lease: Lease) -> None:
        """See `LeaseOwner.change_size`. What it frees is decided about later in this tick of the event loop."""
        self._member.resize(self._requests.held_as(lease), lease.ask.tokens, self.now_us())
        self._run_when_due()

    def charge_tenant(self, lease: Lease, tokens: int) -> None:
        """See `LeaseOwner.charge_tenant`."""
        self._member.charge(self._requests.held_as(lease), tokens, self.now_us())
        self._run_when_due()

    def keep(self, lease: Lease) -> None:
        """See `LeaseOwner.keep`."""
        self._member.keep(self._requests.held_as(lease), self.now_us())
        self._run()

    def requeue(self, lease: Lease) -> None:
        """See `LeaseOwner.requeue`."""
        self._wait_again(lease, is_overtaken=True)

    def hand_back(self, lease: Lease) -> None:
        """See `LeaseOwner.hand_back`."""
        self._wait_again(lease, is_overtaken=False)

    def prefilled(self, lease: Lease) -> None:
        """See `LeaseOwner.prefilled`."""
        held = self._requests.held_as(lease)
        if held.sent:
            self._member.first_byte(held, self.now_us())
            self._run()

    def _wait_again(self, lease: Lease, *, is_overtaken: bool) -> None:
        """Many come back in one tick of the event loop. What they free is decided about later in it, together."""
        now_us = self.now_us()
        self._member.hand_back(self._requests.held_as(lease), lease.ask.barred, now_us)
        self._requests.came_back(self._requests[lease.ticket_id], now_us, is_overtaken=is_overtaken)
        if error := self._sizes.outgrown(lease.ask):
            self._refuse_waiting(lease, error)
        self._run_when_due()

    def _cancel(self, request: PoolRequest, now_us: int) -> None:
        self._requests.ended(request)
        self._member.cancel(request.ticket, now_us)

    def _refuse_waiting(self, lease: Lease, error: AdmissionError) -> None:
        """Refuses a request, where it still waits."""
        request = self._requests.get(lease.ticket_id)
        if request is not None and request.held is None:
            now_us = self.now_us()
            self._cancel(request, now_us)
            self._member.meter.settle(lease.id, 0, now_us, is_counted=lease.is_counted, was_held=False)
            lease.refused(error)
            if (judged := self._questions.get(lease.id)) is not None and not judged.done():
                judged.set_exception(error)
            self._run_when_due()

    # -- calls to the ledger

    def _run(self, now_us: int | None = None, most_admitted: int = MOST_ADMITTED) -> None:
        """Makes the calls that are due, and tells requests what they bring. All of it is at one moment, `now_us`."""
        if self._run_at_us is not None or (self._loop is None and self._link.is_shared):
            return
        if self._goes_on_soon and most_admitted == MOST_ADMITTED:
            return
        now_us = self.now_us() if now_us is None else now_us
        if self._member.is_quiet and not self._member.events:
            return
        self._run_at_us = now_us
        try:
            admitted = 0
            while admitted < most_admitted and (call := self._member.poll(now_us)) is not None:
                self._link.send(call, self)
                admitted += self._tell_requests(now_us)
            self._tell_requests(now_us)  # a member that is alone admits in `poll`
            if admitted >= MOST_ADMITTED:
                due_us = self._member.due_us()
                self._goes_on_soon = due_us is not None and due_us <= now_us
            if self._link.is_shared:
                self._look_at_store()
        finally:
            self._run_at_us = None
        self._run_when_due()

    def _run_in_turn(self) -> None:
        self._goes_on_soon = False
        self._run()

    def _look_at_store(self) -> None:
        self._watch.look(self._member)
        if self._watch.is_away:
            waiting = (it.lease for it in self._requests.waiting.values())
            for lease, refusal in self._watch.judged(waiting, self._sizes.policy, self._member):
                if refusal is not None:
                    self._refuse_waiting(lease, refusal)
                lease.waits()
            for question in [it for it in self._questions.values() if not it.done()]:
                question.set_result(None)

    def _run_when_due(self) -> None:
        if self._member.is_quiet or self._run_at_us is not None or (due_us := self._member.due_us()) is None:
            return
        self._alarm.set(due_us, self.now_us())

    def _moment_us(self) -> int:
        """Now; the moment of a call, while it is made: in the process bids then have the order of their arrivals."""
        return self.now_us() if self._run_at_us is None else self._run_at_us

    def answered(self, reply: Reply) -> None:
        """See `LinkUser.answered`."""
        now_us = self._moment_us()
        is_statement = self._member.mode is Mode.STATING
        self._member.answered(reply, now_us)
        self._figures.note_blocked(now_us, is_blocked=bool(reply.lined))
        if self._link.is_shared:
            self._requests.served_elsewhere(self._member.elsewhere.take())
            self._tell_requests(now_us)
            self._watch.answered(reply)
            self._requests.places.replicas = max(1, reply.alive)
            if reply.config is not None or reply.drained is not None:
                self._takes_over = self._takes_over and not is_statement
                self.elsewhere.heard(self._member, self._figures.offers, is_first=is_statement)
                self._drained = set(self.elsewhere.draining)
        self._run()

    def unanswered(self, why: str) -> None:
        """See `LinkUser.unanswered`."""
        self._watch.why = why
        self._member.unanswered(self.now_us())
        self._run()

    def woken(self, wake_up: WakeUp) -> None:
        """See `LinkUser.woken`."""
        self._member.woken(wake_up, self.now_us())
        self._run()

    def _tell_requests(self, now_us: int) -> int:
        """What the ledger decided, to those whom it concerns. Returns how many were admitted."""
        admitted, are_others = 0, False
        for event in self._member.take_events():
            if isinstance(event, Entered):
                are_others |= self._admit(event, now_us)
                admitted += 1
            elif isinstance(event, Judged):
                self._tell_verdict(event)
            elif isinstance(event, TakeBack):
                lease = self._requests[event.lease.ticket.id].lease
                lease.chosen(lease.returns)
            else:
                self._refuse_waiting(self._requests[event.ticket.id].lease, self._watch.other_tiers())
        if are_others:
            self._member.show_anew(now_us)
        return admitted

    def _tell_verdict(self, judged: Judged) -> None:
        number = judged.verdict.number
        question, request = self._questions.get(number), self._requests.get(str(number))
        if question is None or question.done():
            if request is not None:
                self._judge_late(request, judged)
            return
        if judged.verdict.over is not None and request is not None:
            self._requests.ended(request)
        question.set_result(judged)

    def _judge_late(self, request: PoolRequest, judged: Judged) -> None:
        """The verdict on a request that waits already, because the ledger gave none when it came."""
        lease = request.lease
        if judged.verdict.over is None:
            lease.allowance = remaining(judged)
            return
        self._requests.ended(request)
        lower, now_us = downgraded(lease.ask, self._sizes), self.now_us()
        if lower is None:
            lease.refused(refusal(lease.ask, judged))
            return
        lease.ask, lease.allowance = lower, remaining(judged, is_downgraded=True)
        again, most = self._requests.came(lease, ticket_of(lease), self._member.mode), self._sizes.places(lower.tier)
        self._member.submit(again.ticket, now_us)
        try:
            if most is not None:
                self._find_place_or_leave(again, self._requests.queued(lower.tier), most, now_us)
        except QueueFull as full:
            lease.refused(full)
        else:
            self._requests.begins_to_wait(again)

    def _admit(self, entered: Entered, now_us: int) -> bool:
        """Returns whether it is of another size than it was shown with: those that are shown with it may be, too."""
        held = entered.lease
        request = self._requests[held.ticket.id]
        lease, ticket, request.held = request.lease, held.ticket, held
        if tokens := lease.has_grown():
            self._requests.has_grown(request, tokens)
            self._member.ask_again(held, tokens, now_us)
            if error := self._sizes.outgrown(lease.ask):
                self._refuse_waiting(lease, error)
            return True
        level, is_first = self._member.whole_level(ticket, now_us), lease.is_entering or lease.id in self._questions
        grant = self._requests.admitted(request, level, now_us, entered.passed, is_first=is_first)
        if self._has_names:
            grant = placed(grant, lease.ask, held.engine, entered.found)
        return lease.granted(grant)

    async def allowance(self, tenant: str, limits: Limits) -> RemainingLimits | None:
        """See `Pool.allowance`. Not known while the replica is not in its pool."""
        self._run()
        if self._member.mode is not Mode.SHARED:
            return None
        question = metered(next(self._ids), tenant, 0, limits, charges=False)
        judged = await self._judged(question, None, self.now_us())
        return None if judged is None else remaining(judged)
