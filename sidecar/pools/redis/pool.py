"""The pool that many replicas share.

The store decides who is admitted; this replica's own memory says what it runs. So whatever goes wrong between the two
(a lost answer, a new server, an empty one, a sweep) has one remedy, the sync: the replica states everything that it
has, under a new fence, and whatever else the store had from it is gone. While the store is away, `loss` decides.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from itertools import count

from sidecar.events import Obstacle, StoreObserver, StoreState
from sidecar.policy.model import Policy, StoreLoss
from sidecar.policy.rules import PoolRules
from sidecar.pools.dispatcher import Clock, monotonic_us
from sidecar.pools.figures import TierFigures, pool_state
from sidecar.pools.obstacles import obstacle
from sidecar.pools.places import Places
from sidecar.pools.pool import Ask, Grant, NotShared, Shared
from sidecar.pools.redis import protocol
from sidecar.pools.redis.connection import Connect, PoolRefuses, StoreError
from sidecar.pools.redis.known import Known
from sidecar.pools.redis.lease import Left, RedisLease
from sidecar.pools.redis.limited import judge
from sidecar.pools.redis.link import Link, RoundTripObserver
from sidecar.pools.redis.loss import Loss
from sidecar.pools.redis.membership import Membership
from sidecar.pools.redis.outbox import Batch, Outbox, tell
from sidecar.pools.redis.reports import Reports
from sidecar.pools.redis.standing import Standing
from sidecar.pools.redis.statement import Statement
from sidecar.pools.redis.waits import Waits, own_figures
from sidecar.pools.sizes import Sizes
from sidecar.pools.tenant_limits import downgraded


class RedisPool:
    """Leases that are shared with other processes. Use it from one event loop. `clock` is for tests.

    `observer` is told when the store is lost and when it is back, `took` how long each call to it takes, in seconds.
    `takes_over`: where the pool has another ladder of tiers, it is made anew with this policy's, once.
    """

    def __init__(
        self,
        policy: Policy,
        connect: Connect,
        clock: Clock = monotonic_us,
        observer: StoreObserver | None = None,
        *,
        took: RoundTripObserver | None = None,
        takes_over: bool = False,
    ) -> None:
        self.name = uuid.uuid4().hex[:16]
        self.standing = Standing(policy.pool, clock, observer)
        self.now_us = clock
        self._policy = policy
        self._connect = connect
        self._tier_names = tuple(tier.name for tier in policy.tiers)
        self._sizes = Sizes(policy)
        self._rules_are_new = True
        self._membership = Membership(policy.pool, self._tier_names, clock, takes_over=takes_over)
        self._places = Places(self._sizes, len(policy.tiers))
        self._ids = count(1)
        self._leases: dict[int, RedisLease] = {}
        self._outbox = Outbox()
        self._unsaid_ends = 0
        self._known = Known()
        self._told_last = Statement()
        self._stated_rules = self._sizes.rules
        self._fences = count(1)  # never one twice: a call of an older connection may still be on its way
        self._link: Link | None = None
        self._took = took
        self._reports: Reports | None = None
        self._loss: Loss | None = None
        self._last: protocol.Reply | None = None
        self._tiers = [protocol.TierReply(0, 0, 0, 0, 0, 0, 0)] * len(policy.tiers)
        self._waits = Waits(self._tier_names)

    # -- the pool's contract

    async def open(self) -> None:
        """See `Pool.open`. Returns when the store has answered, or could not be reached."""
        await self._linked().decided.wait()

    async def close(self) -> None:
        """See `Pool.close`."""
        link, self._link = self._link, None
        if link is not None and link.loop is asyncio.get_running_loop():
            if self._reports is not None:
                await self._reports.close()
            await link.close()
        self._leave_all_unsaid()
        self._start_over()

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`. All replicas that share the pool are told; the latest to say it counts."""
        self._policy = policy
        self._sizes.change_policy(policy)
        self.change_rules(policy.rules)

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`. All replicas that share the pool are told; the latest to say it counts."""
        self._sizes.change_rules(rules)
        self._rules_are_new = True
        for lease in [lease for lease in self._leases.values() if lease.grant is None]:
            if error := self._sizes.outgrown(lease.ask):
                self.end(lease, None)
                lease.refused(error)
        if self._loss is not None:
            self._loss.change_rules()
        if self._link is not None:
            self._link.restate()

    def hold_back(self, for_s: float) -> None:
        """See `Pool.hold_back`. It holds for all replicas that share the pool."""
        for_us = round(for_s * 1e6)
        if loss := self._deciding_loss():
            loss.hold_back(for_us)
        elif self._link is not None:
            self._outbox.hold_back(for_us)

    async def enter(self, ask: Ask) -> RedisLease:
        """See `Pool.enter`."""
        self._sizes.refuse_what_never_fits(ask)
        answered: asyncio.Future[None] = self._linked().loop.create_future()
        lease = RedisLease(self, next(self._ids), ask, self.now_us(), answered)
        if loss := self._deciding_loss():
            loss.enter(lease)
        else:
            self._leases[lease.id] = lease
            self._ask(lease, self._places.promised(ask, self._tiers[ask.tier].queued, lease.entered_us))
        try:
            await answered
        except asyncio.CancelledError:
            lease.abandon()
            raise
        return lease

    def most_tokens(self, level: int) -> int:
        """See `Pool.most_tokens`."""
        return self._sizes.limits(level)[0]

    def retry_after_s(self, tier: int) -> float:
        """See `Pool.retry_after_s`. By the whole pool's queue and drain, as the store last told them."""
        return self._places.retry_after_s(tier, self._tiers[tier].queued, self.now_us())

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`. The whole pool as this replica last heard of it: at most one heartbeat ago."""
        last = self._last
        leases, tickets = (last.leases, last.waiting) if last else (0, 0)
        whole = pool_state(self._sizes.rules, self._figures(), leases=leases, waiting=tickets)
        waiting = sum(lease.grant is None for lease in self._leases.values())
        store = {
            **self.standing.told(),
            "replica": self.name,
            "replicas": last.replicas if last else None,
            "own": {"leases": len(self._leases) - waiting, "waiting": waiting},
            "part": loss.part() if (loss := self._deciding_loss()) else None,
            "late_ends": last.late if last else 0,
            "round_trips": self.round_trips,
        }
        return {**whole, "store": store}

    def oldest(self) -> Sequence[Grant | None]:
        """See `Pool.oldest`. Overtakings in other replicas are known from the store's latest answer."""
        return self._waits.oldest(self._leases, self._tiers, self.now_us())

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`. By the store's latest answer."""
        if self._deciding_loss() is not None:
            return Obstacle.STORE, "the store is lost, and this replica's part of the pool has no room"
        return obstacle(self._sizes.rules, self._figures(), ask)

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        return self.standing.readiness()

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        return self.standing.notices()

    async def share(self, report: bytes) -> Mapping[str, Shared]:
        """See `Pool.share`."""
        if self._link is None or self.standing.state is not StoreState.SHARED:
            raise NotShared(f"the store is {self.standing.state.value}: {self.standing.reason}")
        if self._reports is None:
            self._reports = Reports(self.name, self._connect)
        return await self._reports.share(report)

    @property
    def round_trips(self) -> int:
        """Calls made to the store so far."""
        return self._link.round_trips if self._link else 0

    # -- what a lease asks for (`lease.Holder`)

    def end(self, lease: RedisLease, left: Left | None, used_tokens: int | None = 0) -> None:
        """A lease, or its wait, is over."""
        if self._leases.pop(lease.id, None) is None:
            tell(left, None)
            return
        if self._loss is not None:
            self._loss.limits.ended(lease, used_tokens)
        if loss := self._deciding_loss():
            self._unsaid_ends += 1
            tell(left, loss.left(lease) or own_figures(lease, self.now_us()))
        else:
            self._outbox.end(lease, left, used_tokens)

    def change_size(self, lease: RedisLease, freed_tokens: int) -> None:
        """A lease holds something else."""
        if loss := self._deciding_loss():
            loss.resized(lease)
        else:
            self._outbox.resize(lease, freed_tokens)

    def keep(self, lease: RedisLease, *, was_chosen: bool) -> None:
        """A lease is not to be preempted any more."""
        if loss := self._deciding_loss():
            loss.kept(lease)
        elif self._sizes.rules.tiers[lease.ask.tier].preemptible:
            self._outbox.keep(lease, is_urgent=was_chosen)

    def requeue(self, lease: RedisLease) -> None:
        """A lease gives its room back and waits again."""
        if error := self._sizes.outgrown(lease.ask):
            self.end(lease, None)
            lease.waits_again()
            lease.refused(error)
            return
        lease.waits_again()
        if loss := self._deciding_loss():
            loss.requeued(lease)
        else:
            self._outbox.requeue(lease, self.now_us() - lease.entered_us)

    # -- what the link tells (`link.Replica`)

    def statement(self) -> tuple[Sequence[protocol.Argument], Statement]:
        """Everything that this replica has. Operations that were not sent are part of it."""
        self._leave_all_unsaid()
        if self._loss is not None:
            self._loss.pause()
        told = self._told_last = Statement(self._leases.values())
        self._known.state(told.held_tokens, told.held_requests)
        self._stated_rules = self._sizes.rules
        knew = self._last.expected if self._last else 0
        brings = self._membership.brings(are_rules_new=self._rules_are_new)
        text = protocol.rules_text(self._policy, self._sizes.rules)
        header: list[protocol.Argument] = [knew, text, brings, self._unsaid_ends]
        self._unsaid_ends = 0
        return header, told

    def synced(self, reply: protocol.Reply, batch: Batch) -> None:
        """The store decides again."""
        self._membership.accepted()
        self._end_loss()
        told = self._told_last
        self._rules_are_new = self._stated_rules is not self._sizes.rules  # they may have changed since
        self.standing.change(StoreState.SHARED, f"{len(self._leases)} leases and tickets of this replica")
        self.answered(reply, batch)
        for lease in [lease for lease in told.unjudged if not lease.is_over]:
            self._ask(lease)

    def answered(self, reply: protocol.Reply, batch: Batch) -> None:
        """Does what the store says."""
        now_us = self.now_us()
        self._last = reply
        self._known.hear(reply)
        self._places.replicas = max(1, reply.replicas)
        self._known.hold(-batch.freed_tokens, -batch.freed_requests)
        for level, figures in reply.tiers:
            admitted, self._tiers[level] = figures.admitted - self._tiers[level].admitted, figures
            if admitted > 0:
                self._places.admitted(level, now_us, admitted)
        for verdict in reply.verdicts:
            self._judged(verdict)
        self._told(protocol.Lines(reply.grants, reply.victims, reply.displaced), now_us)
        for lease_id in reply.refused:
            self._refuse_a_place(lease_id, now_us)
        for lease_id, wait in reply.ended:
            if lease_id in batch.leaving:
                lease, left = batch.leaving[lease_id]
                tell(left, self._waits.grant(lease, wait, now_us))
        self._waits.note(reply.latest_age_us, self._leases, now_us)
        for lease in batch.entering:
            lease.served_before = tuple(tier.served for tier in self._tiers)
            if lease.id in self._leases:
                self._places.taken(lease.ask)
            lease.waits()
        batch.tell_who_left(lambda lease: own_figures(lease, self.now_us()))
        self._outbox.wake_after(reply.change_after_us)

    def unanswered(self, batch: Batch) -> None:
        """What was said may have been heard or not; where it was, others may hold by now what it gave back."""
        self._known.hold(-batch.freed_tokens, -batch.freed_requests)
        self._leave_unsaid(batch)

    def heard(self, message: bytes) -> None:
        """What other replicas' calls gave or took; while this process decides, the next sync brings grants again."""
        if self._deciding_loss() is not None:
            return
        self._told(protocol.read_lines(message.splitlines()), self.now_us())

    def lost(self, error: StoreError) -> None:
        """From now on, and after every sync that failed, this process decides."""
        membership, reason = self._membership, str(error)
        if isinstance(error, PoolRefuses):
            if not membership.is_refused:
                self._end_loss()  # its replicas have the whole engine: no part of it is this one's
            membership.refused(error)
            reason = membership.why
        is_refused = membership.is_refused
        is_divided = not is_refused and self._last is not None and self._policy.on_store_loss is StoreLoss.DIVIDE
        state = StoreState.DIVIDED if is_divided else StoreState.CLOSED
        self.standing.change(state, reason, is_refused=is_refused)
        self._leave_all_unsaid()
        self._outbox.wake_after(None)
        known = None if is_refused else self._known.at_loss()
        if self._loss is None:
            self._loss = Loss(self._policy, self._sizes, self._leases, known, self.now_us, is_refused=is_refused)
        if self._loss.is_paused:
            self._loss.begin(known)

    def _end_loss(self) -> None:
        if self._loss is not None:
            self._loss.end()
            self._loss = None

    def _deciding_loss(self) -> Loss | None:
        """The loss, where it decides. While a sync is on its way what happens is collected for the store."""
        return None if self._loss is None or self._loss.is_paused else self._loss

    def _ask(self, lease: RedisLease, promised: int | None = None) -> None:
        """Asks the store to admit a request, over its tenant's limits at the lower tier, where that ever could."""
        lower = None if lease.ask.limits is None else downgraded(lease.ask, self._sizes)
        self._outbox.enter(lease, None if lower is None else lower.tier, promised)

    def _judged(self, verdict: protocol.LimitVerdict) -> None:
        lease = self._leases.get(verdict.lease_id)
        if lease is not None and (error := judge(lease, verdict)):
            del self._leases[lease.id]
            lease.refused(error)

    # -- grants, time, the link

    def _told(self, lines: protocol.Lines, now_us: int) -> None:
        for lease_id, wait in lines.grants:
            lease = self._leases.get(lease_id)
            preemptions = wait.preemptions if wait else 0  # else it is an earlier grant, heard of late
            if lease is not None and lease.grant is None and preemptions == lease.preemptions:
                self._known.hold(lease.ask.tokens, lease.ask.requests)
                lease.granted(self._waits.grant(lease, wait, now_us))
        for lease_id, preemptions in lines.victims:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.chosen(preemptions)
        for lease_id in lines.displaced:
            self._refuse_a_place(lease_id, now_us)

    def _refuse_a_place(self, lease_id: int, now_us: int) -> None:
        """The queue had no place for a request, or has none any more."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.grant is None:  # else it is an earlier line, heard of late
            del self._leases[lease_id]
            lease.refused(self._places.queue_full(lease.ask, self._tiers[lease.ask.tier].queued, now_us))

    def _figures(self) -> Sequence[TierFigures]:
        return [TierFigures(*tier[:4]) for tier in self._tiers]

    def _leave_unsaid(self, batch: Batch) -> None:
        """Whoever left is told what is known here."""
        self._unsaid_ends += batch.ends
        batch.tell_who_left(lambda lease: own_figures(lease, self.now_us()))

    def _leave_all_unsaid(self) -> None:
        for batch in self._outbox.take_all():
            self._leave_unsaid(batch)

    def _start_over(self) -> None:
        """Nothing is left of an event loop that has ended, or of a link that was closed."""
        self._outbox.wake_after(None)
        self._leases.clear()
        self._reports = None
        self._end_loss()

    def _linked(self) -> Link:
        """The link; it is made at the first request where no start was seen, and again where the loop is another."""
        loop = asyncio.get_running_loop()
        if self._link is None or self._link.loop is not loop:
            self._start_over()
            channel = protocol.grants_channel(self._policy.pool, self.name)
            self._outbox = Outbox()
            self._link = Link(self, self._connect, channel, self._outbox, self._fences, took=self._took)
        return self._link
