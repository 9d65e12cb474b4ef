"""What the ledger's function remembers of a pool is only what the store has: it is believed only where it is that."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import redis

from sidecar.pools import ledger
from sidecar.pools.calls import LAYOUT, Bid, Call, Cell, EngineView
from sidecar.scheduling.tickets import TicketGain
from tests.ledger.player import LedgerPlayer, rules_told
from tests.ledger.stored_ledger import Both, Edit, StoredLedger
from tests.ledger.world import World
from tests.scheduling.player import first_difference
from tests.scheduling.programs import programs
from tests.support.each import each

pytestmark = pytest.mark.hasty  # replicas are as patient as they are

FAILS: Edit = (
    "ledger",
    "  local answered = answer()\n",
    "  local answered = answer()\n  if arguments[3] then error('it fails') end\n",
)
COUNTS: Edit = (
    "ledger",
    "local function execute(its_keys, arguments)\n",
    """local function size(of)
  local found = 1
  for name, it in pairs(of) do
    found = found + (type(name) == 'table' and size(name) or 0) + (type(it) == 'table' and size(it) or 0)
  end
  return found
end

local function execute(its_keys, arguments)
  if arguments[1] == 'size' then return size(kept) end
""",
)
BELIEVED: dict[str, list[Edit]] = {
    "without a look at the store": [
        ("root", "if known.state and known.state[1] ~= fields.state then", "if false then"),
        ("root", "if it and it[1] == text then", "if it then"),
    ],
    "after a call that failed": [
        (
            "ledger",
            "kept[root] = nil, nil, nil, kept[root] or {}, nil",
            "fields.no = nil, nil, nil, kept[root] or {}, nil",
        ),
    ],
}


class Troubled(StoredLedger):
    """Beside each call happens something of which the function may keep a memory."""

    def __init__(self, client: Any, edits: Iterable[Edit] = (), *, is_patient: bool = False) -> None:
        super().__init__(client, as_function=True, is_patient=is_patient, edits=[FAILS, *edits])
        self._draw, self._home = random.Random(1), client
        self._other = redis.Redis(port=client.connection_pool.connection_kwargs["port"], db=1)
        self._copied: dict[bytes, bytes] = {}

    def answer(self, packed: bytes, now_us: int | None = None) -> bytes:
        self._draw.choice(
            (self._fails, self._in_another_database, self._is_undone, self._is_old, self._is_loaded_anew)
        )(packed, now_us)
        self.wake_ups()
        return super().answer(packed, now_us)

    def _fails(self, packed: bytes, now_us: int | None) -> None:
        """The same call, which fails when everything is decided."""
        with pytest.raises(redis.ResponseError, match="it fails"):
            self._home.execute_command("FCALL", self.function, 1, *self.keys[:1], packed, now_us, "fails")

    def _in_another_database(self, packed: bytes, now_us: int | None) -> None:
        """A pool of the same name, which began as a copy."""
        if not self._other.dbsize() or self._draw.random() < 0.2:
            self._put(self._other, self._everything())
        self.client = self._other
        super().answer(packed, now_us)
        self.client = self._home

    def _is_undone(self, packed: bytes, now_us: int | None) -> None:
        """A failover to a server that had not got the call, and whose clock may be behind."""
        before = self._everything()
        super().answer(packed, (now_us or 0) + self._draw.choice((0, 60_000_000)))
        self._put(self._home, before)

    def _is_old(self, packed: bytes, now_us: int | None) -> None:
        """Older data is restored, and then what there was."""
        before = self._everything()
        self._put(self._home, self._copied)
        super().answer(packed, now_us)
        self._put(self._home, before)
        self._copied = before

    def _is_loaded_anew(self, *_: Any) -> None:
        self.load()

    def _everything(self) -> dict[bytes, bytes]:
        return {key: self._home.dump(key) for key in self._home.keys("*")}

    def _put(self, client: Any, keys: dict[bytes, bytes]) -> None:
        client.flushdb()
        for key, dump in keys.items():
            client.restore(key, 0, dump)


def play(stored: StoredLedger, profile: str) -> None:
    stored.client.flushall()
    world = World(3, profile)
    world.store = Both(stored)
    world.do_lost_bids = lambda _: None  # a fault in the one ledger only
    world.run()


@each("profile", ("all", "rules"))
def test_it_answers_the_same_whatever_it_remembers(profile: str, server: Any) -> None:
    play(Troubled(server), profile)


@each("what", tuple(BELIEVED))
def test_that_notices_a_memory_which_is_believed(what: str, server: Any) -> None:
    with pytest.raises((AssertionError, redis.ResponseError)):
        play(Troubled(server, BELIEVED[what]), "all")


def test_it_answers_programs_whatever_it_remembers(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "LOST_US", 10**15)
    monkeypatch.setattr(ledger, "DEAD_US", 10**15)
    stored = Troubled(server, is_patient=True)

    def player(program: dict[str, Any]) -> LedgerPlayer:
        server.flushall()
        return LedgerPlayer(program, Both(stored))

    assert [found for program in programs(range(8)) if (found := first_difference(program, player))] == []


def test_it_remembers_no_more_than_waits(server: Any) -> None:
    server.flushall()
    stored = StoredLedger(server, as_function=True, edits=[COUNTS])
    told = {"order": "gain", "tiers": [{"name": "a", "reserve": 0.5}, {"name": "b"}]}
    view = [EngineView("e#1", 100, 1, 100, 1000, True)]
    now_us = 1_000
    number = bid = 0

    def call(**changes: Any) -> list[Any]:
        nonlocal number, now_us
        number, now_us = number + 1, now_us + 1_000
        base = Call(LAYOUT, "r", number, "call")
        return stored.execute(msgspec.structs.replace(base, **changes), now_us)[0].grants

    def bids(count: int) -> list[Bid]:
        nonlocal bid
        bid += count
        gain = TicketGain(2, 100, 1_000_000, 3_000_000, 100_000)
        return [
            Bid(n, "ab"[n % 2], f"t{n % 3}", 2, 1, 3, 1, {}, [], 0, n, gain) for n in range(bid - count + 1, bid + 1)
        ]

    call(kind="state", whole=True, rules=rules_told(told), engines=view, knew=1)
    grants, sizes = call(bids=bids(30)), []
    for _ in range(4):
        for _ in range(50):
            cells = [Cell("a", "e#1"), Cell("b", "e#1")]
            grants = call(acks=[each.bid for each in grants], cells=cells, bids=bids(1))
            assert len(grants) == 1
        sizes.append(server.execute_command("FCALL", stored.function, 1, stored.keys[0], "size"))
    assert max(sizes) < 1.3 * min(sizes)


def test_it_remembers_few_pools(server: Any) -> None:
    server.flushall()
    stored, sizes = StoredLedger(server, as_function=True, edits=[COUNTS]), []
    statement = Call(LAYOUT, "r", 1, "state", whole=True, rules=rules_told({"tiers": [{"name": "a"}]}), knew=1)
    for pool in range(100):
        root, packed = f"ledger:{{{pool}}}", msgspec.msgpack.encode(statement)
        server.execute_command("FCALL", stored.function, 1, root, packed, 1_000)
        sizes.append(server.execute_command("FCALL", stored.function, 1, root, "size"))
    assert max(sizes) <= 33 * sizes[0]
