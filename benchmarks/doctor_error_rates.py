"""How often `sidecar doctor` takes one scheduler for another: the thresholds of `sidecar.tools.doctor.judgment`,
simulated.

Each run draws a burst as the doctor does, plays it through an engine with so many slots, and judges the order of the
first tokens. What differs is who gets a slot that comes free. No network and no engine: this is about chance alone.

    python benchmarks/doctor_error_rates.py --runs 10000
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sidecar.tools.doctor.burst import BurstPlan
from sidecar.tools.doctor.judgment import Effect, ServedRequest, judge
from sidecar.tools.doctor.target import LEVELS

Key = Callable[[int, int, random.Random], tuple[float, ...]]
"""From a request's level, its place of arrival and chance to its place in the queue; the smallest is served first."""


def first_come(level: int, arrival: int, chance: random.Random) -> tuple[float, ...]:
    """FCFS."""
    del level, chance
    return (arrival,)


def first_come_roughly(level: int, arrival: int, chance: random.Random) -> tuple[float, ...]:
    """FCFS, with requests that come in up to ten places early or late."""
    del level
    return (arrival + chance.uniform(-10, 10),)


def any_order(level: int, arrival: int, chance: random.Random) -> tuple[float, ...]:
    """An order that has nothing to do with anything."""
    del level, arrival
    return (chance.random(),)


def by_priority(level: int, arrival: int, chance: random.Random) -> tuple[float, ...]:
    """Priority, then arrival."""
    del chance
    return (level, arrival)


def by_priority_inverted(level: int, arrival: int, chance: random.Random) -> tuple[float, ...]:
    """The wrong way round."""
    del chance
    return (-level, arrival)


def head_start(level: int, arrival: int, chance: random.Random) -> tuple[float, ...]:
    """A head start of 20 places per level, as Dynamo's, with bursts that are longer than that."""
    del chance
    return (arrival + 20 * level,)


def mostly_by_priority(level: int, arrival: int, chance: random.Random) -> tuple[float, ...]:
    """Priority for four requests of five."""
    return (level, arrival) if chance.random() < 0.8 else (chance.choice((0, 1, 2)), arrival)


SCHEDULERS: Mapping[str, Sequence[Key]] = {
    "first come": (first_come,),
    "first come, roughly": (first_come_roughly,),
    "any order": (any_order,),
    "by priority": (by_priority,),
    "by priority, two replicas": (by_priority, by_priority),
    "by priority for 4 of 5": (mostly_by_priority,),
    "head start of 20 places": (head_start,),
    "inverted": (by_priority_inverted,),
    "one replica of two by priority": (by_priority, first_come),
}
"""By name, the queue of each replica that a burst is spread over."""


def played(keys: Sequence[Key], plan: BurstPlan, slots: int, chance: random.Random) -> Sequence[ServedRequest]:
    """The requests of a burst that had to wait for one of the `slots` of their replica, with their first tokens."""
    levels, lengths = plan.levels(), plan.lengths()
    waited: list[ServedRequest] = []
    places = [chance.randrange(len(keys)) for _ in levels]
    for replica, key in enumerate(keys):
        arrivals = [arrival for arrival in range(plan.requests) if places[arrival] == replica]
        free_s = [lengths[arrival] * chance.uniform(0.95, 1.05) for arrival in arrivals[:slots]]
        heapq.heapify(free_s)
        for arrival in sorted(arrivals[slots:], key=lambda one: key(levels[one], one, chance)):
            first_token_s = heapq.heappop(free_s)
            waited.append(ServedRequest(levels[arrival], arrival, first_token_s))
            heapq.heappush(free_s, first_token_s + lengths[arrival] * chance.uniform(0.95, 1.05))
    return waited


def rates(keys: Sequence[Key], requests: int, slots: int, runs: int) -> Mapping[Effect, float]:
    """The share of runs that ended in each verdict."""
    chance = random.Random(11)
    found = Counter(
        judge(played(keys, BurstPlan(requests, 20, None, seed), slots // len(keys), chance), LEVELS).effect
        for seed in range(runs)
    )
    return {effect: found[effect] / runs for effect in Effect}


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="of each line (default %(default)s)")
    parser.add_argument("--slots", type=int, default=4, help="requests that run at once (default %(default)s)")
    args = parser.parse_args()
    print(f"{args.runs} runs each, {args.slots} slots; share of runs with each verdict\n")
    print(f"| scheduler | waited | {' | '.join(effect.value for effect in Effect)} |")
    print(f"|---|---|{'---|' * len(Effect)}")
    for waiting in (24, 36):
        for name, keys in SCHEDULERS.items():
            found = rates(keys, waiting + args.slots, args.slots, args.runs)
            print(f"| {name} | {waiting} | {' | '.join(f'{found[effect]:.2%}' for effect in Effect)} |")


if __name__ == "__main__":
    main()
