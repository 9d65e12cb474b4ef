"""The longest that one operation keeps others from their turn, while very many requests wait.

100,000 requests wait and 5,000 run. In one process every call of the scheduler is timed, in the processor time of its
thread; the garbage collector is off. In a store every call of the script is timed, by the server's own clock (its slow
log). What it does: requests enter, end and leave; the policy's reserves change; a replica states all that it has to a
store that was flushed; a replica dies, and another ends what it had. At most 5 ms is asked of each.

    python -m benchmarks.longest_pause [--waiting N] [--leases N] [--operations N] [--check]
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import chain, count, islice
from typing import Any, TypeVar

import redis

from benchmarks.redis_setup import running_server
from sidecar.policy.rules import PoolRules, Shares, pool_rules
from sidecar.pools.base import Ask
from sidecar.pools.redis import protocol
from sidecar.pools.redis.batch import MOST_OPERATIONS
from sidecar.pools.redis.resync import STATED_AT_ONCE
from sidecar.pools.redis.script import source
from sidecar.scheduling import Scheduler
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_scheduler import GainScheduler
from tests.pools.harness import policy_of

TARGET_MS = 5.0
TENANTS = (200, 20_000)
TOKENS = 10
T = TypeVar("T")
Longest = dict[str, float]
"""Milliseconds by what was done."""


def rules_of(leases: int, reserve: Fraction = Fraction(1, 10), *, is_by_gain: bool = False) -> PoolRules:
    """Three tiers with this reserve each, and room for so many requests."""
    tiers = tuple(Shares(name, reserve=reserve) for name in ("high", "normal", "low"))
    return pool_rules(
        tokens=leases * TOKENS, requests=None, tiers=tiers, promote_after_us=30_000_000, is_by_gain=is_by_gain
    )


def figures(luck: random.Random) -> GainFigures:
    """Of any weight, output and cost; some are urgent at once, others never."""
    deadline_us = luck.choice([100_000, 5_000_000, 60_000_000])
    return GainFigures(
        luck.choice([1, 2, 4]), luck.randrange(1, 500), luck.randrange(1_000, 100_000), deadline_us, 0, 9
    )


def batched(things: Iterable[T], number: int) -> Iterator[list[T]]:
    """So many at a time."""
    left = iter(things)
    while found := list(islice(left, number)):
        yield found


class Process:
    """The scheduler of one process."""

    def __init__(self, waiting: int, leases: int, tenants: int, *, is_by_gain: bool) -> None:
        self.longest: Longest = {}
        self._luck, self._tenants, self._now_us = random.Random(7), tenants, 0
        self._rules = rules_of(leases, is_by_gain=is_by_gain)
        self._scheduler = (GainScheduler if is_by_gain else Scheduler)(self._rules)
        self._ids, self._waiting, self._leases = count(), deque[str](), deque[str]()
        for _ in range(waiting + leases):
            self._enter()
            self._dispatch()
        self.longest = {}

    def _timed(self, what: str, do: Callable[..., T], *arguments: Any, **more: Any) -> T:
        began_ns = time.thread_time_ns()
        found = do(*arguments, **more)
        self.longest[what] = max(self.longest.get(what, 0.0), (time.thread_time_ns() - began_ns) / 1e6)
        return found

    def _enter(self) -> None:
        name, luck, self._now_us = str(next(self._ids)), self._luck, self._now_us + 25
        size = {"tokens": TOKENS, "tenant": f"tenant-{luck.randrange(self._tenants)}", "now_us": self._now_us}
        ticket = self._timed("enter", self._scheduler.submit, name, tier=luck.randrange(3), **size)
        if isinstance(self._scheduler, GainScheduler):
            self._timed("enter", self._scheduler.appraise, ticket, figures(luck))
        self._waiting.append(name)

    def _dispatch(self) -> None:
        for admission in self._timed("dispatch", self._scheduler.dispatch, self._now_us):
            self._leases.append(admission.ticket.id)

    def play(self, operations: int) -> Longest:
        """Requests enter, end and leave, so many times; then the reserves change, and all leave."""
        for _ in range(operations):
            self._enter()
            self._dispatch()
            self._timed("end", self._scheduler.settle, self._leases.popleft(), self._now_us)
            self._dispatch()
            if self._luck.random() < 0.3:
                leaving = self._waiting[self._luck.randrange(len(self._waiting))]
                self._timed("leave", self._scheduler.cancel, leaving, self._now_us)
        other = rules_of(len(self._leases), Fraction(1, 30), is_by_gain=self._rules.is_by_gain)
        self._timed("other reserves", self._scheduler.change_rules, other)
        for name in self._waiting:
            self._timed("all leave", self._scheduler.cancel, name, self._now_us)
        return self.longest


class Store:
    """The script, called as a replica does: by operations of many requests at once."""

    def __init__(self, client: Any, waiting: int, leases: int, tenants: int, *, is_by_gain: bool) -> None:
        self.longest: Longest = {}
        self._client, self._luck, self._tenants = client, random.Random(7), tenants
        self._rules = rules_of(leases, is_by_gain=is_by_gain)
        self._policy = policy_of(self._rules)
        self._root = protocol.root_key("pause", is_by_gain=is_by_gain)
        self._sha = client.script_load(source(is_by_gain=is_by_gain))
        self._ids, self._asks, self._leases = count(1), dict[int, Ask](), dict[int, Ask]()
        self._sync(self._rules, fence=1)
        for numbers in batched(range(waiting + leases), MOST_OPERATIONS):
            self._call(*chain.from_iterable(self._entering() for _ in numbers))

    def _script(self, kind: bytes, *arguments: protocol.Argument, replica: str = "replica") -> protocol.Reply:
        answer = self._client.evalsha(self._sha, 1, self._root, kind, replica, *arguments)
        if answer[0] != protocol.OK:
            raise RuntimeError(f"the script answered {answer}")
        reply = protocol.read_reply(answer)
        self._leases.update(
            (lease_id, self._asks.pop(lease_id)) for lease_id, _ in reply.grants if lease_id in self._asks
        )
        return reply

    def _sync(self, rules: PoolRules, *, fence: int, replica: str = "replica") -> None:
        text = protocol.rules_text(self._policy, rules)
        self._fence = fence
        self._script(protocol.SYNC, fence, 0, text, protocol.KEEPS, 0, replica=replica)

    def _call(self, *operations: protocol.Argument) -> None:
        self._script(protocol.CALL, self._fence, 0, *operations)

    def _entering(self) -> list[protocol.Argument]:
        lease_id, luck = next(self._ids), self._luck
        gain = figures(luck) if self._rules.is_by_gain else None
        ask = Ask(luck.randrange(3), f"tenant-{luck.randrange(self._tenants)}", 1, TOKENS, 1, gain=gain)
        self._asks[lease_id] = ask
        return [*protocol.gain(lease_id, ask), *protocol.enter(lease_id, ask, None)]

    def _timed(self, what: str, do: Callable[[], None]) -> None:
        self._client.slowlog_reset()
        do()
        for entry in self._client.slowlog_get(-1):
            if entry["command"].startswith(b"EVALSHA"):
                self.longest[what] = max(self.longest.get(what, 0.0), entry["duration"] / 1000)

    def play(self, operations: int) -> Longest:
        """Requests enter and end, a call each; then the rest of what the module says."""
        self._client.config_set("slowlog-log-slower-than", 100)
        self._client.config_set("slowlog-max-len", 100_000)
        self._timed("enter, end", lambda: self._turn_over(operations))
        self._timed("enter, end, 128 a call", lambda: self._turn_over_together(operations))
        other = rules_of(self._rules.tokens // TOKENS, Fraction(1, 30), is_by_gain=self._rules.is_by_gain)
        self._timed("other reserves", lambda: self._restate(other))
        self._client.flushall()
        self._timed("statement to an empty store", lambda: self._restate(other))
        self._timed("a dead replica", self._die)
        return self.longest

    def _turn_over(self, operations: int) -> None:
        for _ in range(operations):
            self._call(*self._entering())
            self._call(protocol.END, self._oldest())

    def _turn_over_together(self, operations: int) -> None:
        for _ in range(operations // MOST_OPERATIONS):
            ends = [said for _ in range(MOST_OPERATIONS // 2) for said in (protocol.END, self._oldest())]
            entering = chain.from_iterable(self._entering() for _ in range(MOST_OPERATIONS // 2))
            self._call(*entering, *ends)

    def _oldest(self) -> int:
        lease_id = next(iter(self._leases))
        del self._leases[lease_id]
        return lease_id

    def _restate(self, rules: PoolRules) -> None:
        """The replica states all, in the calls in which a pool does: leases first."""
        self._fence += 1
        text = protocol.rules_text(self._policy, rules)
        self._script(protocol.BEGIN, self._fence, 0, text, protocol.REPLACES, 0)
        for many in batched(list(self._leases.items()), STATED_AT_ONCE):
            self._call(*chain.from_iterable(protocol.statement(number, ask, None) for number, ask in many))
        self._call(protocol.LEASES_STATED)
        for many in batched(list(self._asks.items()), STATED_AT_ONCE):
            self._call(*chain.from_iterable(map(_waits, many)))
        self._call(protocol.ALL_STATED)

    def _die(self) -> None:
        """It says good-bye with all that it has; the calls of another end that."""
        self._script(protocol.BYE, self._fence, 0)
        self._sync(self._rules, fence=1, replica="heir")
        left = 1
        while left:
            time.sleep(0.016)  # the pause between two slices
            left = self._script(protocol.BEAT, 1, 0, replica="heir").waiting


def _waits(ticket: tuple[int, Ask]) -> list[protocol.Argument]:
    number, ask = ticket
    return [*protocol.gain(number, ask), *protocol.statement(number, ask, 1)]


def measured(waiting: int, leases: int, operations: int) -> Iterator[tuple[str, Longest]]:
    """Each place and order with its longest times."""
    for is_by_gain in (False, True):
        for tenants in TENANTS:
            where = f"by {'gain' if is_by_gain else 'level'}, {tenants:,} tenants"
            yield f"one process, {where}", Process(waiting, leases, tenants, is_by_gain=is_by_gain).play(operations)
            with running_server() as server, redis.Redis(host=server.host, port=server.port) as client:
                store = Store(client, waiting, leases, tenants, is_by_gain=is_by_gain)
                yield f"{server.binary.name}, {where}", store.play(operations // 10)


def main() -> int:
    """Prints the longest times. 1 where `--check` finds one that is too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--leases", type=int, default=5_000)
    parser.add_argument("--operations", type=int, default=60_000)
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    gc.disable()
    worst = 0.0
    print(f"{wanted.waiting:,} waiting, {wanted.leases:,} running; the longest in ms; at most {TARGET_MS:g} is asked")
    for name, longest in measured(wanted.waiting, wanted.leases, wanted.operations):
        worst = max(worst, *longest.values())
        print(f"{name}: " + ", ".join(f"{what} {ms:.1f}" for what, ms in longest.items()), flush=True)
    return int(wanted.check and worst > TARGET_MS)


if __name__ == "__main__":
    sys.exit(main())
