"""An outage of the store: the decisions about requests from its loss until it is back.

With `divide`, a request that fits into this replica's part is admitted by it (`partition`). Where the store was never
reached, the policy says how many replicas there are (`replicas`). With `closed` that part is empty: no request is
admitted, and a new one is refused. A request that was waiting when the store was lost waits on for as long as a lease
without a heartbeat lives, and is refused then.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping

from sidecar.errors import AdmissionError, StoreUnavailable
from sidecar.policy.model import StoreLoss
from sidecar.policy.rules import PoolRules
from sidecar.policy.size_limits import SizeLimits
from sidecar.pools.base import Ask, Lease
from sidecar.pools.clock import Clock
from sidecar.pools.redis.partition import (
    LastKnown,
    Partition,
    PartitionLimits,
    equal_part,
    first_part,
    fits_into,
    part_of,
)
from sidecar.pools.redis.protocol import BEAT_S, SILENCE_S
from sidecar.pools.stats import bounded

JUDGED_AT_ONCE = 100
"""Waiting requests that one turn of the event loop judges by the part's size: up to 10 us each, 30 us to refuse one."""


class Outage:
    """One outage. `leases` are the replica's own, waiting or held: the pool's own table, which changes under it.

    `partition` decides while there is one. During a resync there is none, and changes are collected for the store.
    `rules` are those of this replica's part, at present.
    `known` is None where no part can be known. `is_refused`: the store is there, and refuses this replica.
    """

    def __init__(
        self,
        sizes: SizeLimits,
        leases: dict[int, Lease],
        known: LastKnown | None,
        clock: Clock,
        *,
        is_refused: bool = False,
    ) -> None:
        self.partition: Partition | None = None
        self._unjudged: deque[Lease] = deque()
        self._judging: asyncio.Handle | None = None
        self._is_paused = False
        self._is_refused = is_refused
        self._sizes = sizes
        self._leases = leases
        self._known = known
        self._clock = clock
        self._divides = known is not None and sizes.policy.on_store_loss is StoreLoss.DIVIDE
        self._part = self.rules = self._equal_part()
        self.limits = PartitionLimits(sizes, known.replicas if known else 1)
        self._is_patient = known is not None
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S if known else 0, self._lose_patience)

    def begin(self, known: LastKnown | None) -> None:
        """Decides from now on, also about requests that the store had not looked at. `known` is safe by now."""
        now_us = self._clock()
        if self._known is not None and known is not None:
            self._known = known
            self._part = self._equal_part()
        entering = [lease for lease in self._leases.values() if lease.is_entering]
        for lease in self._leases.values():
            if lease.ask.limits is not None and not lease.is_entering:
                self.limits.count(lease, now_us)
        for lease in entering:
            if error := self._refusal(lease):
                self._refuse(lease, error)
        self._divide()
        for lease in entering:
            self._look_at(lease)
        if not self._is_patient:
            self._refuse_waiting_too_large()

    def pause(self, *, is_paused: bool) -> None:
        """Admits no request from now on, or does again: see `Pool.pause`."""
        self._is_paused = is_paused
        if self.partition is not None:
            self.partition.pause(is_paused=is_paused)

    def suspend(self) -> None:
        """Decides nothing more: the replica states everything to the store. `begin` follows where that fails."""
        self._stop_judging()
        if self.partition is not None:
            self.partition.stop()
            self.partition = None

    def end(self) -> None:
        """The store is back, or the process ends."""
        self.suspend()
        self._timer.cancel()

    def enter(self, lease: Lease) -> None:
        """Grants a new request, has it wait or refuses it, at once."""
        partition = self.partition
        assert partition is not None
        if error := self._refusal(lease):
            lease.refused(error)
            return
        most = self._sizes.places(lease.tier)
        if most is not None:
            partition.take_over_all()
        if most and partition.queued(lease.tier) >= most:
            displaced = partition.displaced(lease.ask, most)
            if displaced is None:
                self.limits.undo(lease)
                lease.refused(self._sizes.queue_full(lease.tier, BEAT_S))
                return
            self._refuse(displaced, self._sizes.queue_full(lease.tier, BEAT_S))
        self._leases[lease.id] = lease
        partition.submit(lease)
        partition.dispatch(self._clock())
        self._look_at(lease)

    def change_rules(self) -> None:
        """The pool has other rules, and so has this replica's part."""
        self._part = self._equal_part()
        if self.partition is not None:
            self._divide()

    def requeued(self, lease: Lease) -> None:
        """A lease gave its room back and waits again, like requests that waited when the store was lost."""
        if self.partition is not None:
            self.partition.requeue(lease, self._clock())
        if lease.grant is None and not self._is_patient and not self.fits(lease.ask):
            self._refuse(lease, self._unavailable(lease.ask))

    def part(self) -> Mapping[str, int | None]:
        """The size of this replica's part, for people."""
        if self.partition is None or not self._divides:
            return {}
        part = self.partition.part
        return {"tokens": bounded(part.tokens), "requests": bounded(part.requests)}

    def fits(self, ask: Ask) -> bool:
        """Whether this replica's whole part could ever admit a request."""
        return fits_into(self._part, ask)

    def _equal_part(self) -> PoolRules:
        if not self._divides or self._known is None:
            return part_of(self._sizes.rules, 0, 0)
        return equal_part(self._sizes.rules, self._known.replicas)

    def _divide(self) -> None:
        """Makes the part anew, of the present rules."""
        self.suspend()
        known = self._known if self._divides and self._is_patient else None
        self.rules = self._part if known is None else first_part(self._sizes.rules, known)
        self.partition = Partition(self.rules, self._leases.values(), self._clock, is_paused=self._is_paused)

    def _refusal(self, lease: Lease) -> AdmissionError | None:
        """The refusal of a new request; None where it may wait, and is charged to its tenant."""
        if not self.fits(lease.ask):
            return self._unavailable(lease.ask)
        return self.limits.admit(lease, self._clock())

    def _look_at(self, lease: Lease) -> None:
        if lease.is_over or not lease.is_entering:
            return
        if self._sizes.places(lease.tier) == 0 and self.partition is not None:
            self.partition.take_over_all()
        if self._sizes.places(lease.tier) == 0 and lease.grant is None:
            self.limits.undo(lease)
            self._refuse(lease, self._sizes.queue_full(lease.tier, BEAT_S))
        else:
            lease.waits()

    def _refuse(self, lease: Lease, error: AdmissionError) -> None:
        self._leases.pop(lease.id, None)
        self.limits.ended(lease, 0, self._clock())
        if self.partition is not None:
            self.partition.end(lease, self._clock())
        lease.refused(error)

    def _lose_patience(self) -> None:
        """The others' leases of before the loss count no longer, as in the store: the whole part is this replica's."""
        self._is_patient = False
        if self.partition is not None:
            self._divide()
            self._refuse_waiting_too_large()

    def _refuse_waiting_too_large(self) -> None:
        """Judges the requests that wait, some in each turn of the event loop."""
        self._unjudged = deque(lease for lease in self._leases.values() if lease.grant is None)
        self._stop_judging()
        self._judge_some()

    def _judge_some(self) -> None:
        self._judging = None
        for _ in range(min(JUDGED_AT_ONCE, len(self._unjudged))):
            lease = self._unjudged.popleft()
            if lease.grant is None and lease.id in self._leases and not self.fits(lease.ask):
                self._refuse(lease, self._unavailable(lease.ask))
        if self._unjudged:
            self._judging = asyncio.get_running_loop().call_soon(self._judge_some)

    def _stop_judging(self) -> None:
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None

    def _unavailable(self, ask: Ask) -> StoreUnavailable:
        if self._is_refused:
            why = "this replica admits nothing, because its policy and its pool have other tiers; try another replica"
        elif self._known is None:
            why = "the store of this pool has not been reached yet; try again"
        elif not self._divides:
            why = "the store of this pool cannot be reached; try again"
        else:
            why = (
                f"the store of this pool cannot be reached, and this request ({ask.tokens} tokens, {ask.requests} "
                "sequences) does not fit into this replica's part of it; try again, or ask for less output"
            )
        return StoreUnavailable(why, retry_after_s=BEAT_S * random.uniform(1, 2))
