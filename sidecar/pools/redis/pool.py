"""The pool that many replicas share.

The store decides which requests are admitted; this replica's own memory says what it runs. After any disagreement of
the two (a lost answer, a new server, an empty one, a removed replica) there is one remedy, the resync: the replica
states everything that it has, under a new fence, and the store drops whatever else it had from it. While the store is
away, `outage` decides.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec

from sidecar.errors import AdmissionError, RemainingLimit, RemainingLimits
from sidecar.events import Obstacle, StoreObserver, StoreState
from sidecar.policy.model import Limits, Policy, StoreLoss
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import (
    Ask,
    Grant,
    Lease,
    Merge,
    NotShared,
    PeerReports,
    QueueMark,
    QueueStanding,
    TenantUse,
    WaitOutcome,
    new_lease,
    use_of,
)
from sidecar.pools.clock import Clock, monotonic_us
from sidecar.pools.limits import downgraded, tenant_limit
from sidecar.pools.outgrown import OutgrownRequests
from sidecar.pools.queue_places import QueuePlaces
from sidecar.pools.redis import protocol
from sidecar.pools.redis.batch import Batch, BatchQueue, operations_in_line, resolve
from sidecar.pools.redis.connection import Connect, PoolRefuses, StoreError
from sidecar.pools.redis.gossip import Gossip
from sidecar.pools.redis.outage import Outage
from sidecar.pools.redis.partition import LastKnown, Partition
from sidecar.pools.redis.resync import KnownUsage, Membership, Statement
from sidecar.pools.redis.session import RoundTripObserver, StoreSession
from sidecar.pools.stats import TierUsage, no_room, obstacle, part_in_words, pool_state, served_by_name, usage_of
from sidecar.pools.store_status import StoreStatus
from sidecar.scheduling.overtaking import Overtaking
from sidecar.scheduling.rate_limit import stored_allowance


class RedisPool:
    """Leases that are shared with other processes. Use it from one event loop. `clock` is for tests.

    `observer` is called when the store is lost and when it is back, `took` with how long each call to it takes, in
    seconds. `takes_over`: where the pool has other tiers, it is made anew with this policy's, once.
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
        self.status = StoreStatus(policy.pool, clock, observer)
        self.now_us = clock
        self._connect = connect
        self._tier_names = tuple(tier.name for tier in policy.tiers)
        self._sizes = SizeLimits(policy)
        self._rules_are_new = True
        self._membership = Membership(policy.pool, self._tier_names, clock, takes_over=takes_over)
        self._places = QueuePlaces(self._sizes, len(policy.tiers))
        self._ids = count(1)
        self._leases: dict[int, Lease] = {}
        self._outgrown = OutgrownRequests(self._sizes, self._refuse_waiting)
        self._batches = self._new_batches()
        self._unsent_ends = 0
        self._known = KnownUsage()
        self._statement = Statement((), clock)
        self._stated_rules = self._sizes.rules
        self._fences = count(1)  # never one twice: a call of an older connection may still be on its way
        self._session: StoreSession | None = None
        self._took = took
        self._gossip: Gossip | None = None
        self._outage: Outage | None = None
        self._last: protocol.Reply | None = None
        self._tiers = [protocol.TierReply(0, 0, 0, 0, 0, 0, 0)] * len(policy.tiers)
        self._overtaking = Overtaking()
        self._paused: str | None = None
        self.most_tokens, self.most_requests = self._sizes.most_tokens, self._sizes.most_requests
        self.readiness = self.status.readiness

    # -- the pool's contract

    async def open(self) -> None:
        """See `Pool.open`. Returns when the store has answered, or could not be reached."""
        await self._connected().decided.wait()

    async def close(self) -> None:
        """See `Pool.close`."""
        session, self._session = self._session, None
        if session is not None and session.loop is asyncio.get_running_loop():
            if self._gossip is not None:
                await self._gossip.close()
            await session.close()
        self._drop_unsent()
        self._start_over()

    def change_policy(self, policy: Policy) -> None:
        """See `Pool.change_policy`. It reaches all replicas that share the pool; the latest change counts."""
        self._sizes.policy = policy
        self.change_rules(policy.rules)

    def change_rules(self, rules: PoolRules) -> None:
        """See `Pool.change_rules`. It reaches all replicas that share the pool; the latest change counts."""
        self._sizes.change_rules(rules)
        self._rules_are_new = True
        self._outgrown.look(self._leases.values())
        if self._outage is not None:
            self._outage.change_rules()
        if self._session is not None:
            self._session.restate()

    def hold_back(self, for_s: float) -> None:
        """See `Pool.hold_back`. It holds for all replicas that share the pool."""
        for_us = round(for_s * 1e6)
        if self._partition is not None:
            self._partition.hold_back(for_us)
        elif self._session is not None:
            self._batches.hold_back(for_us)

    def pause(self, reason: str | None) -> None:
        """See `Pool.pause`. The store admits no request of this replica, and goes on with those of the others."""
        was_cut_off, self._paused = self._is_cut_off, reason
        self._turned(was_cut_off=was_cut_off)

    async def enter(self, ask: Ask) -> Lease:
        """See `Pool.enter`."""
        self._sizes.refuse_what_never_fits(ask)
        answered: asyncio.Future[None] = self._connected().loop.create_future()
        lease = new_lease(self, next(self._ids), ask, self.now_us(), answered)
        if self._outage is not None and self._partition is not None:
            self._outage.enter(lease)
        else:
            self._leases[lease.id] = lease
            self._ask(lease, self._places.promised(ask, self._tiers[ask.tier].queued, lease.entered_us))
        try:
            await answered
        except asyncio.CancelledError:
            if not lease.settle(0):
                lease.leave()
            raise
        return lease

    def retry_after_s(self, tier: int) -> float:
        """See `Pool.retry_after_s`. By the whole pool's queue and drain, as of the store's latest answer."""
        return self._places.retry_after_s(tier, self._tiers[tier].queued, self.now_us())

    def mark(self, tier: int) -> QueueMark:
        """See `Pool.mark`. As of the store's latest answer."""
        return self._places.mark(tier, self._queued(tier))

    def standing(self, tier: int, mark: QueueMark) -> QueueStanding:
        """See `Pool.standing`. As of the store's latest answer: at most one heartbeat ago."""
        return self._places.standing(tier, mark, self._queued, self.now_us())

    def use_of(self, tenant: str) -> TenantUse:
        """See `Pool.use_of`."""
        return use_of(self._leases.values(), tenant)

    async def allowance(self, tenant: str, limits: Limits) -> RemainingLimits | None:
        """See `Pool.allowance`. Not known while the store does not decide."""
        if self._session is None or self.status.state is not StoreState.SHARED:
            return None
        try:
            figures, now_us = await self._gossiping().account(tenant)
        except NotShared:
            return None
        return stored_allowance(figures, limits, now_us)

    def _queued(self, tier: int) -> int:
        return self._tiers[tier].queued

    def state(self) -> Mapping[str, object]:
        """See `Pool.state`. The whole pool as of the store's latest answer: at most one heartbeat ago.

        While the store does not decide, it is this replica's part of the pool, with its own requests, as it is now.
        """
        last = self._last
        waiting = sum(lease.grant is None for lease in self._leases.values())
        own = {"leases": len(self._leases) - waiting, "waiting": waiting}
        counts = {"leases": last.leases, "waiting": last.waiting} if self._is_shared and last else own
        store = {
            **self.status.state_for_people(),
            "replica": self.name,
            "replicas": last.replicas if last else None,
            "own": own,
            "part": self._outage.part() if self._outage is not None and self._partition is not None else None,
            "late_ends": last.late if last else 0,
            "round_trips": self.round_trips,
        }
        return {**pool_state(self._rules(), self._usage(), **counts), "store": store}

    def notices(self) -> Sequence[str]:
        """See `Pool.notices`."""
        return self.status.notices(part_in_words(self._rules(), self._sizes.rules))

    def oldest(self) -> Sequence[Grant | None]:
        """See `Pool.oldest`. Overtakings in other replicas are known from the store's latest answer."""
        found: list[Grant | None] = [None] * len(self._tier_names)
        for lease in self._leases.values():
            if lease.grant is None and found[lease.tier] is None:
                found[lease.tier] = self._wait_so_far(lease)
        if self._partition is None:
            return found
        # The part's scheduler knows who was overtaken since the store was lost. It does not have every request.
        return [_longer(theirs, ours) for ours, theirs in zip(found, self._partition.oldest(), strict=True)]

    def obstacle(self, ask: Ask) -> tuple[Obstacle, str]:
        """See `Pool.obstacle`. By the store's latest answer."""
        if self._paused is not None:
            return Obstacle.ENGINE, self._paused
        if self._partition is not None:
            found = no_room(self._rules(), self._usage(), ask)
            figures = "" if found is None else f": {found}"
            return Obstacle.STORE, f"the store is lost, and this replica's part of the pool has no room{figures}"
        return obstacle(self._sizes.rules, self._usage(), ask)

    async def share(self, report: bytes, merge: Merge) -> PeerReports:
        """See `Pool.share`."""
        if self._session is None or self.status.state is not StoreState.SHARED:
            raise NotShared(f"the store is {self.status.state.value}: {self.status.reason}")
        return await self._gossiping().share(report, merge)

    def _gossiping(self) -> Gossip:
        if self._gossip is None:
            self._gossip = Gossip(self.name, self._connect)
        return self._gossip

    @property
    def round_trips(self) -> int:
        """Calls made to the store so far."""
        return self._session.round_trips if self._session else 0

    # -- what a lease asks for (`runtime.LeaseOwner`)

    def end(self, lease: Lease, outcome: WaitOutcome | None, used_tokens: int | None = 0) -> None:
        """See `LeaseOwner.end`."""
        if self._leases.pop(lease.id, None) is None:
            resolve(outcome, None)
            return
        lease.is_counted &= lease.grant is not None or self._paused is None
        if self._outage is not None:
            self._outage.limits.ended(lease, used_tokens, self.now_us())
        if self._partition is not None:
            self._unsent_ends += 1
            resolve(outcome, self._partition.end(lease, self.now_us()) or self._own_figures(lease))
        else:
            self._batches.end(lease, outcome, used_tokens)

    def change_size(self, lease: Lease, freed_tokens: int) -> None:
        """See `LeaseOwner.change_size`. The store hears of it with the next call: see `batch`."""
        if self._partition is not None:
            self._partition.resize(lease, freed_tokens)
        else:
            self._batches.resize(lease, freed_tokens, is_awaited=self._last is not None and self._last.waiting > 0)

    def charge_tenant(self, lease: Lease, tokens: int) -> None:
        """See `LeaseOwner.charge_tenant`. A lost store forgets it, as it does all tags."""
        if self._partition is not None:
            self._partition.charge(lease, tokens)
        else:
            self._batches.charge(lease, tokens)

    def keep(self, lease: Lease, *, was_chosen: bool) -> None:
        """See `LeaseOwner.keep`."""
        if self._partition is not None:
            self._partition.keep(lease)
        elif self._sizes.rules.tiers[lease.tier].preemptible:
            self._batches.keep(lease, is_urgent=was_chosen)

    def requeue(self, lease: Lease) -> None:
        """See `LeaseOwner.requeue`."""
        self._wait_again(lease, is_handed_back=False)

    def prefilled(self, lease: Lease) -> None:
        """See `LeaseOwner.prefilled`. Prompts are counted for each of several engines only."""

    def hand_back(self, lease: Lease) -> None:
        """See `LeaseOwner.hand_back`. Without the store, the same as `requeue`."""
        self._wait_again(lease, is_handed_back=self._outage is None)

    def _wait_again(self, lease: Lease, *, is_handed_back: bool) -> None:
        if error := self._sizes.outgrown(lease.ask):
            self.end(lease, None)
            lease.waits_again()
            lease.refused(error)
            return
        lease.waits_again()
        if self._outage is not None and self._partition is not None:
            self._outage.requeued(lease)
        else:
            self._batches.requeue(lease, self.now_us() - lease.entered_us, is_handed_back=is_handed_back)

    # -- what happens to the session (`session.SessionOwner`)

    def statement(self) -> tuple[Sequence[protocol.Argument], Statement]:
        """See `SessionOwner.statement`. Operations that were not sent are part of it."""
        self._drop_unsent()
        if self._outage is not None:
            self._outage.suspend()
        self._statement = self._new_statement()
        self._known.state(self._statement)
        self._stated_rules = self._sizes.rules
        knew = self._last.expected if self._last else 0
        brings = self._membership.brings(are_rules_new=self._rules_are_new)
        header: list[protocol.Argument] = [knew, self._rules_text(), brings, self._unsent_ends]
        self._unsent_ends = 0
        return header, self._statement

    def synced(self, reply: protocol.Reply, batch: Batch) -> None:
        """See `SessionOwner.synced`. The store decides again."""
        self._membership.accepted()
        self._end_outage()
        if self._statement.is_cut_off != self._is_cut_off:
            self._tell_whether_cut_off()
        unjudged = self._statement.unjudged
        self._rules_are_new = self._stated_rules is not self._sizes.rules  # they may have changed since
        self.status.change(StoreState.SHARED, f"{len(self._leases)} requests of this replica")
        self.answered(reply, batch)
        for lease in [lease for lease in unjudged if not lease.is_over]:
            self._ask(lease)

    def answered(self, reply: protocol.Reply, batch: Batch) -> None:
        """See `SessionOwner.answered`."""
        self._last, now_us = reply, self.now_us()
        self._known.hear(reply)
        self._places.replicas = max(1, reply.replicas)
        self._known.hold(-batch.freed_tokens, -batch.freed_requests)
        for level, figures in reply.tiers:
            admitted, self._tiers[level] = figures.admitted - self._tiers[level].admitted, figures
            if admitted > 0:
                self._places.admitted(level, now_us, admitted)
        for verdict in reply.verdicts:
            self._apply_verdict(verdict)
        self._apply(reply, now_us)
        for lease_id in reply.refused:
            self._refuse_a_place(lease_id, now_us)
        for lease_id, wait in reply.ended:
            if lease_id in batch.leaving:
                lease, outcome = batch.leaving[lease_id]
                resolve(outcome, self._grant(lease, wait, now_us))
        self._note_overtaking(reply.latest_age_us, now_us)
        served = [tier.served for tier in self._tiers]
        for lease in batch.entering:
            lease.served_before = served
            if lease.id in self._leases:
                self._places.taken(lease.ask)
            lease.waits()
        batch.resolve_leaving(self._own_figures)
        self._batches.wake_after(reply.change_after_us)
        self._batches.note_line(reply.waiting)

    def unanswered(self, batch: Batch) -> None:
        """See `SessionOwner.unanswered`. If the store heard it, others may hold what this replica gave back."""
        self._known.hold(-batch.freed_tokens, -batch.freed_requests)
        self._drop(batch)

    def heard(self, message: bytes) -> None:
        """See `SessionOwner.heard`. While this process decides, it is left to the next resync."""
        if self._partition is None:
            self._apply(protocol.read_lines(message.splitlines()), self.now_us())

    def lost(self, error: StoreError) -> None:
        """See `SessionOwner.lost`. From now on, and after every resync that failed, this process decides."""
        membership, reason = self._membership, str(error)
        if isinstance(error, PoolRefuses):
            if not membership.is_refused:
                self._end_outage()  # the pool's replicas have the whole engine: no part of it is for this one
            membership.refused(error)
            reason = membership.why
        is_refused = membership.is_refused
        divides = not is_refused and self._sizes.policy.on_store_loss is StoreLoss.DIVIDE
        self.status.change(StoreState.DIVIDED if divides else StoreState.CLOSED, reason, is_refused=is_refused)
        self._drop_unsent()
        self._batches.forget_charges()
        self._batches.wake_after(None)
        known = None if is_refused else self._known.at_loss(self._sizes.policy.replicas if divides else None)
        self._outage = self._outage or self._new_outage(known, is_refused=is_refused)
        self._outage.pause(is_paused=self._is_cut_off)
        if self._outage.partition is None:
            self._outage.begin(known)

    # -- what another kind of pool does otherwise

    def _new_batches(self) -> BatchQueue:
        return BatchQueue(operations_in_line(has_engines=False, is_by_gain=self._sizes.policy.rules.is_by_gain))

    def _new_statement(self) -> Statement:
        return Statement(self._leases.values(), self.now_us, is_cut_off=self._is_cut_off)

    def _new_outage(self, known: LastKnown | None, *, is_refused: bool) -> Outage:
        return Outage(self._sizes, self._leases, known, self.now_us, is_refused=is_refused)

    def _channel(self) -> str:
        policy = self._sizes.policy
        return protocol.grants_channel(policy.pool, self.name, is_by_gain=policy.rules.is_by_gain)

    def _rules_text(self) -> str:
        return protocol.rules_text(self._sizes.policy, self._sizes.rules)

    # -- the store's decisions

    def _ask(self, lease: Lease, promised: int | None = None) -> None:
        """Asks the store to admit a request, over its tenant's limits at the lower tier, where that ever could."""
        lower = None if lease.ask.limits is None else downgraded(lease.ask, self._sizes)
        self._batches.enter(lease, None if lower is None else lower.tier, promised)

    def _apply(self, lines: protocol.Lines | protocol.Reply, now_us: int) -> None:
        for lease_id, wait in lines.grants:
            lease = self._leases.get(lease_id)  # an earlier grant may be heard of late
            if lease is not None and lease.grant is None and lease.returns == (wait.returns if wait else 0):
                asks_again = lease.has_grown() or self._is_cut_off
                self._known.hold(lease.ask.tokens, lease.ask.requests)
                if not asks_again:
                    if lease.granted(self._grant(lease, wait, now_us)):
                        self._batches.wake()
                else:  # the store had not heard yet of its size, or that the engine cannot be reached
                    lease.returns += 1
                    self._batches.requeue(lease, now_us - lease.entered_us, is_handed_back=True)
        for lease_id, returns in lines.victims:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.chosen(returns)
        for lease_id in lines.displaced:
            self._refuse_a_place(lease_id, now_us)

    def _apply_verdict(self, verdict: protocol.LimitVerdict) -> None:
        """Applies a decision about a request with limits."""
        lease = self._leases.get(verdict.lease_id)
        if lease is None or lease.ask.limits is None:  # without limits, it was heard a second time
            return
        limits = lease.ask.limits
        allowance = RemainingLimits(
            _remaining(limits.requests_per_minute, verdict.requests),
            _remaining(limits.tokens_per_minute, verdict.tokens),
            verdict.is_downgraded,
        )
        if verdict.over is not None:
            del self._leases[lease.id]
            lease.refused(tenant_limit(lease.ask, verdict.over, allowance))
            return
        lease.allowance = allowance
        if verdict.is_downgraded:
            lease.ask = msgspec.structs.replace(lease.ask, tier=verdict.level, limits=None, downgrade=None)

    def _refuse_waiting(self, lease: Lease, error: AdmissionError) -> None:
        if lease.grant is None and lease.id in self._leases:
            self.end(lease, None)
            lease.refused(error)

    def _refuse_a_place(self, lease_id: int, now_us: int) -> None:
        """The queue had no place for a request, or has none any more."""
        if (lease := self._leases.get(lease_id)) is not None and lease.grant is None:  # else a line is heard of late
            if lease_id in self._statement.waiting:  # which may put it back after the store gave its place away
                self.end(lease, None)
            self._leases.pop(lease_id, None)
            lease.refused(self._places.queue_full(lease.ask, self._tiers[lease.tier].queued, now_us))

    def _grant(self, lease: Lease, wait: protocol.WaitReply | None, now_us: int) -> Grant:
        """The store's figures on this process's clock: the wait ends when this process hears of it."""
        if wait is None:
            return Grant(now_us, 0, 0, None, {}, lease.tier)
        return Grant(
            at_us=now_us,
            queue_wait_us=wait.wait_us,
            starvation_us=wait.starved_us or 0,
            overtaken_at_us=None if wait.starved_us is None else now_us - wait.starved_us,
            served_ahead=served_by_name(self._tier_names, wait.served_ahead) if wait.served_ahead else {},
            level=lease.tier if wait.level is None else wait.level,
            passed={self._tier_names[tier]: rule.value for tier, rule in wait.passed},
            engine=wait.engine,
        )

    # -- what this process knows of waits without the store

    def _own_figures(self, lease: Lease) -> Grant:
        now_us = self.now_us()
        return Grant(now_us, now_us - lease.entered_us, 0, None, {}, lease.tier)

    def _wait_so_far(self, lease: Lease) -> Grant:
        now_us = self.now_us()
        overtaken_at_us = self._overtaking.first_after(lease.entered_us)
        before = lease.served_before or [tier.served for tier in self._tiers]
        served = [max(0, tier.served - tokens) for tier, tokens in zip(self._tiers, before, strict=True)]
        return Grant(
            at_us=now_us,
            queue_wait_us=now_us - lease.entered_us,
            starvation_us=0 if overtaken_at_us is None else now_us - overtaken_at_us,
            overtaken_at_us=overtaken_at_us,
            served_ahead=served_by_name(self._tier_names, served),
            level=lease.tier,
        )

    def _note_overtaking(self, latest_age_us: int | None, now_us: int) -> None:
        """Notes how long ago the latest of all admitted requests came; None where none was admitted yet."""
        if latest_age_us is None or not self._leases:
            self._overtaking.forget()
            return
        self._overtaking.admitted(now_us - latest_age_us, now_us)
        if self._overtaking.is_long(len(self._leases)):
            self._overtaking.forget_all_but(sorted(it.entered_us for it in self._leases.values() if it.grant is None))

    @property
    def _is_shared(self) -> bool:
        """Whether the store decides, so that its latest answer is the state of the pool."""
        return self.status.state is StoreState.SHARED

    def _rules(self) -> PoolRules:
        """The whole pool's, or those of this replica's part."""
        return self._sizes.rules if self._outage is None or self._is_shared else self._outage.rules

    def _usage(self) -> Sequence[TierUsage]:
        """What every tier holds and has waiting: in the whole pool, or in this replica while it is alone."""
        if self._is_shared:
            return [TierUsage(*tier[:4]) for tier in self._tiers]
        return usage_of(self._leases.values(), len(self._tiers))

    # -- the outage, the session

    @property
    def _is_cut_off(self) -> bool:
        """Whether this replica can send no request to the engine."""
        return self._paused is not None

    def _turned(self, *, was_cut_off: bool) -> None:
        if self._outage is not None:
            self._outage.pause(is_paused=self._is_cut_off)
        elif self._is_cut_off != was_cut_off:
            self._tell_whether_cut_off()

    def _tell_whether_cut_off(self) -> None:
        """Reports to the store whether this replica can reach the engine. Its tickets take their places by a resync."""
        if self._is_cut_off:
            self._batches.cut_off()
        elif self._session is not None:
            self._session.restate()

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage.end()
            self._outage = None

    @property
    def _partition(self) -> Partition | None:
        """This replica's part, while it decides without the store. During a resync it does not."""
        return None if self._outage is None else self._outage.partition

    def _drop(self, batch: Batch) -> None:
        """Gives up operations that the store does not answer. The next statement makes up for them."""
        self._unsent_ends += batch.ends
        batch.resolve_leaving(self._own_figures)

    def _drop_unsent(self) -> None:
        for batch in self._batches.take_all():
            self._drop(batch)

    def _start_over(self) -> None:
        """Drops everything of an event loop that has ended, or of a session that was closed."""
        self._batches.wake_after(None)
        self._outgrown.stop()
        self._leases.clear()
        self._gossip = None
        self._end_outage()

    def _connected(self) -> StoreSession:
        """The session. It is made at the first request where no start was seen, and anew in another event loop."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.loop is not loop:
            self._start_over()
            self._batches = batches = self._new_batches()
            self._session = StoreSession(self, self._connect, self._channel(), batches, self._fences, took=self._took)
        return self._session


def _longer(one: Grant | None, other: Grant | None) -> Grant | None:
    """The longer of two waits, the first where they are equal."""
    waits = [wait for wait in (one, other) if wait is not None]
    return max(waits, key=lambda wait: wait.queue_wait_us, default=None)


def _remaining(per_minute: int | None, left: tuple[int, int] | None) -> RemainingLimit | None:
    return None if per_minute is None or left is None else RemainingLimit(per_minute, *left)
