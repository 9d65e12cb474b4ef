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
from sidecar.policy.policy import Policy, StoreLoss
from sidecar.policy.rules import PoolRules
from sidecar.pools.dispatcher import Clock, monotonic_us
from sidecar.pools.figures import TierFigures, pool_state, served_by_name
from sidecar.pools.obstacles import obstacle
from sidecar.pools.places import Places
from sidecar.pools.pool import Ask, Grant, NotShared, Shared
from sidecar.pools.redis import script
from sidecar.pools.redis.alone import LastKnown
from sidecar.pools.redis.connection import Connect, StoreError
from sidecar.pools.redis.lease import Left, RedisLease
from sidecar.pools.redis.limited import judge
from sidecar.pools.redis.link import Link, RoundTripObserver
from sidecar.pools.redis.loss import Loss
from sidecar.pools.redis.outbox import Batch, Outbox, tell
from sidecar.pools.redis.reports import Reports
from sidecar.pools.redis.standing import Standing
from sidecar.pools.redis.waits import Waits
from sidecar.pools.sizes import Sizes
from sidecar.pools.tenant_limits import downgraded


class RedisPool:
    """Leases that are shared with other processes. Use it from one event loop. `clock` is for tests.

    `observer` is told when the store is lost and when it is back, `took` how long each call to it takes, in seconds.
    """

    def __init__(
        self,
        policy: Policy,
        connect: Connect,
        clock: Clock = monotonic_us,
        observer: StoreObserver | None = None,
        *,
        took: RoundTripObserver | None = None,
    ) -> None:
        self.name = uuid.uuid4().hex[:16]
        self.standing = Standing(policy.pool, clock, observer)
        self.now_us = clock
        self._policy = policy
        self._connect = connect
        self._tier_names = tuple(tier.name for tier in policy.tiers)
        self._sizes = Sizes(policy)
        self._rules_are_new = True
        self._places = Places(self._sizes, len(policy.tiers))
        self._ids = count(1)
        self._leases: dict[int, RedisLease] = {}
        self._unjudged: list[RedisLease] = []  # with limits, and not yet known to the store when it was told the rest
        self._outbox = Outbox()
        self._unsaid_ends = 0
        self._held_tokens = 0  # by this replica, as the store has it: what ended is held there until it is said
        self._held_requests = 0
        self._stated = (0, 0)  # the same, as the latest statement says it
        self._stated_rules = self._sizes.rules
        self._fences = count(1)  # never one twice: a call of an older connection may still be on its way
        self._link: Link | None = None
        self._took = took
        self._reports: Reports | None = None
        self._loss: Loss | None = None
        self._last: script.Reply | None = None
        self._tiers = [script.TierReply(0, 0, 0, 0, 0, 0, 0)] * len(policy.tiers)
        self._waits = Waits(self._tier_names)
        self._change_timer: asyncio.TimerHandle | None = None

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
            self._places.refuse_what_is_promised(ask, self._tiers[ask.tier].queued, lease.entered_us)
            self._leases[lease.id] = lease
            self._ask(lease)
        try:
            await answered
        except asyncio.CancelledError:
            lease.abandon()
            raise
        return lease

    def retry_after_s(self, tier: int) -> float:
        """See `Pool.retry_after_s`. By the whole pool's queue and drain, as the store last told them."""
        return self._places.retry_after_s(tier, self._tiers[tier].queued, self.now_us())

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`. The whole pool as this replica last heard of it: at most one heartbeat ago."""
        last = self._last
        leases, tickets = (last.leases, last.waiting) if last else (0, 0)
        whole = pool_state(self._sizes.rules, self._figures(), leases=leases, waiting=tickets)
        waiting = sum(lease.grant is None for lease in self._leases.values())
        own = {"leases": len(self._leases) - waiting, "waiting": waiting}
        store = {
            "state": self.standing.state.value,
            "since_s": round(self.standing.since_s, 3),
            "reason": self.standing.reason,
            "pool": self._policy.pool,
            "replica": self.name,
            "replicas": last.replicas if last else None,
            "own": own,
            "part": self._loss.part() if self._loss else None,
            "late_ends": last.late if last else 0,
            "round_trips": self.round_trips,
        }
        return {**whole, "store": store}

    def oldest(self) -> Sequence[Grant | None]:
        """See `Pool.oldest`. Overtakings in other replicas are known from the store's latest answer."""
        now_us = self.now_us()
        found: list[Grant | None] = [None] * len(self._tier_names)
        for lease in self._leases.values():
            tier = lease.ask.tier
            if lease.grant is None and found[tier] is None:
                found[tier] = self._waits.so_far(lease, self._tiers, now_us)
        return found

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`. By the store's latest answer."""
        if self._deciding_loss() is not None:
            return Obstacle.STORE, "the store is lost, and this replica's part of the pool has no room"
        return obstacle(self._sizes.rules, self._figures(), ask)

    def readiness(self) -> Sequence[str]:
        """See `Pool.readiness`."""
        if self.standing.state is StoreState.CLOSED:
            return (f"store lost, requests are refused: {self.standing.reason}",)
        return ("store not reached yet",) if self.standing.state is StoreState.CONNECTING else ()

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        if self.standing.state is not StoreState.DIVIDED:
            return ()
        return (f"store lost, this replica admits to its part of the pool: {self.standing.reason}",)

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
            tell(left, loss.left(lease) or self._own_figures(lease))
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

    def statement(self) -> tuple[Sequence[script.Argument], Batch]:
        """Everything that this replica has. Operations that were not sent are part of it."""
        self._leave_unsaid(self._outbox.take())
        if self._loss is not None:
            self._loss.pause()
        now_us = self.now_us()
        leases: list[RedisLease] = []
        self._unjudged = []
        for lease in self._leases.values():
            is_judged = lease.ask.limits is None or not lease.is_entering
            (leases if is_judged else self._unjudged).append(lease)
        held = [lease.ask for lease in leases if lease.grant is not None]
        self._stated = sum(ask.tokens for ask in held), sum(ask.requests for ask in held)
        rules = script.rules_text(self._policy, self._sizes.rules)
        # New rules replace those in the store; others are brought to an empty store alone.
        arguments: list[script.Argument] = [self._last.replicas if self._last else 0, rules]
        arguments += [int(self._rules_are_new), self._unsaid_ends]
        self._stated_rules = self._sizes.rules
        for lease in leases:
            waited_us = None if lease.grant else now_us - lease.entered_us
            arguments += script.statement(lease.id, lease.ask, waited_us, lease.preemptions)
            if lease.ask.limits is not None:
                arguments += (script.COUNTED, lease.id, lease.ask.tenant)
        for lease in self._unjudged:
            arguments += (script.UNTOLD, lease.id)
        self._unsaid_ends = 0
        return arguments, Batch(entering=[lease for lease in leases if lease.is_entering])

    def synced(self, reply: script.Reply, batch: Batch) -> None:
        """The store decides again."""
        if self._loss is not None:
            self._loss.end()
            self._loss = None
        self._held_tokens, self._held_requests = self._stated
        self._rules_are_new = self._stated_rules is not self._sizes.rules  # they may have changed since
        self.standing.change(StoreState.SHARED, f"{len(self._leases)} leases and tickets of this replica")
        self.answered(reply, batch)
        for lease in [lease for lease in self._unjudged if not lease.is_over]:
            self._ask(lease)

    def answered(self, reply: script.Reply, batch: Batch) -> None:
        """Does what the store says."""
        now_us = self.now_us()
        self._last = reply
        self._places.replicas = max(1, reply.replicas)
        self._hold(-batch.freed_tokens, -batch.freed_requests)
        for level, figures in reply.tiers:
            admitted, self._tiers[level] = figures.admitted - self._tiers[level].admitted, figures
            if admitted > 0:
                self._places.admitted(level, now_us, admitted)
        for verdict in reply.verdicts:
            self._judged(verdict)
        self._told(script.Lines(reply.grants, reply.victims), now_us)
        for lease_id in reply.refused:
            refused = self._leases.pop(lease_id, None)
            if refused is not None:
                refused.refused(self._places.queue_full(refused.ask, self._tiers[refused.ask.tier].queued, now_us))
        for lease_id, wait in reply.ended:
            if lease_id in batch.leaving:
                lease, left = batch.leaving[lease_id]
                tell(left, self._grant(lease, wait, now_us))
        self._waits.note(reply.latest_age_us, self._leases, now_us)
        for lease in batch.entering:
            lease.served_before = tuple(tier.served for tier in self._tiers)
            if lease.id in self._leases:
                self._places.taken(lease.ask)
            lease.waits()
        batch.tell_who_left(self._own_figures)
        self._call_in_time(reply.change_after_us)

    def unanswered(self, batch: Batch) -> None:
        """What was said may have been heard or not; where it was, others may hold by now what it gave back."""
        self._hold(-batch.freed_tokens, -batch.freed_requests)
        self._leave_unsaid(batch)

    def heard(self, message: bytes) -> None:
        """What other replicas' calls gave or took; while this process decides, the next sync brings grants again."""
        if self._deciding_loss() is not None:
            return
        self._told(script.read_lines(message.splitlines()), self.now_us())

    def lost(self, error: StoreError) -> None:
        """From now on, and after every sync that failed, this process decides."""
        is_divided = self._last is not None and self._policy.on_store_loss is StoreLoss.DIVIDE
        self.standing.change(StoreState.DIVIDED if is_divided else StoreState.CLOSED, str(error))
        self._leave_unsaid(self._outbox.take())
        self._forget_the_time()
        if self._loss is None:
            self._loss = Loss(self._policy, self._sizes, self._leases, self._last_known(), self.now_us)
        if self._loss.is_paused:
            self._loss.begin()

    def _last_known(self) -> LastKnown | None:
        last = self._last
        if last is None:
            return None
        own = self._held_tokens, self._held_requests
        return LastKnown(max(1, last.replicas), last.held_tokens, last.held_requests, *own)

    def _deciding_loss(self) -> Loss | None:
        """The loss, where it decides. While a sync is on its way what happens is collected for the store."""
        return None if self._loss is None or self._loss.is_paused else self._loss

    # -- tenants' limits

    def _ask(self, lease: RedisLease) -> None:
        """Asks the store to admit a request, over its tenant's limits at the lower tier, where that ever could."""
        lower = None if lease.ask.limits is None else downgraded(lease.ask, self._sizes)
        self._outbox.enter(lease, None if lower is None else lower.tier)

    def _judged(self, verdict: script.Verdict) -> None:
        lease = self._leases.get(verdict.lease_id)
        if lease is not None and (error := judge(lease, verdict)):
            del self._leases[lease.id]
            lease.refused(error)

    # -- grants, time, the link

    def _told(self, lines: script.Lines, now_us: int) -> None:
        for lease_id, wait in lines.grants:
            self._granted(lease_id, wait, now_us)
        for lease_id, preemptions in lines.victims:
            if lease := self._leases.get(lease_id):
                lease.chosen(preemptions)

    def _granted(self, lease_id: int, wait: script.WaitReply | None, now_us: int) -> None:
        lease = self._leases.get(lease_id)
        preemptions = 0 if wait is None else wait.preemptions
        if lease is not None and lease.grant is None and preemptions == lease.preemptions:
            self._hold(lease.ask.tokens, lease.ask.requests)
            lease.granted(self._grant(lease, wait, now_us))

    def _grant(self, lease: RedisLease, wait: script.WaitReply | None, now_us: int) -> Grant:
        """The store's figures on this process's clock: the wait ends when it is heard of."""
        if wait is None:
            return Grant(now_us, 0, 0, None, {}, lease.ask.tier)
        ahead = served_by_name(self._tier_names, wait.served_ahead) if wait.wait_us > 0 else {}
        overtaken_at_us = None if wait.starved_us is None else now_us - wait.starved_us
        level = lease.ask.tier if wait.level is None else wait.level
        passed = {self._tier_names[tier]: rule.value for tier, rule in wait.passed}
        return Grant(now_us, wait.wait_us, wait.starved_us or 0, overtaken_at_us, ahead, level, passed)

    def _figures(self) -> Sequence[TierFigures]:
        return [TierFigures(*tier[:4]) for tier in self._tiers]

    def _hold(self, tokens: int, requests: int) -> None:
        self._held_tokens += tokens
        self._held_requests += requests

    def _leave_unsaid(self, batch: Batch) -> None:
        """Whoever left is told what is known here."""
        self._unsaid_ends += batch.ends
        batch.tell_who_left(self._own_figures)

    def _own_figures(self, lease: RedisLease) -> Grant:
        """How a wait went as far as this process knows."""
        now_us = self.now_us()
        return Grant(now_us, now_us - lease.entered_us, 0, None, {}, lease.ask.tier)

    def _call_in_time(self, change_after_us: int | None) -> None:
        """Sees to it that the store decides again when time alone may have changed who is next."""
        self._forget_the_time()
        if change_after_us is not None:
            loop = asyncio.get_running_loop()
            self._change_timer = loop.call_later(change_after_us / 1e6, self._outbox.wake)

    def _forget_the_time(self) -> None:
        if self._change_timer is not None:
            self._change_timer.cancel()
            self._change_timer = None

    def _start_over(self) -> None:
        """Nothing is left of an event loop that has ended, or of a link that was closed."""
        self._forget_the_time()
        self._leases.clear()
        self._reports = None
        if self._loss is not None:
            self._loss.end()
            self._loss = None

    def _linked(self) -> Link:
        """The link; it is made at the first request where no start was seen, and again where the loop is another."""
        loop = asyncio.get_running_loop()
        if self._link is None or self._link.loop is not loop:
            self._start_over()
            channel = script.grants_channel(self._policy.pool, self.name)
            self._outbox = Outbox()
            self._link = Link(self, self._connect, channel, self._outbox, self._fences, took=self._took)
        return self._link
