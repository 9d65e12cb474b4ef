"""Calls that find no one waiting are done without a function: the script does the same as it does without that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import redis

from sidecar.policy.model import Policy
from sidecar.policy.rules import Shares, pool_rules
from sidecar.pools.base import Ask
from sidecar.pools.redis import protocol
from sidecar.pools.redis.protocol import Argument
from sidecar.pools.redis.script import joined
from tests.pools.harness import Clock, policy_of
from tests.pools.redis_harness import CLOCK_KEY, clocked
from tests.pools.scripted import Scripted, entering
from tests.support.redis_servers import RedisServer
from tests.support.walks import random_walks

WITH, WITHOUT = clocked(joined()), clocked(joined({"plain_calls.lua": "--"}))
PLAIN_ANSWER = "  call('HSET', root, 'meta', struct.pack(META_FORMAT, unpack(meta)), 'tiers', tiers_kept)\n"
STEPS = 40
NOTICE = (1, 8, 18, 31, 58, 62)
"""Seeds of programs in which every wrong call below is noticed, at present."""


def policy_with(chance: random.Random) -> Policy:
    """A pool with room for a few requests: some wait, and most do not."""
    is_preemptible = chance.random() < 0.4
    tiers = (
        Shares("first", reserve=Fraction(1, 10), limit=Fraction(1, 2), always_first=chance.random() < 0.5),
        Shares("second", reserve=Fraction(2, 5), lend=Fraction(0)),
        Shares("third", reserve=Fraction(1, 10), preemptible=is_preemptible),
    )
    tokens, requests = chance.choice([(200, None), (200, None), (900, 8)])
    rules = pool_rules(tokens=tokens, requests=requests, tiers=tiers, promote_after_us=9, ceiling=1, max_preemptions=2)
    return policy_of(rules, max_waiting=chance.choice([None, 0, 2]))


def operations(chance: random.Random, ids: Iterator[int], known: list[int]) -> list[Argument]:
    """One to four operations, most of them those of plain calls."""
    said: list[Argument] = []
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        kind = chance.choice("eeeeexxxxxxxzkbqEm")
        if kind in "eEm":
            known.append(next(ids))
            ticket = chance.choice([known[-1], known[-1], known[-1], chance.choice(known)])
            said += [kind, ticket, chance.randrange(3), chance.choice("ab"), 1, chance.choice([5, 20, 45])]
            said.append(chance.choice([1, 1, 2]))
            said += {"e": [], "E": [0], "m": [600, 60_000, 9, 10**6, -1]}[kind]
        elif kind in "xz":
            ticket = known.pop(chance.randrange(len(known))) if known and kind == "x" else chance.choice(known or [999])
            said += [kind, ticket] if kind == "x" else [kind, ticket, chance.choice([1, 30, 60])]
        elif kind == "k":
            said += [kind, chance.choice(known or [999]), 2]
        elif chance.random() < 0.3:
            said += [kind, chance.choice([0, 7])] if kind == "b" else [kind, 1, "a", 1, 30]
    return said


READ_ALL = """
local read = {
  hash = function(key) return redis.call('HGETALL', key) end,
  list = function(key) return redis.call('LRANGE', key, 0, -1) end,
  set = function(key) return redis.call('SMEMBERS', key) end,
  zset = function(key) return redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') end,
}
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  if key ~= ARGV[1] then all[#all + 1] = {key, kind, read[kind](key)} end
end
return all
"""


def kept(client: Any) -> dict[bytes, Any]:
    """All that a server has."""
    kinds = {b"hash": pairs, b"list": list, b"set": set, b"zset": list}
    return {key: kinds[kind](found) for key, kind, found in client.eval(READ_ALL, 0, CLOCK_KEY)}


def pairs(listed: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(listed[::2], listed[1::2], strict=True))


def read(answer: Any) -> Any:
    """An answer as a replica understands it: a plain call's is packed."""
    return protocol.read_reply(answer) if protocol.is_ok(answer) else answer


def play(server: RedisServer, seed: int, script: str) -> int:
    """Plays a random program with a script, and with none of its plain calls. Returns how many calls were plain."""
    chance, clock, plain = random.Random(seed), Clock(), 0
    policy, ids, known = policy_with(chance), iter(range(1, 10_000)), list[int]()
    with (
        redis.Redis(host=server.host, port=server.port, db=0) as one,
        redis.Redis(host=server.host, port=server.port, db=1) as other,
    ):
        one.flushall()
        replicas = [[Scripted(client, clock, policy, name) for client in (one, other)] for name in ("r-1", "r-2")]
        for pair in replicas:
            pair[0].source, pair[1].source = counting(script), WITHOUT
            assert pair[0].statement(protocol.SYNC, 0, 1, 0) == pair[1].statement(protocol.SYNC, 0, 1, 0)
        for step in range(STEPS):
            pair = chance.choice(replicas)
            said = operations(chance, ids, known)
            kind = protocol.BEAT if step % 9 == 0 else protocol.CALL
            heard = chance.choice([0, 0, 1])
            fence = pair[0].fence - (chance.random() < 0.02)
            one.set("plain", 0)
            answers = [each.answer(kind, each.name, fence, heard, *said) for each in pair]
            plain += int(one.getdel("plain") or 0)
            assert read(answers[0]) == read(answers[1])
            assert kept(one) == kept(other)
            clock.us += chance.choice([0, 1, 3, 40, 40, 3_000_000 if chance.random() < 0.1 else 5])
    return plain


def counting(script: str) -> str:
    """The script, which also counts its plain answers."""
    assert PLAIN_ANSWER in script
    return script.replace(PLAIN_ANSWER, PLAIN_ANSWER + "  redis.call('INCR', 'plain')\n")


def test_plain_calls_do_what_the_functions_do_and_many_are_plain(redis_server: RedisServer) -> None:
    assert sum(play(redis_server, seed, WITH) for seed in NOTICE) > len(NOTICE) * STEPS / 4


@random_walks(6)
def test_a_plain_call_does_what_the_functions_do_in_any_program(redis_server: RedisServer, seed: int) -> None:
    play(redis_server, seed, WITH)


WRONG = [
    ("free_tokens > 0 and free_requests > 0 and preemptible == 0", "free_tokens > 0 and free_requests > 0"),
    ("(is_limited == 0 or (held_tokens <= limit_tokens", "(is_limited == 0 or (true"),
    ("free_tokens - math.max(0, headroom_tokens - above[HELD_TOKENS])", "free_tokens"),
    ("free_requests - math.max(0, headroom_requests - above[HELD_REQUESTS])", "free_requests"),
    ("and free_tokens >= tokens and free_requests >= requests", "and free_requests >= requests"),
    ("and free_tokens >= tokens and free_requests >= requests", "and free_tokens >= tokens"),
    ("if is_plain and not record then", "if is_plain then"),
    ("then record = call('HGET', mine, id) end", "then end"),
    ("      tiers[level] = tier\n", ""),
    ("all_tokens + change, tier, true", "all_tokens + change, nil, true"),
    ("all_requests - requests, tier, true", "all_requests - requests, nil, true"),
    ("if some_are_preemptible > 0 and", "if some_are_preemptible == 0 and"),
    ("if is_always_first == 0 and now >= tier[OWES_UNTIL] and", "if now >= tier[OWES_UNTIL] and"),
    ("if is_always_first == 0 and now >= tier[OWES_UNTIL] and", "if is_always_first == 0 and"),
    ("math.floor((held_tokens - reserve_tokens) / reserve_tokens)", "0"),
    ("excess > 0 and now or 0", "0"),
    ("meta[LATEST_ARRIVED] = sequence, sequence, now", "meta[LATEST_ARRIVED] = sequence, meta[LATEST], now"),
    ("tier[SERVED], tier[ADMITTED] = tier[SERVED] + tokens", "tier[SERVED], tier[ADMITTED] = tier[SERVED]"),
    ("if operation == 'x' then meta[LATE] = meta[LATE] + 1 end", ""),
    ("tier[HELD_TOKENS] + change, all_tokens + change, tier", "tier[HELD_TOKENS] + change, all_tokens, tier"),
    ("if excess ~= '0' then", "if false then"),
    ("math.max(now, tier[OWES_UNTIL]) + excess", "tier[OWES_UNTIL] + excess"),
    ("if call('HDEL', prefix .. 'v', member) == 1 then", "if false then"),
    ("if ARGV[4] ~= '0' then call('LTRIM', prefix .. 'o:' .. me, ARGV[4], -1) end\n    unfinished", "unfinished"),
    ("and now >= meta[BACK_UNTIL] and", "and"),
    ("and not held_back_lease then", "then"),
    ("now - meta[NOW] <= LOST_US", "true"),
    ("tonumber(known[1]) == fence and", ""),
    ("meta[WAITING] == 0 and meta[HOLD_UNTIL]", "meta[HOLD_UNTIL]"),
    ("for _, text in ipairs(listed) do grants[#grants + 1] = text end\n  for level", "for level"),
]


def test_a_wrong_plain_call_is_noticed(redis_server: RedisServer) -> None:
    assert [(right, wrong) for right, wrong in WRONG if not is_noticed(redis_server, right, wrong)] == []


def is_noticed(server: RedisServer, right: str, wrong: str) -> bool:
    assert right in WITH
    script = WITH.replace(right, wrong)
    try:
        for seed in (*NOTICE, *range(80)):
            play(server, seed, script)
    except (AssertionError, redis.ResponseError):
        return True
    return False


def test_headroom_counts_what_the_same_call_has_freed(redis_server: RedisServer) -> None:
    """Only a call that ends a lease of a tier, and then asks for another tier that keeps the first one's headroom."""
    tiers = (Shares("high", reserve=Fraction(1, 2), lend=Fraction(0)), Shares("low"))
    policy = policy_of(pool_rules(tokens=100, requests=None, tiers=tiers))
    stale = WITH.replace("local above = tiers[other] or {", "local above = {")
    assert stale != WITH
    with redis.Redis(host=redis_server.host, port=redis_server.port) as client:
        for script, admitted in ((WITH, 0), (WITHOUT, 0), (stale, 1)):
            client.flushall()
            replica = Scripted(client, Clock(), policy)
            replica.source = script
            replica.sync()
            replica.enter(1, Ask(0, "a", 1, 50, 1))
            reply = replica.call(protocol.END, 1, *entering(2, Ask(1, "a", 1, 60, 1)))
            assert len(reply.grants) == admitted
