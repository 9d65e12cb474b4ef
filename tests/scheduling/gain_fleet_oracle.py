"""A slow, literal reading of the order by gain in a pool of several engines: the two oracles, and where they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet_oracle import MOST_EXCESS, FleetOracle, FleetRequest, Placed
from gain_oracle import MOST_REFRESHED, GainOracle, GainPolicy, GainRequest
from oracle import ALWAYS_FIRST, INSIDE, OTHER, TURN, Oracle, Request


@dataclass
class GainFleetRequest(GainRequest, FleetRequest):
    """A request with figures and an engine; `kept` is the engine that it claimed first as one for its tier's floor."""

    kept: str | None = None


class GainFleetOracle(GainOracle, FleetOracle):
    """The order by gain, with the engines."""

    request_type = GainFleetRequest
    submitted: list[GainFleetRequest]

    def __init__(self, policy: GainPolicy, weight_percent: int = 200) -> None:
        FleetOracle.__init__(self, policy, weight_percent)
        self.largest = {}
        self.for_floors: list[GainFleetRequest] = []
        self.is_walking = False

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
        request.kept = None
        if request.charge is not None:
            request.start = request.charged_start

    def admit_to(self, request: GainFleetRequest, engine: str, now_us: int) -> Placed:
        in_floor = self.class_of(request, now_us) != OTHER
        placed = super().admit_to(request, engine, now_us)
        request.in_floor, request.kept = in_floor, None
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

    def in_fair_order(self, tier: int, now_us: int) -> list[GainFleetRequest]:
        """The heads of the tier, and the claimants that no head is before."""
        heads = [head for head in Oracle.heads(self, now_us) if head.tier == tier]
        both = sorted([*self.claimants(tier), *heads], key=lambda it: (it.start, it.number))
        return both[: max(map(both.index, heads), default=len(both)) + 1]

    def for_floor(self, tier: int, now_us: int) -> dict[str, int]:
        """The classes of the tickets that may be admitted for the floor: what each before them needs is filled."""
        owes = self.owes(tier, now_us)
        line = [it for it in self.in_fair_order(tier, now_us) if not owes or self.is_within_a_reserve(it)]
        found: dict[str, int] = {}
        needs = [self.floor_used(tier)]
        for request in line:
            needs.append(self.sizes(request))
            filled = map(sum, zip(*needs, strict=True))
            if all(most is None or used <= most for used, most in zip(filled, self.reserve(tier), strict=True)):
                found[request.id] = INSIDE
            else:
                if request is line[0] and not owes and self.is_below_its_reserve(tier):
                    found[request.id] = TURN
                break
        return found

    def walk(self, now_us: int) -> tuple[Request, str] | None:
        self.is_walking = True
        found = super().walk(now_us)
        self.is_walking = False
        return found

    def best(self, request: GainFleetRequest, claims: Sequence[tuple[Request, str]]) -> str | None:
        """A ticket for a floor keeps the engine that was chosen for it first, as long as it could go there."""
        if request not in self.for_floors:
            return super().best(request, claims)
        found = request.kept if request.kept in self.usable(request) else super().best(request, claims)
        if self.is_walking:
            request.kept = found
        return found

    def order(self, now_us: int) -> list[Request]:
        """Claimants for their tiers' floors come before all but those that are always first, the first claims first."""
        allowed = self._allowed(now_us)
        classes = {request.id: self.class_of(request, now_us) for request in allowed}
        self.for_floors = [request for request in allowed if classes[request.id] in (INSIDE, TURN)]
        keep = sorted((r for r in self.for_floors if r.claims), key=lambda request: request.claimed_us)
        always = [request for request in allowed if classes[request.id] == ALWAYS_FIRST]
        return always + keep + [request for request in allowed if request not in always and request not in keep]

    def floor_used(self, tier: int) -> tuple[int, ...]:
        mine = [self.holds(request) for request in self.held() if request.tier == tier and request.in_floor]
        return tuple(sum(column) for column in zip((0, 0, 0), *mine, strict=True))

    def class_of(self, request: GainFleetRequest, now_us: int) -> int:
        if request.state != "waiting" or self.policy.tiers[request.tier].always_first:
            return super().class_of(request, now_us)
        return self.for_floor(request.tier, now_us).get(request.id, OTHER)

    def _excesses(self, request: Request) -> tuple[int, int]:
        sizes = zip(self.floor_used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        tokens, requests, prefill = (-1 if r is None else (u + t - r) // r for u, t, r in sizes)
        lasting = min(MOST_EXCESS, max(0, tokens, requests))
        return lasting, max(0, min(MOST_EXCESS, prefill) - lasting)
