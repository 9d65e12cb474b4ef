"""Tenants' limits in the ledger's call: both ledgers answer the same bytes, and a request is charged once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import msgspec
import pytest
import redis

from sidecar.pools.calls import DEAD_US, LAYOUT, Bid, Call, ChargeSettled, EngineView, Metered, Reply, Running
from sidecar.pools.ledger import Ledger
from sidecar.pools.redis import script
from sidecar.scheduling.rate_limit import GUESSED_US, Limit
from tests.ledger.player import rules_told
from tests.ledger.stored_ledger import Both, StoredLedger
from tests.support.each import each

RULES = rules_told({"tiers": [{"name": "a", "reserve": 0.5}, {"name": "b"}]})
VIEW = [EngineView("e#1", 1000, 1000, 1000, 1000, True)]
EACH = (60, 600, 3, 60_000_000)
AT_ONCE = (None, None, 2, 60_000_000)
TENANTS = ("a", "b", 'an "odd" \\ one\n')
ACCOUNTS = (*TENANTS, "a model llama/70b")
USERS = ("a user 1", "a user 2", "a user 3")
KEPT = 2
"""So many of the accounts of `USERS` are kept."""


@pytest.fixture
def stored(server: Any) -> StoredLedger:
    server.flushdb()
    return StoredLedger(server, as_function=True)


class Replica:
    """One side of the ledger, which tells what it likes."""

    def __init__(self, ledger: Any, who: str) -> None:
        self.ledger, self.who, self.number, self.asked = ledger, who, 0, 0

    def call(self, now_us: int, kind: Any = "call", **fields: Any) -> Reply:
        self.number += 1
        if kind == "state":
            fields |= {"whole": True, "rules": RULES, "engines": VIEW, "knew": 1}
        call = Call(LAYOUT, self.who, self.number, kind, **fields)
        return self.ledger.execute(call, now_us)[0]

    def ask(self, limits: tuple[Any, ...], tokens: int = 10, *, charges: bool = True, tenant: str = "a") -> Metered:
        self.asked += 1
        return Metered(self.asked, tenant, tokens, charges, *limits)

    def ask_of(
        self, accounts: Mapping[str, tuple[Any, ...]], tokens: int = 10, *, charges: bool = True
    ) -> list[Metered]:
        """The questions about one request."""
        self.asked += 1
        return [
            Metered(self.asked, account, tokens, charges, *limits, KEPT if account in USERS else 0)
            for account, limits in accounts.items()
        ]


# -- the same bytes


def play(ledger: Any, seed: int, steps: int = 120) -> int:
    """Random calls of three replicas. Returns how many requests were refused."""
    luck, now, refused = random.Random(seed), 10**6, 0
    limits = {account: random_limits(luck) for account in (*ACCOUNTS, *USERS)}
    replicas = [Replica(ledger, who) for who in ("x", "y", "z")]
    charged: dict[str, list[Any]] = {replica.who: [] for replica in replicas}
    last: dict[str, list[Metered]] = {}
    for _ in range(steps):
        now += luck.choice([0, 1, 999, 100_000, 1_000_000, 1_800_000])
        replica = luck.choice(replicas)
        if luck.random() < 0.1:
            limits[luck.choice([*limits])] = random_limits(luck)
        own = charged[replica.who]
        before = last.get(replica.who, [])
        repeated = {it.number for it in before[: luck.randrange(3)]}
        repeats = [] if luck.random() < 0.9 else [it for it in before if it.number in repeated]
        asked = [
            metered
            for _ in range(luck.randrange(4))
            for metered in replica.ask_of(
                {account: limits[account] for account in random_accounts(luck)},
                luck.choice([0, 1, 10, 100, 10**9]),
                charges=luck.random() < 0.8,
            )
        ]
        ended = [own.pop(luck.randrange(len(own))) for _ in range(min(len(own), luck.randrange(3)))]
        fields = {
            "metered": repeats + asked,
            "settled": [
                ChargeSettled(
                    replica.number + 1 - luck.randrange(2), charge, luck.choice([None, 0, 7, 10**9, 2**53 - 1]),
                    luck.random() < 0.7, luck.random() < 0.7,
                )
                for charge in ended
            ],
            "running": [
                Running(tenant, luck.randrange(3)) for tenant in luck.sample(TENANTS, luck.randrange(3))
            ],
        }  # fmt: skip
        is_statement = luck.random() < 0.05
        if is_statement and luck.random() < 0.7:
            replica.call(now, "ask")  # the answer of the last call was lost
        if luck.random() < 0.02:
            replica.call(now, "bye")
        reply = replica.call(now, "state" if is_statement else "call", **fields)
        if reply.kind == "unknown":
            reply = replica.call(now, "state", **fields)
        last[replica.who] = [it for it in fields["metered"] if isinstance(it, Metered)]
        own += [verdict.charge for verdict in reply.verdicts if verdict.charge is not None]
        refused += sum(verdict.over is not None for verdict in reply.verdicts)
        assert [verdict.number for verdict in reply.verdicts] == [it.number for it in last[replica.who]]
        for _, group in groupby(reply.verdicts, lambda verdict: verdict.number):
            assert len({verdict.charge is None for verdict in group}) == 1, "charged to all accounts or to none"
    return refused


def play_some(stored: StoredLedger, programs: int) -> int:
    refused = 0
    for seed in range(programs):
        stored.client.flushdb()
        refused += play(Both(stored), seed)
    return refused


def random_accounts(luck: random.Random) -> list[str]:
    """Those of one request: a request has one user."""
    return luck.sample(ACCOUNTS, luck.choice([1, 1, 2, 3])) + luck.sample(USERS, luck.choice([0, 1]))


def random_limits(luck: random.Random) -> tuple[Any, ...]:
    return (
        luck.choice([None, 1, 60, 600]),
        luck.choice([None, 7, 600, 6000, 100_000_000]),
        luck.choice([None, 1, 3]),
        luck.choice([1_000_000, 10_000_000, 60_000_000]),
    )


def play_refunds(ledger: Any) -> list[int | None]:
    """What is left of 600 tokens after refunds, the last of them of a charge before the bucket was empty."""
    (x,) = joined(ledger, "x")

    def charge(now_us: int, tokens: int) -> Any:
        (verdict,) = x.call(now_us, metered=[x.ask(EACH, tokens)]).verdicts
        return verdict.charge

    def refund(now_us: int, charge: Any) -> int | None:
        settled = [ChargeSettled(x.number + 1, charge, 0, is_counted=False, was_held=True)]
        (verdict,) = x.call(now_us, settled=settled, metered=[x.ask(EACH, 0, charges=False)]).verdicts
        return verdict.tokens and verdict.tokens[0]

    first, second = charge(1_000, 100), charge(1_000, 100)
    left = [refund(1_000, second), refund(1_000, first)]
    late = charge(1_000, 100)
    for second in range(2, 21, 2):
        x.call(second * 10**6 + 1_000, running=[Running("a", 0)])
    charge(20_001_000, 300)
    return [*left, refund(20_001_000, late)]


def test_refunds_leave_no_less_charged_than_what_was_used_from_the_start(stored: StoredLedger) -> None:
    assert play_refunds(Both(stored)) == [500, 500, 300]


def test_both_ledgers_give_the_same_bytes(stored: StoredLedger) -> None:
    assert play_some(stored, 12) > 100


@pytest.mark.soak
def test_both_ledgers_give_the_same_bytes_for_long(stored: StoredLedger) -> None:
    for seed in range(100, 500):
        stored.client.flushdb()
        play(Both(stored), seed)


@each(
    "rule",
    (
        ("refund > 0 and charge[CH_AT] >= account[A_SINCE]", "refund > 0"),
        ("if first_call > last_number then", "if true then"),
        ("max(UNIT, (rpm or 0) * burst)", "(rpm or 0) * burst"),
        ("- (account[A_REFUNDED] - charge[CH_REFUNDED]) * UNIT", ""),
        ("if is_statement then forgotten[who] = true end", ""),
        ("{}, charges and not is_over", "{}, charges"),
        ("if known[verdict[1]] then settle(verdict[2], 0, true, false) end", ""),
        ("tonumber(last[2] or 0) + 1", "now"),
    ),
)
def test_another_law_is_noticed(rule: tuple[str, str], stored: StoredLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls."""
    parts = script.texts()
    assert parts["limits"].count(rule[0]) == 1
    parts["limits"] = parts["limits"].replace(*rule)
    monkeypatch.setattr(script, "texts", lambda: parts)
    wrong = StoredLedger(stored.client, as_function=True)
    with pytest.raises(AssertionError):
        _ = play_refunds(Both(wrong)), play_some(wrong, 60)


# -- what is decided


@pytest.fixture(params=["process", "store"])
def ledger(request: pytest.FixtureRequest, stored: StoredLedger) -> Any:
    return Ledger() if request.param == "process" else stored


def joined(ledger: Any, *names: str) -> list[Replica]:
    replicas = [Replica(ledger, name) for name in names]
    for replica in replicas:
        replica.call(1_000, "state")
    return replicas


def verdicts(reply: Reply) -> list[Limit | None]:
    return [verdict.over for verdict in reply.verdicts]


def test_three_replicas_share_a_limit_and_a_question_charges_nothing(ledger: Any) -> None:
    x, y, z = joined(ledger, "x", "y", "z")
    assert verdicts(x.call(2_000, metered=[x.ask(EACH, 300)])) == [None]
    assert verdicts(y.call(2_000, metered=[y.ask(EACH, 300, charges=False), y.ask(EACH, 300)])) == [None, None]
    (verdict,) = z.call(2_000, metered=[z.ask(EACH, 10)]).verdicts
    assert (verdict.over, verdict.after_us, verdict.charge) == (Limit.TOKENS, 1_000_000, None)
    assert (verdict.requests, verdict.tokens) == ((58, 2_000_000), (0, 60_000_000))


def test_a_request_is_charged_to_all_of_its_accounts_or_to_none(ledger: Any) -> None:
    x, y = joined(ledger, "x", "y")
    both = {"a": (60, 600, 3, 60_000_000), "a model m": (None, 100, 2, 60_000_000)}
    asked = [*x.ask_of(both, 60), *x.ask_of(both, 60), x.ask(both["a"], 10)]
    bids = [Bid(10 + number, "a", "a", 10, 1, 1, 1, {}, [], 0, number) for number in (1, 2, 3)]
    first = x.call(2_000, metered=asked, bids=bids)
    assert verdicts(first) == [None, None, None, Limit.TOKENS, None]
    assert [verdict.charge is None for verdict in first.verdicts] == [False, False, True, True, False]
    assert ([grant.bid for grant in first.grants], first.waiting) == ([11, 13], 0)
    x.call(2_000, "ask")  # the answer got lost, and the client of the third left
    again = x.call(2_000, "state", metered=asked[:2])
    assert again.verdicts == first.verdicts[:2]
    lefts = [verdict.tokens for verdict in y.call(2_000, metered=y.ask_of(both, 0, charges=False)).verdicts]
    assert lefts == [(540, 6_000_000), (40, 36_000_000)]
    held = [replica.call(2_000, metered=replica.ask_of(both, 20)).verdicts[1] for replica in (x, y)]
    assert [verdict.over for verdict in held] == [None, Limit.CONCURRENT]


def test_what_a_killed_replica_had_running_is_free_when_it_is_dead(ledger: Any) -> None:
    x, y = joined(ledger, "x", "y")
    assert verdicts(x.call(2_000, metered=[x.ask(AT_ONCE), x.ask(AT_ONCE)])) == [None, None]
    now, refusal = 2_000, [Limit.CONCURRENT]
    while now < DEAD_US:
        (verdict,) = y.call(now, metered=[y.ask(AT_ONCE)]).verdicts
        assert (verdict.over, verdict.after_us) == (Limit.CONCURRENT, GUESSED_US), refusal
        now += 1_000_000
    assert verdicts(y.call(now + 1_000_000, metered=[y.ask(AT_ONCE)])) == [None]


def test_a_replica_with_other_rules_keeps_the_charges_that_it_knows(ledger: Any) -> None:
    (x,) = joined(ledger, "x")
    x.call(2_000, metered=[x.ask(EACH, 300)])
    (verdict,) = x.call(2_000, "state", replaces=True, metered=[x.ask(EACH, 0, charges=False)]).verdicts
    assert verdict.tokens == (300, 30_000_000)


def test_what_ended_is_heard_once(ledger: Any) -> None:
    (x,) = joined(ledger, "x")
    kept, ended = (verdict.charge for verdict in x.call(2_000, metered=[x.ask(EACH, 300), x.ask(EACH, 200)]).verdicts)
    assert kept is not None
    told = [ChargeSettled(x.number + 1, ended, 0, is_counted=False, was_held=True)]
    x.call(2_000, settled=told)  # the answer gets lost
    (verdict,) = x.call(2_000, "state", settled=told, metered=[x.ask(EACH, 0, charges=False)]).verdicts
    assert (verdict.requests, verdict.tokens) == ((59, 1_000_000), (300, 30_000_000))


def test_the_store_keeps_tenants_that_have_used_their_limits_lately_and_no_others(stored: StoredLedger) -> None:
    (x,) = joined(stored, "x")
    asked = [x.ask(EACH, tenant=f"t{number}") for number in range(20)]
    x.call(2_000, metered=asked)
    keys = stored.client.keys("*:a:*")
    assert len(keys) == 20
    assert all(3_600_000 < stored.client.pttl(key) <= 3_602_000 for key in keys)
    (counts,) = stored.client.keys("*:n:x")
    assert stored.client.hlen(counts) == 20
    x.call(3_000, running=[Running(it.tenant, 0) for it in asked])
    assert stored.client.keys("*:n:*") == []
    x.call(4_000, metered=[x.ask(EACH)])
    x.call(5_000, "bye")
    assert stored.client.keys("*:n:*") == []


@each(
    "wrong",
    ({"metered": [[1, "t", -1, True]]}, {"metered": [[1, "t", 1, True, 0.5]]}, {"running": [["t", None]]},
     {"settled": [[1, ["t"], None, True, True]]}, {"settled": [[1, None, None, True, True]]}),
)  # fmt: skip
def test_what_is_no_question_is_no_call(wrong: dict[str, Any], stored: StoredLedger) -> None:
    joined(stored, "x")
    packed = msgspec.msgpack.encode(msgspec.structs.replace(Call(LAYOUT, "x", 2, "call"), **wrong))
    with pytest.raises(redis.ResponseError, match="this is no call of the ledger"):
        stored.answer(packed, 2_000)
