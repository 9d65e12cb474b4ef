"""What becomes of requests from the loss of the store until it is back.

`divide`: whoever fits into this replica's part is admitted by it (`alone`). `closed`, and a store that was never
reached, admit nobody: a new request is refused. Who was waiting when the store was lost waits for it as long as a lease
without heartbeat lives, and is refused then: nobody waits for a store that stays away.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from sidecar.errors import AdmissionError, StoreUnavailable
from sidecar.policy.model import Policy, StoreLoss
from sidecar.pools.dispatcher import Clock
from sidecar.pools.figures import bounded
from sidecar.pools.pool import Ask, Grant
from sidecar.pools.redis.alone import Alone, LastKnown, first_part, fits_into, nth
from sidecar.pools.redis.lease import RedisLease
from sidecar.pools.redis.limited import DividedLimits
from sidecar.pools.redis.protocol import BEAT_S, SILENCE_S
from sidecar.pools.sizes import Sizes


class Loss:
    """One loss. `leases` are the replica's own, waiting or held: the pool's own table, which changes under it.

    `is_refused`: the store is there, and refuses this replica.
    """

    def __init__(
        self,
        policy: Policy,
        sizes: Sizes,
        leases: dict[int, RedisLease],
        known: LastKnown | None,
        clock: Clock,
        *,
        is_refused: bool = False,
    ) -> None:
        self._is_refused = is_refused
        self.alone: Alone | None = None
        self.is_paused = True
        self._sizes = sizes
        self._leases = leases
        self._known = known
        self._clock = clock
        self._divides = known is not None and policy.on_store_loss is StoreLoss.DIVIDE
        self._part = nth(sizes.rules, known.replicas if known else 1)
        self.limits = DividedLimits(sizes, known.replicas if known else 1, clock)
        self._is_patient = known is not None
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S if known else 0, self._lose_patience)

    def begin(self, known: LastKnown | None) -> None:
        """Decides from now on, also for those that the store had not looked at yet. `known` is what is safe by now."""
        if self._known is not None and known is not None:
            self._known, self._part = known, nth(self._sizes.rules, known.replicas)
        entering = [lease for lease in self._leases.values() if lease.is_entering]
        for lease in [lease for lease in self._leases.values() if not lease.is_entering]:
            self.limits.take_over(lease)
        for lease in entering:
            if not self._fits_part(lease.ask):
                self._refuse(lease, self._unavailable(lease.ask))
            elif error := self.limits.admit(lease):
                self._refuse(lease, error)
        self.is_paused = False
        self._go_alone()
        for lease in entering:
            self._look_at(lease)
        if not self._is_patient:
            self._refuse_who_waits_in_vain()

    def pause(self) -> None:
        """Decides nothing more: the store is being told everything. `begin` follows where that failed."""
        self.is_paused = True
        self._leave_alone()

    def _leave_alone(self) -> None:
        if self.alone is not None:
            self.alone.stop()
            self.alone = None

    def end(self) -> None:
        """The store is back, or the process ends."""
        self.pause()
        self._timer.cancel()

    def enter(self, lease: RedisLease) -> None:
        """A new request: granted, waiting or refused, at once."""
        alone = self.alone
        if alone is None or not self._fits_part(lease.ask):
            lease.refused(self._unavailable(lease.ask))
            return
        if error := self.limits.admit(lease):
            lease.refused(error)
            return
        tier = self._sizes.policy.tiers[lease.ask.tier]
        if tier.max_waiting and alone.queued(tier.level) >= tier.max_waiting:
            displaced = alone.displaced(lease.ask, tier.max_waiting)
            if displaced is None:
                self.limits.undo(lease)
                lease.refused(self._sizes.queue_full(tier.level, BEAT_S))
                return
            self._refuse(displaced, self._sizes.queue_full(tier.level, BEAT_S))
        self._leases[lease.id] = lease
        alone.enter(lease)
        self._look_at(lease)

    def change_rules(self) -> None:
        """The pool has other rules, so this replica's part has."""
        self._part = nth(self._sizes.rules, self._known.replicas if self._known else 1)
        if not self.is_paused:
            self._go_alone()

    def hold_back(self, for_us: int) -> None:
        """Admits nobody for so long while anything is held."""
        if self.alone is not None:
            self.alone.hold_back(for_us)

    def left(self, lease: RedisLease) -> Grant | None:
        """A lease or a wait is over. How it had waited, where it did here."""
        return self.alone.end(lease) if self.alone is not None else None

    def resized(self, lease: RedisLease) -> None:
        """A lease holds something else."""
        if self.alone is not None:
            self.alone.resize(lease)

    def kept(self, lease: RedisLease) -> None:
        """A lease is not to be preempted any more."""
        if self.alone is not None:
            self.alone.keep(lease)

    def requeued(self, lease: RedisLease) -> None:
        """A lease gave its room back and waits again, as those did that waited when the store was lost."""
        if self.alone is not None:
            self.alone.requeue(lease)
        if lease.grant is None and not self._is_patient and not self._fits_part(lease.ask):
            self._refuse(lease, self._unavailable(lease.ask))

    def part(self) -> Mapping[str, int | None]:
        """The part that is admitted to, for people."""
        if self.alone is None:
            return {}
        return {"tokens": bounded(self.alone.part.tokens), "requests": bounded(self.alone.part.requests)}

    def _go_alone(self) -> None:
        self._leave_alone()
        if not self._divides:
            return
        part = first_part(self._sizes.rules, self._known) if self._is_patient and self._known else self._part
        self.alone = Alone(part, self._leases.values(), self._clock, lambda lease, grant: lease.granted(grant))

    def _look_at(self, lease: RedisLease) -> None:
        if lease.is_over or not lease.is_entering:
            return
        if self._sizes.policy.tiers[lease.ask.tier].max_waiting == 0 and lease.grant is None:
            self.limits.undo(lease)
            self._refuse(lease, self._sizes.queue_full(lease.ask.tier, BEAT_S))
        else:
            lease.waits()

    def _refuse(self, lease: RedisLease, error: AdmissionError) -> None:
        self._leases.pop(lease.id, None)
        self.limits.ended(lease, 0)
        self.left(lease)
        lease.refused(error)

    def _lose_patience(self) -> None:
        """What others ran at the loss counts no longer, as in the store: the whole part is this replica's."""
        self._is_patient = False
        if not self.is_paused:
            self._go_alone()
            self._refuse_who_waits_in_vain()

    def _refuse_who_waits_in_vain(self) -> None:
        for lease in [lease for lease in self._leases.values() if lease.grant is None]:
            if not self._fits_part(lease.ask):
                self._refuse(lease, self._unavailable(lease.ask))

    def _fits_part(self, ask: Ask) -> bool:
        return self._divides and fits_into(self._part, ask)

    def _unavailable(self, ask: Ask) -> StoreUnavailable:
        retry_after_s = BEAT_S * random.uniform(1, 2)
        if self._is_refused:
            return StoreUnavailable(
                "the pool has other tiers than this replica, which it refuses; try again", retry_after_s=retry_after_s
            )
        if not self._divides:
            return StoreUnavailable("the store of this pool cannot be reached; try again", retry_after_s=retry_after_s)
        return StoreUnavailable(
            f"the store of this pool cannot be reached, and this request ({ask.tokens} tokens, {ask.requests} "
            "sequences) does not fit into this replica's part of it; try again, or ask for less output",
            retry_after_s=retry_after_s,
        )
