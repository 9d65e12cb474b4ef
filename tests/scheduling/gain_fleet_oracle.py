"""A slow, literal reading of the order by gain in a pool of several engines: the two oracles, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_oracle import MOST_EXCESS, FleetOracle, FleetRequest, Placed
from gain_oracle import MOST_REFRESHED, GainOracle, GainPolicy, GainRequest
from oracle import OTHER, Request

from sidecar.policy.rules import PoolRules, pool_rules


@dataclass
class GainFleetRequest(GainRequest, FleetRequest):
    """`by_gain` says of a claimant that it was no head of its tier."""

    by_gain: bool = False


class GainFleetOracle(GainOracle, FleetOracle):
    """The order by gain, with the engines."""

    request_type = GainFleetRequest
    submitted: list[GainFleetRequest]

    def __init__(self, policy: GainPolicy, weight_percent: int = 200) -> None:
        FleetOracle.__init__(self, policy, weight_percent)
        self.largest = {}

    def rules_of(self, tokens: int | None, requests: int | None, prefill: int | None) -> PoolRules:
        policy = self.policy
        return pool_rules(
            tokens=tokens,
            requests=requests,
            prefill=prefill,
            tiers=policy.tiers,
            promote_after_us=policy.promote_after_us,
            ceiling=policy.ceiling,
            max_preemptions=policy.max_preemptions,
            floor_of_reserve=policy.fair,
            is_by_gain=True,
        )

    # Operations.

    def dispatch(self, now_us: int) -> list[Placed]:
        if not self.is_paused:
            self.make_urgent(now_us)
            self.refresh_densities(now_us)
        return FleetOracle.dispatch(self, now_us)

    def refresh_densities(self, now_us: int) -> None:
        for claimant in self.claimants():
            if claimant.urgent:
                claimant.density = self.density(claimant, now_us)
        super().refresh_densities(now_us)

    def claim(self, request: GainFleetRequest, now_us: int) -> None:
        """Leaves the queue; its tenant is charged from the start of its first ticket."""
        if request.claims:
            return
        tier = request.tier
        request.by_gain = request not in (self.first_in_fair_order(tier), self.first_in_fair_order(tier, is_small=True))
        virtual, charges = self.virtual_now(tier), self.is_in_lane(request)
        if charges:
            first = self.first_of_lane(request)
            request.charged_start = max(first.start, self.finish.get((tier, request.tenant), 0))
            request.charge = request.charged_start + request.tokens / request.weight
            self.finish[tier, request.tenant] = request.charge
        self.virtual[tier] = virtual
        request.start = virtual if request.start is None else request.start
        request.claims = True
        if request.claimed_us is None:
            request.claimed_us = now_us
        self._queue_changed(tier)
        if charges:
            self._delay_first(tier, request.tenant)

    def go_back(self, request: GainFleetRequest) -> None:
        request.by_gain = False
        super().go_back(request)

    def admit_to(self, request: GainFleetRequest, engine: str, now_us: int) -> Placed:
        in_floor = self.class_of(request, now_us) != OTHER
        placed = super().admit_to(request, engine, now_us)
        request.in_floor, request.by_gain = in_floor, False
        self.refreshes_left += MOST_REFRESHED
        self.refresh_densities(now_us)
        return placed

    # Definitions.

    def engines(self) -> int:
        return max(1, len(self.takes_new()))

    def is_in_lane(self, request: GainFleetRequest) -> bool:
        return not (request.returns or request.claims or request.put_back)

    def queued(self, tier: int) -> list[GainFleetRequest]:
        """Claimants are candidates of their own."""
        return [request for request in self.waiting(tier) if not request.claims]

    def first_in_fair_order(self, tier: int, *, is_small: bool = False) -> Request | None:
        firsts = [it for it in self.firsts(tier) if not is_small or self.is_within_a_reserve(it)]
        return min(firsts, key=lambda it: (it.start, it.number), default=None)

    def floor_used(self, tier: int) -> tuple[int, ...]:
        mine = [self.holds(request) for request in self.held() if request.tier == tier and request.in_floor]
        return tuple(sum(column) for column in zip((0, 0, 0), *mine, strict=True))

    def class_of(self, request: GainFleetRequest, now_us: int) -> int:
        if request.by_gain and not self.policy.tiers[request.tier].always_first:
            return OTHER
        return super().class_of(request, now_us)

    def _excesses(self, request: Request) -> tuple[int, int]:
        sizes = zip(self.floor_used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        tokens, requests, prefill = (-1 if r is None else (u + t - r) // r for u, t, r in sizes)
        lasting = min(MOST_EXCESS, max(0, tokens, requests))
        return lasting, max(0, min(MOST_EXCESS, prefill) - lasting)
