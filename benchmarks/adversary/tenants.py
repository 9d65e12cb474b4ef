"""A tenant whose clients give up, and one that opens requests and drops them at once, beside an equal tenant.

Both tenants send to one tier of the policy that we ship, and either could fill the pool alone. In virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.adversary.policies import NORMAL, shipped
from benchmarks.adversary.report import Line, at_least, at_most
from benchmarks.adversary.simulation import Decides, Request, Simulation, us
from sidecar.policy.rules import PoolRules

CLIENTS, TOKENS, HELD_S, PATIENCE_S = 200, 8_000, (5.0, 15.0), 5.0
RUN_S, WARM_UP_S = 1_200, 120
LEAST_SHARE = 0.45
OPENED, MOST_WAIT_S = 1_000, 20.0
"""The rules' own simulation measured 13 s in place of 1,499 s."""


def rows() -> Iterator[Line]:
    """Both attacks, and a control with two patient tenants."""
    rules = shipped().rules
    yield at_least("tenant whose clients give up after 5 s and retry: its share", share(rules, PATIENCE_S), LEAST_SHARE)
    equal = share(rules, None)
    yield Line("  control, it is as patient as the other", f"{equal:.2f}", "0.45 to 0.55", 0.45 <= equal <= 0.55)
    name = f"tenant that opened {OPENED:,} requests and dropped them: its next one waits"
    yield at_most(name, next_wait_s(rules, OPENED), MOST_WAIT_S, " s")
    yield at_most("  control, it opened none", next_wait_s(rules, 0), MOST_WAIT_S, " s")


def share(rules: PoolRules, patience_s: float | None, scheduler: Decides | None = None) -> float:
    """The part of the token-seconds that tenant `hasty` got, whose clients have that patience."""
    simulation = Simulation(rules, scheduler)
    luck = random.Random(7)
    for tenant, patience in (("hasty", patience_s), ("patient", None)):
        for _ in range(CLIENTS):
            _client(simulation, tenant, patience, luck)
    simulation.run(us(RUN_S))
    got = {"hasty": 0, "patient": 0}
    for request in simulation.sent:
        if request.ended_us is not None and request.ended_us >= us(WARM_UP_S):
            got[request.tenant] += request.tokens * request.held_us
    return got["hasty"] / max(1, sum(got.values()))


def _client(simulation: Simulation, tenant: str, patience_s: float | None, luck: random.Random) -> None:
    """Sends one request after the other, the next when the one before is over, however that was."""

    def send() -> None:
        held_us = us(luck.uniform(*HELD_S))
        patience_us = None if patience_s is None else us(patience_s * luck.uniform(0.9, 1.1))
        simulation.send(Request(NORMAL, TOKENS, held_us, tenant, patience_us=patience_us, on_over=send))

    simulation.at(us(luck.uniform(0, 5)), send)


def next_wait_s(rules: PoolRules, opened: int) -> float:
    """How long a tenant's next request waits after it opened and dropped so many, at most until the run's end."""
    simulation = Simulation(rules)
    luck = random.Random(7)
    for _ in range(CLIENTS):
        _client(simulation, "patient", None, luck)
    late = Request(NORMAL, TOKENS, us(10), "hasty")

    def open_and_drop() -> None:
        requests = [Request(NORMAL, TOKENS, us(10), "hasty") for _ in range(opened)]
        for drop in [simulation.send(request) for request in requests]:
            if drop is not None:
                drop()

    simulation.at(us(WARM_UP_S), open_and_drop)
    simulation.at(us(WARM_UP_S + 1), lambda: simulation.send(late) and None)
    simulation.run(us(WARM_UP_S + 3_600))
    return late.waited_us(simulation.now_us) / us(1)
