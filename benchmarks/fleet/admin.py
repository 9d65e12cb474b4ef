"""Admin port of `sidecar serve` with engines: drain, resume, and what its ledgers hold."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from sidecar.engines.pages import Metrics

DRAIN_WITHIN_S = 120.0


def engines(admin: str) -> Mapping[str, Mapping[str, Any]]:
    """`GET /engines`: what the pool knows of each, by name."""
    with urllib.request.urlopen(f"{admin}/engines", timeout=20) as response:
        listed = json.load(response)["engines"]
    return {one["name"]: one for one in listed}


def held(admin: str) -> Mapping[str, int]:
    """What all engines' ledgers hold together, and what they count in flight; all 0 when nothing runs."""
    found = {"tokens": 0, "requests": 0, "unprefilled_tokens": 0}
    for one in engines(admin).values():
        for name in found:
            value = int(one[name] if name in one else one["held"][name])
            if value < 0:
                raise ValueError(f"{one['name']} holds {value} {name}")
            found[name] += value
    return found


def takes_new(admin: str, engine: str) -> bool:
    """Whether the sidecar sends new requests to an engine."""
    return bool(engines(admin)[engine]["takes_new"])


def drain(admin: str, engine: str) -> None:
    """Returns when the engine holds nothing: what a preStop hook does."""
    _post(f"{admin}/engines/{engine}/drain?wait=true")


def resume(admin: str, engine: str) -> None:
    """The engine takes new requests again."""
    _post(f"{admin}/engines/{engine}/resume")


def count(admin: str, metric: str) -> float:
    """The sum of a metric's samples; 0 where it has none."""
    with urllib.request.urlopen(f"{admin}/metrics", timeout=20) as response:
        return Metrics(response.read().decode()).count(metric) or 0.0


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, b""), timeout=DRAIN_WITHIN_S):
        pass
