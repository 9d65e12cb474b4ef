"""The ledger and its replicas, in a world of faults: whatever fails, nothing is lost, run twice or given away twice."""

from __future__ import annotations

from typing import Any

import ledger_world
import pytest
from ledger_world import PROFILES, Violation, play

from sidecar.core import bids, ledger, member
from sidecar.core.calls import Cell
from tests.support.each import each


@each("profile", PROFILES)
def test_every_invariant_holds_under_every_fault(profile: str) -> None:
    play(1, profile)


@pytest.mark.long
@each("profile", PROFILES)
def test_every_invariant_holds_in_more_runs(profile: str) -> None:
    for seed in range(2, 8):
        play(seed, profile)


def _counts_nothing(entry: Any, tier: str) -> Cell:
    return Cell(tier, entry.engine)


def _forgets_the_bid(shown: Any, ticket: Any) -> bool:
    tier = shown._tiers[ticket.tier]
    bid = shown._bids.pop(ticket.id, None)
    if bid is None:
        tier.queue.remove(ticket)
    else:
        del tier.shown[bid]
    return False


CONTROLS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "a granted room counts only once its owner has stated it": (ledger._Entry, "cell", _counts_nothing, ("calm",)),
    "a silent store begins no epoch": (ledger, "LOST_US", 10**12, ("clock", "pause", "all")),
    "an empty store grants at once": (ledger, "HOLD_US", 0, ("flush_only", "empty_quick")),
    "no replica is dropped": (ledger, "DEAD_US", 10**12, ("kill",)),
    "a replica decides alone at once": (member, "ALONE_US", 0, ("empty_quick", "empty_restart")),
    "a client that leaves does not withdraw its bid": (bids.Bids, "remove", _forgets_the_bid, ("calm", "network")),
}


@pytest.mark.long
@each("rule", CONTROLS)
def test_the_world_notices_that(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: with one rule left out some run must fail."""
    where, name, value, profiles = CONTROLS[rule]
    monkeypatch.setattr(where, name, value)
    assert any(_fails(seed, profile) for profile in profiles for seed in range(30))


def _fails(seed: int, profile: str) -> bool:
    try:
        ledger_world.play(seed, profile)
    except Violation:
        return True
    return False
