"""One request without a key, of the largest size that is accepted, before the policy that we ship.

High asks for its reserve, 20% of the pool, and normal for 39%, with leases of 2 to 10 s. After five minutes the one
request comes and holds as long as the longest of theirs. The minute after it came is compared with the three before.
Ten times, with other ordinary requests each time. In virtual time, through the real scheduler.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.adversary.policies import HIGH, LOW, NORMAL, preempting, shipped
from benchmarks.adversary.report import Line, at_least, at_most
from benchmarks.adversary.simulation import Request, Simulation, Traffic, us
from sidecar.policy.model import Policy
from sidecar.policy.rules import largest_request
from sidecar.tools.loadgen import quantile

LONGEST_LEASE_S = 10.0
ORDINARY = (Traffic(HIGH, 0.20), Traffic(NORMAL, 0.39))
BEFORE_S, COMES_S, AFTER_S, END_S = 120, 300, 360, 660
TIMES = 10
LEAST_USE, PREEMPTED_WITHIN_S = 0.9, 2.0
CHOICES, TOKENS_EACH = 127, 60


@dataclass(frozen=True, slots=True)
class Minute:
    """How one attack went. `waited_s` is how long the large request itself waited, at most to the end of the run."""

    use_before: float
    use_after: float
    high_waits_s: Sequence[float]
    waited_s: float


def rows() -> Iterator[Line]:
    """The attack in both dimensions, with and without preemption."""
    policy, preempts = shipped(), shipped(preempting)
    tokens, most = largest_request(policy.rules, LOW)
    choices = min(CHOICES, most, policy.max_choices)
    yield Line("largest request without a key", f"{tokens:,} tokens or n: {choices}")
    sizes: dict[str, Callable[[], Request]] = {
        f"max_tokens: {tokens - 1_000:,}": lambda: Request(LOW, tokens - 1_000, us(LONGEST_LEASE_S)),
        f"n: {choices}": lambda: Request(LOW, choices * TOKENS_EACH, us(LONGEST_LEASE_S), requests=choices),
    }
    for name, request in sizes.items():
        yield from judged(name, [attack(policy, request(), seed) for seed in range(TIMES)], LONGEST_LEASE_S)
        again = [attack(preempts, request(), seed) for seed in range(TIMES)]
        yield from judged(f"{name}, preempt_after: 500ms", again, PREEMPTED_WITHIN_S)
    yield from control(policy)
    long = [attack(policy, Request(LOW, tokens - 1_000, us(60)), seed) for seed in range(TIMES)]
    yield Line("  the same, held for 60 s: high p99 wait over its minute", f"{_p99(long):.1f} s")


def judged(name: str, minutes: Sequence[Minute], most_s: float) -> Iterator[Line]:
    """The figures of one attack, and what is asked."""
    use = use_ratio(minutes)
    yield at_least(f"  {name}: pool use over its minute, to before", use, LEAST_USE)
    yield at_most("    high p99 wait over that minute", _p99(minutes), most_s, " s")
    waited_s = statistics.median(one.waited_s for one in minutes)
    yield Line(
        "    it waited itself, median and longest", f"{waited_s:.0f} s, {max(m.waited_s for m in minutes):.0f} s"
    )


def control(policy: Policy) -> Iterator[Line]:
    """Nothing comes: the minute is as the three before, or the measure is wrong."""
    minutes = [attack(policy, None, seed) for seed in range(TIMES)]
    use = use_ratio(minutes)
    yield Line("  control, no such request: pool use to before", f"{use:.2f}", "0.9 to 1.1", 0.9 <= use <= 1.1)


def attack(policy: Policy, large: Request | None, seed: int) -> Minute:
    """One run. Raises RuntimeError where the request is larger than its tier accepts: then it was no attack."""
    simulation = Simulation(policy.rules)
    for traffic in ORDINARY:
        traffic.start(simulation, seed)
    if large is not None:
        simulation.at(us(COMES_S), lambda: _send(simulation, large))
    simulation.run(us(AFTER_S))
    while large is not None and large.admitted_us is None and simulation.now_us < us(END_S):
        simulation.run(simulation.now_us + us(10))
    return Minute(
        simulation.use.mean(us(BEFORE_S), us(COMES_S)),
        simulation.use.mean(us(COMES_S), us(AFTER_S)),
        simulation.waits_s(HIGH, us(COMES_S), us(AFTER_S)),
        large.waited_us(simulation.now_us) / us(1) if large is not None else 0.0,
    )


def use_ratio(minutes: Sequence[Minute]) -> float:
    """Pool use after to before, over all runs."""
    return sum(one.use_after for one in minutes) / sum(one.use_before for one in minutes)


def _p99(minutes: Sequence[Minute]) -> float:
    return quantile([wait_s for one in minutes for wait_s in one.high_waits_s], 0.99)


def _send(simulation: Simulation, request: Request) -> None:
    if simulation.send(request) is None:
        raise RuntimeError(f"a request of {request.tokens} tokens and {request.requests} sequences is not accepted")
