"""The pool over a ledger: leases that wait, run and end by what the ledger grants, wherever it is."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from itertools import count

from sidecar.errors import AdmissionError, QueueFull
from sidecar.events import StoreObserver
from sidecar.policy.choices import StoreLoss
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Clock, Lease, WaitOutcome, monotonic_us
from sidecar.pools.calls import Cap, Drain, EngineView, Reply, WakeUp
from sidecar.pools.engine_reports import EngineSize, change_sizes, found_by, placed
from sidecar.pools.engines import NORMAL_SPEED, WEIGHT_PERCENT, EngineOffer
from sidecar.pools.ledger_link import Link, LocalLink, engine_views, new_rules, new_ticket
from sidecar.pools.limits import downgraded, metered, raised, refusal, remaining
from sidecar.pools.member import Member
from sidecar.pools.member_events import Entered, MemberMode, TakeBack
from sidecar.pools.meter import Judged
from sidecar.pools.pool_figures import ReportedPool
from sidecar.pools.pool_requests import PoolRequests
from sidecar.pools.store_watch import Alarm, Elsewhere, StoreWatch
from sidecar.scheduling.amounts import UNBOUNDED
from sidecar.scheduling.rate_limit import RateLimiter

POOL = "pool#1"
"""The engine of a pool whose engines are not named: one engine is a fleet of one."""

LOOKED_AT_ONCE = 256
"""Waiting requests that a pool of another size looks at in one turn of the event loop: 10 ms if all are refused."""
MOST_ADMITTED = 16
"""After so many admissions the rest waits for the next turn of the event loop. One reply may have more of them."""


class Pool(ReportedPool):
    """The leases of one engine or several, in one process or in a store that many share. Use it from one event loop.

    Leases change their size many times while they run. The pool decides about the room that they free in the same tick
    of the event loop, once for all of them. Growth frees no room: its consequences wait for the next decision.

    `weight_percent` is the weight of a predicted hit, None for a pool of one engine, of the policy's size. Otherwise
    each grant names an engine by its id, and before the first `set_engines` every request waits. `allowances` are the
    tenants' limits where other pools of the process count in them, too. `link` leads to the ledger; without one it is
    in this process. `size` is that of a pool that is as large as its engine says. `clock` is for tests.

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
        self._has_names = weight_percent is not None
        self._weight_percent = WEIGHT_PERCENT if weight_percent is None else weight_percent
        self._rules = new_rules(policy, self._weight_percent)
        self._sizes = SizeLimits(policy)
        names = tuple(tier.name for tier in policy.tiers)
        self._requests = PoolRequests(self._sizes, names)
        self._unjudged: dict[int, Lease] = {}  # requests within limits that the ledger has not looked at
        self._questions: dict[int, asyncio.Future[Judged | None]] = {}  # without a request
        self._ids = count(1)
        self._drained: set[str] = set()
        self._run_at_us: int | None = None
        self._alarm = Alarm(self._run)
        self._link = link or LocalLink(self._moment_us, allowances)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch = StoreWatch(policy.pool, names, clock, observer)
        self.status, self.elsewhere = self._watch.status, Elsewhere()
        self._takes_over, self._is_sole_user = takes_over, is_sole_user
        self._member, self._size = self._new_member(), size
        self.most_tokens, self.most_requests = self._sizes.most_tokens, self._sizes.most_requests
        if size is not None:
            size.follow(self._set_size, partial(self.cap_engine, POOL))
        self._set_size(policy.rules)

    async def open(self) -> None:
        """Gets ready. The server's start calls it; `enter` does where no start was seen.

        Returns when its size is known, and the pool in the store admits, a new one after HOLD_US; or in vain.
        """
        if self._size is not None:
            await self._size.open()
        self._begin()
        if self._link.is_shared:
            await self._watch.decided.wait()

    async def close(self) -> None:
        """Gives back everything that is still held, and closes all connections. The server's end calls it.

        A replica says goodbye in a store that can be reached: what it held is free at once.
        """
        if self._size is not None:
            await self._size.reader.close()
        now_us = self.now_us()
        for lease in self._requests.all():
            if lease.held is not None:
                self._member.end(lease.held, now_us)
            else:
                self._member.cancel(lease.ticket, now_us)
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
            self._alarm.stop()
            self._loop = loop
            self._run()

    def _start_over(self) -> None:
        """Forgets everything of an event loop that has ended, or of a pool that was closed."""
        self._alarm.stop()
        self._loop = None
        self._requests.clear()
        self._watch.forget()
        views = self._member.views.values()
        self._member = self._new_member(self._member.number)
        self._member.view(views, self.now_us())
        self._run()

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

    def change_policy(self, policy: Policy) -> None:
        """Another policy that needs no restart (`policy.diff`): its rules, queues and limits count at once.

        Requests keep their places and what they hold. A pool that holds more than its new size admits no request until
        that has drained. Waiting requests that it could never admit are refused.
        """
        policy = policy if self._size is None else self._size.sized(policy)
        self._sizes.policy = policy
        self._rules = new_rules(policy, self._weight_percent)
        self._member.change_rules(self._rules, self.now_us())
        self._set_size(policy.rules)

    def change_weight(self, weight_percent: int) -> None:
        """Predicted hits have another weight. Call `change_policy` after it: it applies both."""
        self._weight_percent = weight_percent

    def set_engines(self, offers: Sequence[EngineOffer]) -> None:
        """These are the pool's engines from now on; times are by `Pool.now_us`.

        One that is left out keeps what it holds until that ends. Waiting requests that the pool could never hold are
        refused, unless there are no engines at all. One that fits the pool and none of its engines waits.

        An operator's word on an engine ends with its incarnation.
        """
        known = {offer.id for offer in self._offers}
        for name in {offer.id.rpartition("#")[0] for offer in offers if offer.id not in known} & self._drained:
            self.drain_engine(name, drains=False)
        self._offers = offers
        self._set_size(self._sizes.rules)

    def drain_engine(self, name: str, *, drains: bool) -> None:
        """The engine of that name takes no new requests of any process that shares the pool, or does again.

        A new incarnation takes them. In a pool of one process its own offers say the same.
        """
        if drains or name in self._drained:
            (self._drained.add if drains else self._drained.discard)(name)
            self._member.tell(Drain(name, drains), self.now_us())
            self._run()

    def cap_engine(self, engine: str, for_s: float, refused: int = 1) -> None:
        """An engine, by its id, runs no more requests for so many seconds than it does now, less those it `refused`.

        Where it refused none, it may run one. A cap in force only falls. Call it before the refused lease is handed
        back.
        """
        now_us = self.now_us()
        of = self._member.mirror(now_us).engines.get(engine)
        if of is not None:
            self._member.tell(Cap(engine, max(0 if refused else 1, of.held[1] - refused), round(for_s * 1e6)), now_us)
            self._run()

    def pause(self, reason: str | None) -> None:
        """Admits no request of this process from now on, and preempts none for one, because of `reason`; None ends it.

        Requests come, wait, age and leave as always, and a full queue refuses as always. Each keeps its place and its
        figures. One that leaves meanwhile counts in none of its tenant's limits. Other processes that share the pool
        go on.
        """
        self._paused = reason
        self._member.pause(reason is not None, self.now_us())
        self._run()

    def _set_size(self, rules: PoolRules) -> None:
        """The pool has another size. A pool of named engines is as large as they are."""
        now_us = self.now_us()
        if self._has_names:
            change_sizes(self._sizes, self._offers)
            engines = engine_views(self._offers, now_us)
        else:
            self._sizes.change_rules(rules, self._sizes.policy.largest_engine)
            is_known = self._size is None or self._size.is_known
            engines = [EngineView(POOL, rules.tokens, rules.requests, UNBOUNDED, NORMAL_SPEED, is_reachable=is_known)]
        self._member.view(engines, now_us)
        if self._sizes.has_shrunk:
            self._refuse_outgrown([*self._requests.waiting.values()])
        self._run()

    def _refuse_outgrown(self, waiting: list[Lease]) -> None:
        """Refuses those for whom the pool has become too small, some in each turn of the event loop."""
        for lease in waiting[:LOOKED_AT_ONCE]:
            if error := self._sizes.outgrown(lease.ask):
                self._refuse_waiting(lease, error)
        if later := waiting[LOOKED_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._refuse_outgrown, later)

    # -- requests

    async def enter(self, ask: Ask) -> Lease:
        """Puts a request into the pool, and returns when the pool has looked at it: its lease is held, or waits.

        Raises, in this order, RequestTooLarge where it could never be admitted, TenantLimit where its tenant is over
        its own limits and nothing lower is open to it, QueueFull where its tier's queue is full, and StoreUnavailable
        where the leases cannot be reached; and before these CapacityUnknown where its engine has not reported how large
        it is. When it is canceled, nothing of the request stays in the pool.
        """
        if self._size is not None:
            await self._size.require()
        self._begin()
        is_shared = self._link.is_shared
        self._sizes.refuse_what_never_fits(ask)
        if is_shared and (refused := self._watch.refusal(ask, self._sizes.policy, self._member)) is not None:
            raise refused
        now_us, number = self.now_us(), next(self._ids)
        lease = Lease(self, number, ask, now_us, new_ticket(ask, number, now_us), ask.tokens)
        if is_shared or ask.accounts or not self._enters(lease, now_us):
            await self._enter(lease, now_us)
        self._requests.places.keep_promise(lease.ask)
        return lease

    def _enters(self, lease: Lease, now_us: int) -> bool:
        """True if a request enters at once, without a call to the ledger in this process. Most find the pool idle."""
        if self._requests.waiting or (held := self._member.enter(lease.ticket, now_us)) is None:
            return False
        grant = self._requests.entered(lease, held, now_us)
        if self._has_names:
            grant = placed(grant, lease.ask, held.engine, found_by(held, self._member.mirror(now_us), now_us))
        lease.grant = grant
        return True

    async def _enter(self, lease: Lease, now_us: int) -> None:
        """Returns when the ledger has looked at a new request, or cannot for now. Raises its refusal."""
        ask = lease.ask
        if ask.accounts:
            self._ask_within(lease, now_us)
            await self._looked_at(lease)
            if lease.ask is not ask:
                await self._enter(lease, self.now_us())  # its tenant is over its limits
                return
        else:
            if self._link.is_shared:
                lease.enters()
            is_busy, number = self._member.is_awaiting, self._member.number
            self._submit(lease, now_us)
            if lease.is_entering:
                # With the call that is on its way; with the one after it where one was before.
                number = self._member.number + (is_busy or not self._member.is_awaiting)
                self._watch.enters(lease, number, self._member)
                await self._looked_at(lease)
        if lease.grant is None:
            self._take_place(lease)

    async def _looked_at(self, lease: Lease) -> None:
        if self._watch.is_away:
            self._look_at_store()
        try:
            await lease.looked_at()
        except asyncio.CancelledError:
            if not lease.settle(0):
                lease.leave()
            raise

    def _submit(self, lease: Lease, now_us: int) -> None:
        """Shows a request to the ledger. One that waits takes a place, unless its queue has none at all."""
        most, others_wait = self._sizes.places(lease.tier), bool(self._requests.waiting)
        if most and others_wait:
            self._find_place(lease.ask, now_us)
        self._requests.came(lease, self._member.mode)
        self._member.submit(lease.ticket, now_us)
        self._run(now_us, MOST_ADMITTED if most != 0 and others_wait else UNBOUNDED)
        if lease.grant is None and not lease.is_over:
            if most and others_wait:
                self._requests.begins_to_wait(lease)
            elif most != 0:
                self._take_place(lease)

    def _ask_within(self, lease: Lease, now_us: int) -> None:
        """Asks the ledger about a request within its accounts' limits, by the call that shows the request."""
        ask = lease.ask
        lease.enters()
        self._requests.came(lease, self._member.mode)
        try:
            if self._sizes.places(ask.tier) and self._requests.waiting:
                self._requests.find_place(ask, now_us)
        except QueueFull as full:
            lease.full = full  # a tenant over its limits gets those first
        has_place = lease.full is None
        asked = [metered(lease.id, account, ask.counted_tokens, charges=has_place) for account in ask.accounts]
        self._unjudged[lease.id] = lease
        self._member.meter.ask(asked, lease.ticket if has_place else None, now_us)
        self._run(now_us)

    def _take_place(self, lease: Lease) -> None:
        """A request was not admitted at once: it waits if there is a place for it. Otherwise it raises QueueFull."""
        now_us = self.now_us()
        if self._requests.get(lease.id) is None or lease.id in self._requests.waiting:
            return
        if lease.full is not None:
            self._requests.ended(lease)
            raise lease.full
        try:
            self._find_place(lease.ask, now_us)
        except QueueFull:
            self._member.meter.settle(lease.id, 0, now_us, is_counted=False, was_held=False)
            self._cancel(lease, now_us)
            self._run(now_us)
            raise
        self._requests.begins_to_wait(lease)
        if outgrown := self._sizes.outgrown(lease.ask):
            self._refuse_waiting(lease, outgrown)

    def _find_place(self, ask: Ask, now_us: int) -> None:
        """Finds a place in a queue, perhaps that of another request. Raises QueueFull where there is none."""
        if (displaced := self._requests.find_place(ask, now_us)) is not None:
            self._refuse_waiting(displaced, self._requests.queue_full(displaced.ask, now_us))

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None = 0) -> None:
        """The lease, or its wait, is over. It used `used_tokens`; None where that is unknown.

        The owner resolves `outcome` with how the request had waited.
        """
        now_us, member, grant = self.now_us(), self._member, None
        if lease.ask.accounts:
            is_held, used = (True, used_tokens) if lease.grant is not None else (False, 0)
            is_counted = lease.is_counted and (is_held or self._paused is None)
            member.meter.settle(lease.id, used, now_us, is_counted=is_counted, was_held=is_held)
        if lease.held is not None:
            self._requests.ended(lease)
            member.end(lease.held, now_us)
        elif self._requests.get(lease.id) is not None:
            grant = self._requests.so_far(lease, now_us)
            self._cancel(lease, now_us)
        if not member.is_quiet:
            self._run(now_us)
        if outcome is not None:
            outcome.set_result(grant)

    def change_size(self, lease: Lease) -> None:
        """The lease holds what its ask says from now on. What it frees is decided about later in this tick."""
        self._member.resize(lease.holding, lease.ask.tokens, self.now_us())
        self._run_when_due()

    def charge_tenant(self, lease: Lease, tokens: int) -> None:
        """The lease's tenant is charged for so many tokens more, as they count; below 0: for less."""
        self._member.charge(lease.holding, tokens, self.now_us())
        self._run_when_due()

    def keep(self, lease: Lease) -> None:
        """The lease is not to be preempted any more."""
        self._member.keep(lease.holding, self.now_us())
        self._run()

    def wait_again(self, lease: Lease, *, is_overtaken: bool) -> None:
        """The lease gives its room back and waits again. The engines named in its ask are barred.

        `is_overtaken`: it was preempted; otherwise no engine has taken the request. Many come back in one tick of the
        event loop. What they free is decided about later in it, together.
        """
        now_us = self.now_us()
        self._member.hand_back(lease.holding, lease.ask.barred, now_us)
        self._requests.came_back(lease, now_us, is_overtaken=is_overtaken)
        if error := self._sizes.outgrown(lease.ask):
            self._refuse_waiting(lease, error)
        self._run_when_due()

    def rise(self, lease: Lease, tier: int) -> bool:
        """A waiting lease waits in a more important tier from now on, as if it had come to that one.

        False, and nothing changes, where it does not wait, or that tier has no place for it or could never admit it.
        """
        now_us, higher = self.now_us(), raised(lease.ask, tier, self._sizes)
        if higher is None or lease.id not in self._requests.waiting:
            return False
        try:
            self._find_place(higher, now_us)
        except QueueFull:
            return False
        self._member.cancel(lease.ticket, now_us, is_replaced=True)
        self._requests.rises(lease, higher, now_us)
        self._member.submit(lease.ticket, now_us)
        self._run(now_us)
        return True

    def prefilled(self, lease: Lease) -> None:
        """The lease's engine has prefilled its prompt."""
        held = lease.holding
        if held.sent:
            self._member.first_byte(held, self.now_us())
            self._run()

    def note_slo(self, tier: int, tenant: str, is_missed: bool) -> None:
        """A request of a tier has met its SLO or missed it, once. Nothing changes where that is not guarded."""
        self._member.note_slo(tier, tenant, is_missed=is_missed, now_us=self.now_us())
        self._run_when_due()

    def _cancel(self, lease: Lease, now_us: int) -> None:
        self._requests.ended(lease)
        self._unjudged.pop(lease.id, None)
        self._member.cancel(lease.ticket, now_us)

    def _refuse_waiting(self, lease: Lease, error: AdmissionError) -> None:
        """Refuses a request, where it still waits."""
        if self._requests.get(lease.id) is not None and lease.held is None:
            now_us = self.now_us()
            self._cancel(lease, now_us)
            self._member.meter.settle(lease.id, 0, now_us, is_counted=lease.is_counted, was_held=False)
            lease.refused(error)
            self._run_when_due()

    # -- calls to the ledger

    def _run(self, now_us: int | None = None, most_admitted: int = MOST_ADMITTED) -> None:
        """Makes the calls that are due, and tells requests what they bring. All of it is at one moment, `now_us`."""
        if self._run_at_us is not None or (self._loop is None and self._link.is_shared):
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
            if self._link.is_shared:
                self._look_at_store()
        finally:
            self._run_at_us = None
        self._run_when_due()

    def _look_at_store(self) -> None:
        self._watch.look(self._member)
        if self._watch.is_away:
            waiting = self._requests.waiting.values()
            unjudged = self._unjudged.values()
            for lease, refusal in self._watch.judged(waiting, unjudged, self._sizes.policy, self._member):
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
        """The reply to a call. The link says so, on the event loop."""
        now_us = self._moment_us()
        is_statement = self._member.mode is MemberMode.STATING
        self._member.answered(reply, now_us)
        self._note_blocked(now_us, is_blocked=bool(reply.lined))
        if self._link.is_shared:
            self._requests.served_elsewhere(self._member.elsewhere.take())
            self._tell_requests(now_us)
            self._watch.answered(reply)
            self._requests.places.replicas = max(1, reply.alive)
            if reply.config is not None or reply.drained is not None:
                self._takes_over = self._takes_over and not is_statement
                self.elsewhere.note_offers(self._member, self._offers, is_first=is_statement)
                self._drained = set(self.elsewhere.draining)
        self._run()

    def unanswered(self, why: str) -> None:
        """The call in flight has no answer, because of `why`: one line, without secrets."""
        self._watch.why = why
        self._member.unanswered(self.now_us())
        self._run()

    def woken(self, wake_up: WakeUp) -> None:
        """The ledger published something to this replica, or to all."""
        self._member.woken(wake_up, self.now_us())
        self._run()

    def _tell_requests(self, now_us: int) -> int:
        """Reports the ledger's decisions to the requests that they concern. Returns how many were admitted."""
        admitted, are_others, verdicts = 0, False, list[Judged]()
        for event in self._member.take_events():
            if isinstance(event, Entered):
                are_others |= self._admit(event, now_us)
                admitted += 1
            elif isinstance(event, Judged):
                verdicts.append(event)
            elif isinstance(event, TakeBack):
                self._requests[event.lease.ticket].chosen()
            else:
                self._refuse_waiting(self._requests[event.ticket], self._watch.other_tiers())
        for verdict in verdicts:  # a request that entered at once was not refused
            self._tell_verdict(verdict)
        if are_others:
            self._member.show_anew(now_us)
        return admitted

    def _tell_verdict(self, judged: Judged) -> None:
        number = judged.verdict.number
        if (question := self._questions.get(number)) is not None and not question.done():
            question.set_result(judged)
        if (lease := self._requests.get(number)) is None:
            return
        self._unjudged.pop(number, None)
        lease.allowance = remaining(judged)
        if judged.verdict.over is None:
            lease.waits()
            return
        self._requests.ended(lease)
        if (lower := downgraded(lease.ask, self._sizes)) is None:
            lease.refused(refusal(lease.ask, judged))
            return
        lease.ask = lower
        lease.ticket = new_ticket(lower, lease.id, lease.entered_us)
        if lease.is_entering:
            lease.waits()
            return
        try:
            self._submit(lease, self.now_us())  # it waited already: the ledger gave no verdict when it came
        except QueueFull as full:
            lease.refused(full)

    def _admit(self, entered: Entered, now_us: int) -> bool:
        """Returns whether it is of another size than it was shown with: those that are shown with it may be, too."""
        held = entered.lease
        lease = self._requests[held.ticket]
        lease.held = held
        if tokens := lease.has_grown():
            more = self._requests.has_grown(lease, tokens)
            self._member.ask_again(held, tokens, more, now_us)
            if error := self._sizes.outgrown(lease.ask):
                self._refuse_waiting(lease, error)
            return True
        level = self._member.whole_level(held.ticket, now_us)
        grant = self._requests.admitted(lease, level, now_us, entered.passed)
        if self._has_names:
            grant = placed(grant, lease.ask, held.engine, entered.found)
        return lease.granted(grant)
