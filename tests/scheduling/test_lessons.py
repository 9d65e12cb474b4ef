"""The three measured lessons behind the rules, in virtual time and at a tenth of the size: what they do, and what the
rules that were not chosen do instead.
"""

from __future__ import annotations

import random
from fractions import Fraction

from oracle import Policy
from simulation import Arrival, Outcome, simulate

from sidecar.policy.rules import Shares
from sidecar.scheduling import Admission, Scheduler, Ticket

CAPACITY = 20_000
MEAN_TOKENS = 500
MEAN_HELD_S = 5.0
LADDER = ("critical", "high", "normal", "low", "batch")
CRITICAL, HIGH, NORMAL, LOW, BATCH = range(5)


def policy_of(percents: tuple[int, ...], ceiling: int = NORMAL, promote_after_s: int = 30) -> Policy:
    return Policy(
        capacity=(CAPACITY, None),
        tiers=tuple(Shares(name, reserve=Fraction(p, 100)) for name, p in zip(LADDER, percents, strict=True)),
        promote_after_us=promote_after_s * 1_000_000,
        ceiling=ceiling,
    )


def stream(tier: int, load: float, seconds: int, seed: int = 1) -> list[Arrival]:
    """Requests of log-normal size that ask for `load` times the pool."""
    luck = random.Random(f"{tier}-{seed}")
    rate_per_s = load * CAPACITY / (MEAN_TOKENS * MEAN_HELD_S)
    arrivals, at_s = [], luck.expovariate(rate_per_s)
    while at_s < seconds:
        arrivals.append(request(luck, tier, len(arrivals), int(at_s * 1e6)))
        at_s += luck.expovariate(rate_per_s)
    return arrivals


def backlog(tier: int, requests: int) -> list[Arrival]:
    """Requests that are all there from the first moment."""
    luck = random.Random(f"{tier}-backlog")
    return [request(luck, tier, number, 0) for number in range(requests)]


def request(luck: random.Random, tier: int, number: int, at_us: int) -> Arrival:
    tokens = min(4_000, max(20, int(luck.lognormvariate(0, 0.8) * MEAN_TOKENS / 1.377)))
    return Arrival(at_us, f"{LADDER[tier]}-{number}", tier, tokens, int(luck.uniform(0.5, 1.5) * MEAN_HELD_S * 1e6))


class Partitions(Scheduler):
    """The rule that was not chosen: guaranteed shares and free overtaking.

    A request is admitted whenever it fits its own tier's unused share, or what the others' unused shares leave. No
    ticket holds its place.
    """

    def dispatch(self, now_us: int) -> list[Admission]:
        admitted = []
        for tier in self._tiers:
            while (head := tier.queue.head()) is not None and self._has_room(head):
                admitted.append(self._admit(self._order.candidate(tier, head, now_us), now_us))
        return admitted

    def _has_room(self, ticket: Ticket) -> bool:
        owed = {q.rules.level: max(0, q.rules.reserve_tokens - q.held_tokens) for q in self._tiers}
        free = self.rules.tokens - self._all_tokens
        others = sum(tokens for level, tokens in owed.items() if level != ticket.tier)
        return ticket.tokens <= free and (ticket.tokens <= owed[ticket.tier] or ticket.tokens <= free - others)


def besieged_large_requests(kind: type[Scheduler]) -> Outcome:
    """The batch tier is guaranteed 1,000 tokens and asks for 2,500 at a time, while the others ask for 1.2 pools."""
    policy = policy_of((10, 30, 40, 15, 5))
    others = [arrival for tier, load in enumerate((0.1, 0.4, 0.5, 0.2)) for arrival in stream(tier, load, 300)]
    large = [Arrival(n * 10_000_000, f"large-{n}", BATCH, 2_500, 5_000_000) for n in range(30)]
    return simulate(kind(policy.rules()), others + large, until_us=300_000_000)


def test_a_request_bigger_than_its_tiers_reserve_still_gets_in():
    outcome = besieged_large_requests(Scheduler)
    assert len(outcome.admitted[BATCH]) >= 20
    stuck = [arrival for arrival in outcome.left if arrival.tier == BATCH and arrival.at_us < 200_000_000]
    assert stuck == []


def test_a_request_bigger_than_its_tiers_share_starves_where_overtaking_is_free():
    outcome = besieged_large_requests(Partitions)
    assert len(outcome.admitted.get(BATCH, [])) <= 2
    oldest = min(arrival.at_us for arrival in outcome.left if arrival.tier == BATCH)
    assert outcome.ended_us - oldest > 250_000_000
    assert len(outcome.admitted[HIGH]) > 500


def deep_batch_backlog(policy: Policy) -> Outcome:
    """High load at 60% of the pool for ten minutes, and a batch backlog that fills the pool for eight."""
    arrivals = stream(HIGH, 0.6, 600) + backlog(BATCH, 4_000)
    return simulate(Scheduler(policy.rules()), arrivals, until_us=600_000_000)


def test_a_deep_batch_backlog_leaves_high_its_short_wait_and_batch_its_share():
    outcome = deep_batch_backlog(policy_of((0, 20, 0, 0, 5), ceiling=NORMAL))
    assert outcome.percentile_s(HIGH, 99) < 10
    assert [arrival for arrival in outcome.left if arrival.tier == HIGH and arrival.at_us < 590_000_000] == []
    assert 0.25 < outcome.token_seconds(BATCH) / (CAPACITY * 600) < 0.45


def test_aging_to_the_top_without_reserves_turns_a_deep_backlog_into_first_come_first_served():
    outcome = deep_batch_backlog(policy_of((0, 0, 0, 0, 0), ceiling=CRITICAL))
    waits = outcome.waits_s(HIGH) + [(outcome.ended_us - a.at_us) / 1e6 for a in outcome.left if a.tier == HIGH]
    assert max(waits) > 200
    assert sorted(waits)[len(waits) // 2] > 50


def overload(percents: tuple[int, ...]) -> Outcome:
    """1.3 times what the pool can do, from all tiers, `high` asking for 45% of it."""
    loads = (0.05, 0.45, 0.40, 0.20, 0.20)
    arrivals = [arrival for tier, load in enumerate(loads) for arrival in stream(tier, load, 400)]
    return simulate(Scheduler(policy_of(percents).rules()), arrivals, until_us=400_000_000)


def test_a_fully_reserved_pool_makes_high_wait_under_overload():
    outcome = overload((10, 30, 40, 15, 5))
    assert outcome.percentile_s(HIGH, 50) > 20


def test_a_half_reserved_pool_keeps_high_fast_under_the_same_overload():
    outcome = overload((10, 20, 10, 5, 5))
    assert outcome.percentile_s(HIGH, 50) < 1
    assert outcome.percentile_s(HIGH, 99) < 5
    assert all(outcome.admitted[tier] for tier in (NORMAL, LOW, BATCH))
