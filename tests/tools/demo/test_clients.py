"""The demo's traffic: every run of one seed gets the same, in order, and more than the engine can do."""

from __future__ import annotations

from sidecar.policy.compiler import load, shipped_policies
from sidecar.tools.demo.figures import STREAMS, arrivals


def test_one_seed_gives_one_sequence_and_another_seed_another() -> None:
    assert arrivals(3.0, seed=7) == arrivals(3.0, seed=7)
    assert arrivals(3.0, seed=7) != arrivals(3.0, seed=8)


def test_keys_and_tiers_are_those_of_the_shipped_policy() -> None:
    import hashlib

    policy = load(shipped_policies())
    for stream in STREAMS:
        tenant = policy.tenants[hashlib.sha256(stream.key.encode()).hexdigest()]
        level = policy.level_for(stream.header or stream.tier)
        assert level >= tenant.max_level, f"{stream.tier} would be clamped"
        assert stream.header is not None or level == tenant.level
