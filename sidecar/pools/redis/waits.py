"""How requests have waited, and wait: as far as one replica knows it from the store's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidecar.pools.figures import served_by_name
from sidecar.pools.pool import Grant
from sidecar.pools.redis.lease import RedisLease
from sidecar.pools.redis.protocol import TierReply, WaitReply
from sidecar.scheduling.overtaking import Overtaking


class Waits:
    """Of one replica's leases. Times are those of its own clock, in microseconds."""

    def __init__(self, tier_names: Sequence[str]) -> None:
        self._tier_names = tier_names
        self._overtaking = Overtaking()

    def note(self, latest_age_us: int | None, leases: Mapping[int, RedisLease], now_us: int) -> None:
        """How long ago the latest of all that were admitted came; None where nobody was admitted yet."""
        if latest_age_us is None or len(leases) == 0:
            self._overtaking.forget()
            return
        self._overtaking.admitted(now_us - latest_age_us, now_us)
        if self._overtaking.is_long(len(leases)):
            waiting = [lease.entered_us for lease in leases.values() if lease.grant is None]
            self._overtaking.forget_all_but(sorted(waiting))

    def grant(self, lease: RedisLease, wait: WaitReply | None, now_us: int) -> Grant:
        """The store's figures on this process's clock: the wait ends when it is heard of."""
        if wait is None:
            return Grant(now_us, 0, 0, None, {}, lease.ask.tier)
        ahead = served_by_name(self._tier_names, wait.served_ahead) if wait.served_ahead else {}
        overtaken_at_us = None if wait.starved_us is None else now_us - wait.starved_us
        level = lease.ask.tier if wait.level is None else wait.level
        passed = {self._tier_names[tier]: rule.value for tier, rule in wait.passed}
        return Grant(now_us, wait.wait_us, wait.starved_us or 0, overtaken_at_us, ahead, level, passed)

    def oldest(
        self, leases: Mapping[int, RedisLease], tiers: Sequence[TierReply], now_us: int
    ) -> Sequence[Grant | None]:
        """How the oldest that waits of every tier has waited so far."""
        found: list[Grant | None] = [None] * len(self._tier_names)
        for lease in leases.values():
            tier = lease.ask.tier
            if lease.grant is None and found[tier] is None:
                found[tier] = self.so_far(lease, tiers, now_us)
        return found

    def so_far(self, lease: RedisLease, tiers: Sequence[TierReply], now_us: int) -> Grant:
        """Of one that waits. `tiers` are as the store last told them."""
        overtaken_at_us = self._overtaking.first_after(lease.entered_us)
        before = lease.served_before or [tier.served for tier in tiers]
        served = (tier.served - tokens for tier, tokens in zip(tiers, before, strict=True))
        return Grant(
            at_us=now_us,
            queue_wait_us=now_us - lease.entered_us,
            starvation_us=0 if overtaken_at_us is None else now_us - overtaken_at_us,
            overtaken_at_us=overtaken_at_us,
            served_ahead=served_by_name(self._tier_names, [max(0, tokens) for tokens in served]),
            level=lease.ask.tier,
        )


def own_figures(lease: RedisLease, now_us: int) -> Grant:
    """How a wait went as far as this process knows without the store."""
    return Grant(now_us, now_us - lease.entered_us, 0, None, {}, lease.ask.tier)
