"""Routers that `benchmarks.fleet` compares with: the rules of other projects, each in a file with its source.

`python -m benchmarks.fleet_routers --rule NAME ENGINE_URL...` runs one. Each binds a request when it arrives.
"""

from __future__ import annotations

from benchmarks.fleet_routers.cache_aware import CacheAware
from benchmarks.fleet_routers.least_requests import LeastRequests
from benchmarks.fleet_routers.least_uncached_work import LeastUncachedWork
from benchmarks.fleet_routers.lmetric import LMetric
from benchmarks.fleet_routers.round_robin import RoundRobin
from benchmarks.fleet_routers.rule import Rule

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (RoundRobin, LeastRequests, CacheAware, LeastUncachedWork, LMetric)
}
"""Each rule by its name on the command line."""
