"""A slow, literal reading of the order by gain: lists, no heap, no figure that is kept but what a rule remembers.

Nothing of `sidecar.scheduling` is used here but the figures of a ticket. See `oracle` for the rules that stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from oracle import ALWAYS_FIRST, OTHER, TURN, Answer, Oracle, Policy, Request

from sidecar.scheduling.gain import GainFigures

MOST_REFRESHED, MOST_MADE_URGENT = 2, 16


@dataclass(frozen=True)
class GainPolicy(Policy):
    """A pool that orders by gain; `fair` is the part of each reserve that is its tier's floor."""

    fair: Fraction = Fraction(1, 4)

    def order(self) -> dict[str, Any]:
        return {"floor_of_reserve": self.fair, "is_by_gain": True}


@dataclass
class GainRequest(Request):
    """`density` is what a decision computed last; `in_floor` says of a lease that it was admitted for its floor."""

    gain: GainFigures | None = None
    density: int = 0
    urgent: bool = False
    in_floor: bool = False


class GainOracle(Oracle):
    """The order by gain by the page."""

    policy: GainPolicy
    request_type = GainRequest
    refreshed_us: int | None = None
    refreshes_left = 0
    urged_us: int | None = None
    urges_left = 0
    submitted: list[GainRequest]

    def __init__(self, policy: GainPolicy) -> None:
        super().__init__(policy, divide=lambda tokens, weight: tokens / weight)
        self.largest: dict[int, int] = {}

    # Operations.

    def submit(self, id: str, *, tier: int, now_us: int, gain: GainFigures | None = None, **ticket) -> GainRequest:
        plain = super().submit(id, tier=tier, now_us=now_us, **ticket)
        request = self.request_type(**vars(plain), gain=gain)
        self.submitted[-1] = request
        self.largest[tier] = max(self.largest.get(tier, 0), 2 ** math.ceil(math.log2(request.tokens)))
        if gain is not None and gain.deadline_us < self.phi_us():
            request.urgent, request.density = True, self.density(request, now_us)
        return request

    def charge(self, tier: int, tenant: str, weight: int, tokens: int) -> None:
        super().charge(tier, tenant, weight, tokens)
        if self.waiting(tier):
            self._delay_first(tier, tenant)

    def dispatch(self, now_us: int) -> list[Answer]:
        if not self.is_paused:
            self.make_urgent(now_us)
        return super().dispatch(now_us)

    def preempt(self, now_us: int) -> list[str]:
        tiers = self.policy.tiers
        may_take = self.policy.max_preemptions > 0 and any(tier.preemptible for tier in tiers)
        may_ask = any(tiers[request.tier].preempt_after_us is not None for request in self.waiting())
        if may_take and may_ask and not self.is_paused and not self.is_held_back(now_us):
            self.refresh_densities(now_us)
        return super().preempt(now_us)

    def next_admission(self, now_us: int) -> Request | None:
        if not all(most is None or used < most for used, most in zip(self.used(), self.capacity(), strict=True)):
            return None
        self.refresh_densities(now_us)
        return super().next_admission(now_us)

    def admit(self, id: str, now_us: int) -> Answer:
        request = next(request for request in self.waiting() if request.id == id)
        order_class, tier = self.class_of(request, now_us), request.tier
        answer = self.answer(request, now_us)
        request.excess = self._excess(request) if order_class == TURN else 0
        if self.is_held_back(now_us):
            self.went_while_held_back = id
        virtual = self.virtual[tier] = self.virtual_now(tier)
        charges = self.is_in_lane(request)
        if charges:
            from_tag = max(self.first_of_lane(request).start, self.finish.get((tier, request.tenant), 0))
            self.finish[tier, request.tenant] = from_tag + request.tokens / request.weight
        request.start = virtual if request.start is None else request.start
        request.state, request.held_tokens, request.admitted_us = "held", request.tokens, now_us
        request.in_floor = order_class != OTHER
        self.refreshes_left += MOST_REFRESHED
        self.admitted.append((request, now_us, request.tokens))
        self._queue_changed(tier)
        if charges and self.waiting(tier):
            self._delay_first(tier, request.tenant)
        return answer

    def _return(self, id: str, now_us: int) -> Request:
        request = super()._return(id, now_us)
        request.in_floor = False
        request.density = self.density(request, now_us)
        return request

    def make_urgent(self, now_us: int) -> None:
        """What is due sooner than Phi is urgent from now on."""
        calm = [request for request in self.waiting() if request.gain is not None and not request.urgent]
        due = [request for request in calm if self.due_us(request) - now_us < self.phi_us()]
        if self.urged_us != now_us:
            self.urged_us, self.urges_left = now_us, MOST_MADE_URGENT
        for request in sorted(due, key=lambda r: (self.due_us(r), r.arrived_us, r.number))[: self.urges_left]:
            request.urgent, request.density = True, self.density(request, now_us)
            self.urges_left -= 1

    def phi_us(self) -> int:
        """Half of the engines' time for all that waits."""
        worth = [request for request in self.waiting() if request.gain is not None]
        return sum(request.gain.cost_us for request in worth) // (2 * self.engines())

    def refresh_densities(self, now_us: int) -> None:
        """The densest ticket of all tiers, as far as is known, is computed anew until nothing changes."""
        if self.refreshed_us != now_us:
            self.refreshed_us, self.refreshes_left = now_us, MOST_REFRESHED
        while self.refreshes_left:
            tiers = [tier for tier, rules in enumerate(self.policy.tiers) if not rules.always_first]
            urgent = self.by_density([request for tier in tiers for request in self.urgent(tier)])
            if not urgent or urgent[0].density == self.density(urgent[0], now_us):
                return
            urgent[0].density = self.density(urgent[0], now_us)
            self.refreshes_left -= 1

    # Definitions.

    def density(self, request: GainRequest, now_us: int) -> int:
        """Gain for a second of the engine, if it is admitted now."""
        if request.gain is None:
            return 0
        weight, tokens, cost_us, _, start_by_us, slack_us = request.gain
        late_us = max(0, now_us - request.arrived_us - start_by_us)
        gain = weight * max(0, tokens - math.floor(Fraction(late_us, slack_us)))
        return math.floor(Fraction(gain * 10**6, cost_us))

    def engines(self) -> int:
        return 1

    def due_us(self, request: GainRequest) -> int:
        return request.arrived_us + request.gain.deadline_us

    def reserve(self, tier: int) -> tuple[int | None, ...]:
        """The floor of a tier."""
        share, fair = self.policy.tiers[tier].reserve, self.policy.fair
        if not share or not fair:
            return (0,) * len(self.capacity())
        return self._of_capacity("reserve", tier, lambda c: math.ceil(share * fair * c))

    def floor_used(self, tier: int) -> tuple[int, int]:
        """Uf of a tier."""
        mine = [request for request in self.held() if request.tier == tier and request.in_floor]
        return sum(request.held_tokens for request in mine), sum(request.requests for request in mine)

    def is_below_its_reserve(self, tier: int) -> bool:
        return all(r is None or u < r for u, r in zip(self.floor_used(tier), self.reserve(tier), strict=True))

    def is_inside(self, request: Request) -> bool:
        sizes = zip(self.floor_used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        return all(r is None or u + t <= r for u, t, r in sizes)

    def is_in_headroom(self, request: Request) -> bool:
        sizes = zip(self.used(request.tier), self.sizes(request), self.headroom(request.tier), strict=True)
        return any(self.headroom(request.tier)) and all(h is None or u + t <= h for u, t, h in sizes)

    def virtual_now(self, tier: int) -> float:
        """V: the smallest start of all tenants that wait, or what it was if that is more."""
        virtual = self.virtual.get(tier, 0)
        return max(virtual, min((it.start for it in self.firsts(tier) if self.is_in_lane(it)), default=virtual))

    def first_of_lane(self, request: GainRequest) -> GainRequest:
        """The first of the tickets of its tenant."""
        firsts = self.firsts(request.tier)
        return next(first for first in firsts if first.tenant == request.tenant and self.is_in_lane(first))

    def is_ahead(self, request: GainRequest) -> bool:
        """Whether its tenant is ahead of V by more than two maximal requests."""
        if request.state != "waiting" or not self.is_in_lane(request):
            return False
        latest = [r for r in self.submitted if (r.tier, r.tenant) == (request.tier, request.tenant)][-1]
        finish = self.finish.get((request.tier, request.tenant), 0.0)
        return self.virtual_now(request.tier) < finish - 2 * self.largest.get(request.tier, 0) / latest.weight

    def is_in_lane(self, request: GainRequest) -> bool:
        return not request.returns

    def urgent(self, tier: int) -> list[GainRequest]:
        """The urgent tickets that may go by gain, the densest first as far as is known."""
        return self.by_density([r for r in self.queued(tier) if r.urgent and r.density > 0 and not self.is_ahead(r)])

    def by_density(self, requests: list[GainRequest]) -> list[GainRequest]:
        return sorted(requests, key=lambda r: (-r.density, r.arrived_us, r.number))

    def queued(self, tier: int) -> list[GainRequest]:
        return self.waiting(tier)

    def best_by_gain(self, tier: int) -> list[GainRequest]:
        """The best ticket of a tier by gain, if any."""
        if self.policy.tiers[tier].always_first:
            return []
        calm = [r for r in self.queued(tier) if r.gain is not None and not r.urgent and not self.is_ahead(r)]
        calm.sort(key=lambda r: (self.due_us(r), r.arrived_us, r.number))
        return [*self.urgent(tier), *calm][:1]

    def class_of(self, request: Request, now_us: int) -> int:
        """Only a head of its tier is admitted for its floor."""
        if self.policy.tiers[request.tier].always_first:
            return ALWAYS_FIRST
        if request.state == "waiting" and request not in self.heads(now_us):
            return OTHER
        return super().class_of(request, now_us)

    def in_order(self, now_us: int) -> list[Request]:
        heads = self.heads(now_us)
        best = [r for tier in range(len(self.policy.tiers)) for r in self.best_by_gain(tier) if r not in heads]
        candidates = [request for request in [*heads, *best] if self.is_candidate(request)]
        return sorted(candidates, key=lambda request: self.place(request, now_us))

    def _place(self, head: Request, order_class: int, now_us: int) -> tuple:
        if order_class != OTHER:
            return super()._place(head, order_class, now_us)
        rank, key = 3, self.aged_level(head, now_us)
        density = head.density if head.state == "waiting" else self.density(head, now_us)
        if self.is_in_headroom(head):
            rank = 0
        elif head.gain is not None and not self.is_ahead(head) and (not head.urgent or density > 0):
            rank, key = (1, -density) if head.urgent else (2, self.due_us(head))
        return (order_class, rank, key, head.arrived_us, head.number)

    def _kept(self, tier: int, request: Request, order_class: int, dimension: int, now_us: int) -> int:
        used, reserve = self.floor_used(tier)[dimension], self.reserve(tier)[dimension]
        if self.policy.tiers[tier].always_first:
            kept = self.used(tier)[dimension]
        else:
            kept = used if reserve is None else min(used, reserve)
        is_better = tier < self.aged_level(request, now_us)
        return max(kept, self.headroom(tier)[dimension] or 0) if is_better else kept

    def takeable_for(self, first: Request, now_us: int) -> list[Request]:
        return [lease for lease in super().takeable_for(first, now_us) if not lease.in_floor]

    def _why_first(self, request: Request, head: Request, now_us: int) -> str:
        why = super()._why_first(request, head, now_us)
        if why != "level" or self.class_of(request, now_us) != OTHER:
            return why
        return {0: "reserve", 3: "level"}.get(self.place(request, now_us)[1], "gain")

    def _excess(self, request: Request) -> int:
        sizes = zip(self.floor_used(request.tier), self.sizes(request), self.reserve(request.tier), strict=True)
        return min(1_000, max(0, *((u + t - r) // r for u, t, r in sizes if r is not None)))

    def _queue_changed(self, tier: int) -> None:
        super()._queue_changed(tier)
        if not self.waiting(tier):
            self.largest.pop(tier, None)

    def _delay_first(self, tier: int, tenant: str) -> None:
        for first in self.firsts(tier):
            if first.tenant == tenant and self.is_in_lane(first):
                first.start = max(first.start, self.virtual.get(tier, 0), self.finish.get((tier, tenant), 0))
