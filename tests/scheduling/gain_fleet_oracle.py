"""A slow, literal reading of the order by gain in a pool of several engines: the two oracles, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_oracle import MOST_EXCESS, FleetOracle, FleetRequest, Placed
from gain_oracle import MOST_REFRESHED, GainOracle, GainPolicy, GainRequest
from oracle import OTHER, Request


@dataclass
class GainFleetRequest(GainRequest, FleetRequest):
    """A request with figures and an engine."""


class GainFleetOracle(GainOracle, FleetOracle):
    """The order by gain, with the engines."""

    request_type = GainFleetRequest
    submitted: list[GainFleetRequest]

    def __init__(self, policy: GainPolicy, weight_percent: int = 200) -> None:
        FleetOracle.__init__(self, policy, weight_percent)
        self.largest = {}

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
        virtual, charges = self.virtual_now(tier), self.is_in_lane(request)
        if charges:
            first = self.first_of_lane(request)
            request.charged_start = max(first.start, self.finish.get((tier, request.tenant), 0))
            request.charge = request.charged_start + request.tokens / request.weight
            self.finish[tier, request.tenant] = request.charge
            request.start = request.charged_start
        self.virtual[tier] = virtual
        request.start = virtual if request.start is None else request.start
        request.claims = True
        if request.claimed_us is None:
            request.claimed_us = now_us
        self._queue_changed(tier)
        if charges:
            self._delay_first(tier, request.tenant)

    def become_claimant(self, request: GainFleetRequest, now_us: int) -> None:
        is_one = request.claims
        super().become_claimant(request, now_us)
        if not is_one:
            self.refresh_densities(now_us)

    def go_back(self, request: GainFleetRequest) -> None:
        super().go_back(request)
        if request.charge is not None:
            request.start = request.charged_start

    def admit_to(self, request: GainFleetRequest, engine: str, now_us: int) -> Placed:
        in_floor = self.class_of(request, now_us) != OTHER
        placed = super().admit_to(request, engine, now_us)
        request.in_floor = in_floor
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

    def floor_used(self, tier: int) -> tuple[int, ...]:
        mine = [self.holds(request) for request in self.held() if request.tier == tier and request.in_floor]
        return tuple(sum(column) for column in zip((0, 0, 0), *mine, strict=True))

    def would_pass_the_first(self, request: Request, now_us: int) -> bool:
        """What is admitted beyond the floor does not count in it."""
        return False

    def class_of(self, request: Request, now_us: int) -> int:
        return FleetOracle.class_of(self, request, now_us)

    def _excesses(self, request: Request) -> tuple[int, int]:
        sizes = zip(self.floor_used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        tokens, requests, prefill = (-1 if r is None else (u + t - r) // r for u, t, r in sizes)
        lasting = min(MOST_EXCESS, max(0, tokens, requests))
        return lasting, max(0, min(MOST_EXCESS, prefill) - lasting)
