"""What is looked at from outside while a soak runs, and at its end: memory, handles, the proxies' own pages, Redis."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.setting import Setting

SAMPLE_EVERY_S = 5.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment, `at_s` seconds after the start."""

    at_s: float
    rss_mib: float
    handles: int
    threads: int


@dataclass(slots=True)
class Watch:
    """Samples of processes by their name."""

    processes: Mapping[str, int]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    _began_s: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """From now on time counts. Of what was seen before only the very first is kept: how it was without load."""
        self._began_s = time.monotonic()
        self.samples = {name: [replace(seen[0], at_s=0.0)] for name, seen in self.samples.items()}
        self.sample()

    async def look(self) -> None:
        """Until it is canceled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_EVERY_S)

    def sample(self) -> None:
        """One of each."""
        at_s = time.monotonic() - self._began_s
        for name, pid in self.processes.items():
            self.samples.setdefault(name, []).append(_sample(pid, at_s))


def _sample(pid: int, at_s: float) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    handles = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Sample(at_s, int(status["VmRSS"].split()[0]) * 1024 / MIB, handles, int(status["Threads"]))


@dataclass(frozen=True, slots=True)
class Memory:
    """One process's resident memory behind `from_s`: `growth_mib` is what a straight line through it rises by."""

    median_mib: float
    most_mib: float
    growth_mib: float

    @staticmethod
    def of(samples: Sequence[Sample], from_s: float) -> Memory:
        """Of at least two samples behind `from_s`."""
        later = [sample for sample in samples if sample.at_s >= from_s]
        sizes = [sample.rss_mib for sample in later]
        slope, _ = statistics.linear_regression([sample.at_s for sample in later], sizes)
        return Memory(
            statistics.median(sizes),
            max(sizes),
            slope * (later[-1].at_s - later[0].at_s),
        )


@dataclass(slots=True)
class Counted:
    """What the sidecars' own metrics say, added up over the replicas, by tier."""

    admitted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    abandoned: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, page: str) -> None:
        """A replica's `/metrics`."""
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.name.removeprefix("admission_").removesuffix("_total")
                counter = getattr(self, name, None) if sample.name.endswith("_total") else None
                if isinstance(counter, Counter) and "admission_tier" in sample.labels:
                    counter[sample.labels["admission_tier"]] += int(sample.value)
                    if reason := sample.labels.get("admission_reason"):
                        self.reasons[reason] += int(sample.value)


def counted(setting: Setting) -> Counted:
    """Of all replicas."""
    found = Counted()
    for admin in setting.admins:
        found.add(_get(f"{admin}/metrics").decode())
    return found


def states(setting: Setting) -> list[Mapping[str, Any]]:
    """Each replica's `/state`."""
    return [json.loads(_get(f"{admin}/state")) for admin in setting.admins]


def left_over(setting: Setting) -> list[str]:
    """What should be gone when no request comes any more, a line each."""
    found = []
    for number, state in enumerate(states(setting)):
        pool = state["pool"]
        figures = {
            "requests under way": state["under_way"],
            "leases": pool["leases"],
            "waiting": pool["waiting"],
            "own leases": pool["store"]["own"]["leases"],
            "own waiting": pool["store"]["own"]["waiting"],
        }
        held = sum(tier["held"]["requests"] for tier in pool["tiers"])
        figures["requests held by tiers"] = held
        found += [f"replica {number}: {count} {what}" for what, count in figures.items() if count]
        if pool["store"]["state"] != "shared":
            found.append(f"replica {number}: the store is {pool['store']['state']} ({pool['store']['reason']})")
        found += _held(number, pool)
    return found


def _held(number: int, pool: Any) -> list[str]:
    """What the store counts as held, by all replicas."""
    held = {tier["tier"]: tier["held"] for tier in pool["tiers"] if any(tier["held"].values())}
    return [f"replica {number}: the store counts {held}"] if held else []


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        body: bytes = response.read()
        return body
