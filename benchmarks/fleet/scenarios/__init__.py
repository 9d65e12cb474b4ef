"""Scenarios of `benchmarks.fleet`: what happens when engines break, are slow, or are replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.fleet.scenarios import killed, replicas, rolling, slow, storm
from benchmarks.fleet.setting import Setting
from benchmarks.fleet.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run` gets the router's name, prints what it measures, and returns its checks."""

    title: str
    run: Callable[[str, Setting], Sequence[Verdict]]


SCENARIOS: Mapping[str, Scenario] = {
    "two-sidecars": Scenario("two sidecars with skewed ingress, and one", replicas.run),
    "kill": Scenario("kill -9 of one of four engines under load", killed.one),
    "kill-all": Scenario("all four engines killed for 10 s with requests queued", killed.all_of_them),
    "rolling": Scenario("rolling update of all engines by drain", rolling.run),
    "slow": Scenario("one engine four times slower than it says", slow.run),
    "storm": Scenario("a 503 storm and a flapping engine", storm.run),
}
