"""Overviews for tests: a pool in which batch starves, and the parts to make others of."""

from __future__ import annotations

from typing import Any

from sidecar.cluster.document import (
    EngineRow,
    OldestWaiter,
    Overview,
    Promised,
    RefusalView,
    ReplicaView,
    TenantView,
    TierView,
)
from sidecar.cluster.phrases import headline, starving
from sidecar.engines.view import Amount
from sidecar.lengths.estimator import EngineSizesDocument
from sidecar.telemetry.recent import Bucket, Overtakings

AT_S = 1_700_000_003.0


def tier(name: str, level: int = 0, **more: Any) -> TierView:
    """A tier with nothing in it; `more` replaces what it has."""
    plain: dict[str, Any] = {
        "held": Amount(0, 0),
        "reserve": Amount(10_000, 10),
        "limit": Amount(100_000, 100),
        "queued": Amount(0, 0),
        "borrowed_tokens": 0,
        "lent_tokens": 0,
        "oldest": None,
        "slo": Promised(),
        "recent": [Bucket(1_700_000_000 - 5 * n) for n in range(59, -1, -1)],
        "overtaken_by": {},
    }
    return TierView(tier=name, level=level, **{**plain, **more})


def starved(name: str = "batch", by: str = "high", wait_s: float = 192.0, starved_s: float = 160.0) -> TierView:
    """A tier whose oldest starves."""
    recent = [Bucket(1_700_000_000 - 5 * n, wait_max_s=max(0.0, wait_s - 5 * n)) for n in range(59, -1, -1)]
    return tier(
        name,
        1,
        held=Amount(20_000, 20),
        queued=Amount(30_000, 30),
        borrowed_tokens=5_000,
        oldest=OldestWaiter(wait_s, starved_s, {by: 81_000}, "one"),
        recent=recent,
        overtaken_by={by: Overtakings(41, 81_000, {"level": 40, "reserve": 1})},
    )


def gave_way(name: str = "batch", level: int = 1) -> TierView:
    """A tier of which three requests were preempted."""
    recent = [Bucket(1_700_000_000 - 5 * n) for n in range(59, 1, -1)]
    lost = [
        Bucket(1_699_999_995, preempted=2, engine_lost_s=6.4),
        Bucket(1_700_000_000, preempted=1, engine_lost_s=3.2),
    ]
    return tier(name, level, recent=[*recent, *lost])


def sizes(engine_name: str | None = None, **more: Any) -> EngineSizesDocument:
    """The leases at an engine; `more` replaces what they have."""
    plain: dict[str, Any] = {
        "quantile": 0.95,
        "overlap": 1.0,
        "reason": "learn is cautious, and the engine has not preempted more than is tolerated",
        "is_raised": False,
        "running": 20,
        "held_tokens": 40_000,
        "expected_tokens": 44_000,
        "used_tokens": 30_000,
        "growths": 12,
        "preemptions": None,
    }
    return EngineSizesDocument(engine=engine_name, **{**plain, **more})


def engine(name: str, **more: Any) -> EngineRow:
    """An engine that holds a little; `more` replaces what it has."""
    plain: dict[str, Any] = {
        "id": f"{name}#1",
        "state": "ready",
        "reason": "",
        "capacity": Amount(400_000, 160),
        "held": Amount(20_000, 20),
        "unprefilled_tokens": 3_000,
        "claims": 1,
        "in_flight": 20,
    }
    return EngineRow(name=name, **{**plain, **more})


def engines() -> list[EngineRow]:
    """Four engines: one as usual, one that drains, one that is down, and one that another replica sees otherwise."""
    return [
        engine("a", hit_rate=0.42, is_measured=True),
        engine("b", state="draining", claims=0, hit_rate=0.3),
        engine("c", id="c#3", state="down", reason="connection refused by http://c:8000", held=Amount(0, 0)),
        engine("d", capacity=Amount(None, 160), elsewhere="down at gpu-2 0123abcd"),
    ]


def overview(*tiers: TierView, **more: Any) -> Overview:
    """A whole one; without tiers, high goes first and batch starves."""
    shown = list(tiers) or [tier("high", held=Amount(70_000, 70)), starved()]
    plain: dict[str, Any] = {
        "replica": "one",
        "pool": "default",
        "engine": "vllm",
        "generation": "abc",
        "at_s": AT_S,
        "mode": "local",
        "starving": starving(shown),
        "headline": headline(shown),
        "capacity": Amount(100_000, 100),
        "held": Amount(90_000, 90),
        "free": Amount(10_000, 10),
        "tenants": [TenantView("acme", 90_000, 90, 30)],
        "refusals": [RefusalView(AT_S, "batch", "acme", "queue_full", 503, "no place", "id-1", 2.0, "one")],
        "replicas": [ReplicaView("one", "host", 90, 30, 0.0)],
        "store": None,
        "notices": [],
    }
    return Overview(tiers=shown, **{**plain, **more})
