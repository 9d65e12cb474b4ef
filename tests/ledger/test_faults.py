"""The ledger and its replicas, in a world of faults: whatever fails, nothing is lost, run twice or given away twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sidecar.pools import ledger, member
from sidecar.pools.bids import Bids
from sidecar.pools.calls import BidGranted, Call, EngineView, Reply, Sums, WakeUp
from sidecar.pools.ledger import Ledger
from tests.ledger.replica import pool_rules
from tests.ledger.world import PROFILES, Violation, World, play
from tests.support.each import each

pytestmark = pytest.mark.hasty  # the time is the world's


@each("profile", ("all", "network", "growth", "roll", "rules", "failover", "empty_restart"))
def test_every_invariant_holds_under_faults(profile: str) -> None:
    play(1, profile)


@pytest.mark.soak
@each("profile", PROFILES)
def test_every_invariant_holds_in_more_runs(profile: str) -> None:
    for seed in range(2, 7):
        play(seed, profile)


# -- negative controls: with one rule left out some run must fail

Leave = Callable[[pytest.MonkeyPatch], None]


def _replaced(where: object, name: str, value: object) -> Leave:
    return lambda monkeypatch: monkeypatch.setattr(where, name, value)


def _counts_nothing(_: Any) -> Sums:
    return 0, 0, 0, 0, 0, 0, 0


def _forgets_the_bid(shown: Any, ticket: Any) -> bool:
    tier = shown._tiers[ticket.tier]
    bid = shown._bids.pop(ticket.id, None)
    if bid is None:
        tier.queue.remove(ticket)
    else:
        del tier.shown[bid]
    return False


def _ends_its_hold_with_anyone(held: Any) -> None:
    state = held.state
    stated = sum(m.stated == state.epoch and not m.is_new for m in state.members.values())
    if state.hold_until and (state.last_call >= state.hold_until or stated >= state.expected):
        state.hold_until = 0


def _accepts_any_number(held: Any, call: Call, known: Any) -> bool:
    if call.kind == "state":
        return True
    return call.kind == "call" and known is not None and known.stated == held.state.epoch


def _clock_that_goes_back(held: Any, server_us: int) -> Any:
    held._before, held.state.last_call = held.state.last_call, server_us + held.state.offset
    return held.state


execute, is_accepted, show = Ledger.execute, Ledger._is_accepted, Bids._show


def _says_a_grant_once(held: Any, call: Call, server_us: int) -> tuple[Reply, list[WakeUp]]:
    known = held.state.members.get(call.who) if held.state is not None else None
    before = set(known.outbox) if known is not None else set()
    reply, wake_ups = execute(held, call, server_us)
    reply.grants = [grant for grant in reply.grants if grant.bid not in before]
    return reply, wake_ups


def _keeps_a_pool_for_each_layout(held: Any, call: Call, server_us: int) -> tuple[Reply, list[WakeUp]]:
    if held.state is not None and held.state.layout != call.layout:
        others = held.__dict__.setdefault("others", {})
        others[held.state.layout] = held.state
        held.state = others.pop(call.layout, None)
    return execute(held, call, server_us)


def _compares_no_counts(held: Any, call: Call, known: Any) -> bool:
    call.bid_count = None
    return is_accepted(held, call, known)


def _shows_it_under_its_number(shown: Any, tier: Any, ticket: Any, now_us: int) -> Any:
    shown._made = ticket.number - 1
    return show(shown, tier, ticket, now_us)


CONTROLS: dict[str, tuple[Leave, tuple[str, ...]]] = {
    "outbox: a granted room counts only once its owner has stated it": (
        _replaced(BidGranted, "sums", property(_counts_nothing)),
        ("calm",),
    ),
    "repeat: a reply tells a grant once": (_replaced(Ledger, "execute", _says_a_grant_once), ("calm", "network")),
    "number: a late or repeated call is applied": (
        _replaced(Ledger, "_is_accepted", _accepts_any_number),
        ("network", "all"),
    ),
    "silence: a silent store begins no epoch": (_replaced(ledger, "LOST_US", 10**12), ("clock", "pause", "all")),
    "hold: an empty store grants at once": (_replaced(ledger, "HOLD_US", 0), ("flush_only", "empty_quick")),
    "newcomer: it ends the hold of an empty store alone": (
        _replaced(Ledger, "_end_hold", _ends_its_hold_with_anyone),
        ("flush_join", "all"),
    ),
    "alone: a replica decides alone at once": (_replaced(member, "ALONE_US", 0), ("empty_quick",)),
    "dead: no replica is dropped": (_replaced(ledger, "DEAD_US", 10**12), ("kill",)),
    "layout: each has a pool of its own": (_replaced(Ledger, "execute", _keeps_a_pool_for_each_layout), ("roll",)),
    "fresh: a bid has the number of its request": (
        _replaced(Bids, "_show", _shows_it_under_its_number),
        ("network", "engines", "all"),
    ),
    "count: a heartbeat does not compare the number of bids": (
        _replaced(Ledger, "_is_accepted", _compares_no_counts),
        ("lost_bids", "rules"),
    ),
    "withdraw: a client that leaves does not withdraw its bid": (
        _replaced(Bids, "remove", _forgets_the_bid),
        ("calm", "network"),
    ),
}


@pytest.mark.soak
@each("rule", CONTROLS)
def test_the_world_notices_that(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_it_out, profiles = CONTROLS[rule]
    leave_it_out(monkeypatch)
    assert any(_fails(seed, profile) for seed in range(60) for profile in profiles)


def _fails(seed: int, profile: str) -> bool:
    try:
        World(seed, profile).run()
    except (Violation, KeyError):  # a bid that is there twice
        return True
    return False


def _seconds_until_the_dead_one_is_dropped() -> int:
    """A replica is killed, and the clock is set back by 30 s. Another calls once a second."""
    held, second = Ledger(), 1_000_000
    for who in ("killed", "alive"):
        state = Call(1, who, 1, "state", engines=[EngineView("e#1", 10, 10, 10, 1_000, True)])
        state.rules, state.replaces = pool_rules([("only", 1.0)]), True
        held.execute(state, 100 * second)
    for seconds in range(1, 100):
        held.execute(Call(1, "alive", 1 + seconds, "call"), (100 + seconds - 30 * (seconds > 1)) * second)
        assert held.state is not None
        if "killed" not in held.state.members:
            return seconds
    return 100


def test_a_clock_that_goes_back_keeps_the_dead_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _seconds_until_the_dead_one_is_dropped() in (10, 11)
    monkeypatch.setattr(Ledger, "_now", _clock_that_goes_back)
    assert _seconds_until_the_dead_one_is_dropped() >= 40


def _who_enters(comes_s: float) -> list[str]:
    """After a loss, a replica that had found other tiers states at once, and again; one of the pool in between."""
    held, entered = Ledger(), list[str]()
    stated = [("other", 0, 100.0), ("own", 2, 100 + comes_s), ("other", 0, 102.3)]
    for number, (who, knew, at_s) in enumerate(sorted(stated, key=lambda it: it[2]), 1):
        state = Call(1, who, number, "state", rules=pool_rules([(who, 1.0)]), knew=knew)
        if held.execute(state, round(at_s * 1e6))[0].kind == "ok":
            entered.append(who)
    return entered


def test_a_replica_of_other_tiers_makes_the_pool_where_its_own_did_not_come_in_time() -> None:
    assert _who_enters(0.1) == ["own", "other"]
    assert _who_enters(9) == ["other", "own"]
