"""The longest that one operation keeps others from their turn, while very many requests wait.

100,000 requests wait and 5,000 run, of 200 and of 20,000 tenants, by level and by gain. At most 5 ms is asked of each
operation. The garbage collector is off.

- The scheduler: requests enter, end and leave, more often than requests wait; the reserves change; all leave.
- A pool in one process, of one engine and of 8: an operation, and each turn of the event loop after it until nothing is
  left to do. The reserves change, the pool shrinks so that a part of the requests never fits again,
  grows to twice its size, stops and goes on; all that run end. A replica that has lost its store takes all over.
- A store, of one engine and of 8: calls of the script as a replica makes them. Requests enter and end, one in a call
  and as many as one call may; sizes change; the reserves change; the pool grows to twice its size; a store that was
  flushed gets a statement of everything; a replica dies, and another ends what it had.

Times are processor time: of the thread, and of the server's main thread where Linux says it, else by the server's slow
log. So other programs lengthen them little; but on a shared machine one of ten thousand equal pieces of work takes four
times as long as the others. What is slow by itself is slow in every run. So all is done `--runs` times, each time the
same, and the run in which the longest took least counts; the longest of all stands beside it where it is over 5 ms.

One thing is counted apart, and has no target: a dict of Python copies its table now and then, and no slice can divide
that.

    python -m benchmarks.longest_pause [--waiting N] [--leases N] [--operations N] [--runs N] [--only TEXT] [--check]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar

import redis

from benchmarks.redis_setup import running_server
from sidecar.errors import AdmissionError
from sidecar.policy.model import Policy
from sidecar.policy.rules import PoolRules, Shares, pool_rules
from sidecar.pools.base import Ask, Lease
from sidecar.pools.clock import monotonic_us
from sidecar.pools.engines import WEIGHT_PERCENT, EngineOffer
from sidecar.pools.fleet import FleetPool
from sidecar.pools.local import LocalPool
from sidecar.pools.redis import protocol
from sidecar.pools.redis.batch import MOST_RESIZES, operations_in_line
from sidecar.pools.redis.partition import Partition
from sidecar.pools.redis.resync import STATED_AT_ONCE
from sidecar.pools.redis.script import source
from sidecar.scheduling import Scheduler
from sidecar.scheduling.gain import GainFigures
from sidecar.scheduling.gain_scheduler import GainScheduler
from tests.pools.harness import policy_of

TARGET_MS = 5.0
TENANTS = (200, 20_000)
SOON_US = 5_000
"""A script that wants to be called again sooner than this has something left to do."""
MOST_CALLS = 10_000
NEVER_US = 10**12
TOKENS = 10
ENGINES = 8
A_DICT = "a dict alone"
"""What has no target."""
T = TypeVar("T")
Longest = dict[str, float]
"""Milliseconds by what was done."""


def note(longest: Longest, what: str, ms: float) -> None:
    """Keeps the longest."""
    longest[what] = max(longest.get(what, 0.0), ms)


def shares(reserve: Fraction) -> tuple[Shares, ...]:
    """Three tiers with this reserve each."""
    return tuple(Shares(name, reserve=reserve) for name in ("high", "normal", "low"))


def rules_of(leases: int | None, reserve: Fraction = Fraction(1, 10), *, is_by_gain: bool = False) -> PoolRules:
    """Three tiers with this reserve each, and room for so many requests; None for a pool as large as its engines."""
    tokens = None if leases is None else leases * TOKENS
    return pool_rules(
        tokens=tokens, requests=None, tiers=shares(reserve), promote_after_us=30_000_000, is_by_gain=is_by_gain
    )


def policy_with(leases: int | None, reserve: Fraction = Fraction(1, 10), *, is_by_gain: bool) -> Policy:
    """A policy with these rules."""
    policy = policy_of(rules_of(leases, reserve, is_by_gain=is_by_gain))
    return replace(policy, shares=shares(reserve))


def offers(leases: int) -> list[EngineOffer]:
    """Equal engines that have room for so many requests together."""
    return [EngineOffer(f"engine-{number}#1", leases * TOKENS // ENGINES, leases) for number in range(ENGINES)]


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


class InProcess:
    """The scheduler of one process."""

    def __init__(self, waiting: int, leases: int, tenants: int, *, is_by_gain: bool) -> None:
        self.longest: Longest = {}
        self._luck, self._tenants, self._now_us = random.Random(7), tenants, 0
        self._rules = rules_of(leases, is_by_gain=is_by_gain)
        self._scheduler = (GainScheduler if is_by_gain else Scheduler)(self._rules)
        self._ids, self._waiting, self._leases = count(), deque[str](), deque[str]()
        self._names: dict[str, None] = {}  # of those that wait
        for _ in range(waiting + leases):
            self._enter()
            self._dispatch()
        self.longest = {}

    def _timed(self, what: str, do: Callable[..., T], *arguments: Any, less_ms: float = 0.0, **more: Any) -> T:
        began_ns = time.thread_time_ns()
        found = do(*arguments, **more)
        note(self.longest, what, (time.thread_time_ns() - began_ns) / 1e6 - less_ms)
        return found

    def _time_of_a_dict(self, name: str) -> float:
        """A dict with the same names, which copies its table with the same one as the scheduler's: milliseconds."""
        began_ns = time.thread_time_ns()
        self._names[name] = None
        ms = (time.thread_time_ns() - began_ns) / 1e6
        note(self.longest, A_DICT, ms)
        return ms

    def _enter(self) -> None:
        name, luck, self._now_us = str(next(self._ids)), self._luck, self._now_us + 25
        size = {"tokens": TOKENS, "tenant": f"tenant-{luck.randrange(self._tenants)}", "now_us": self._now_us}
        less_ms = self._time_of_a_dict(name)
        tier = luck.randrange(3)
        ticket = self._timed("enter", self._scheduler.submit, name, tier=tier, less_ms=less_ms, **size)
        if isinstance(self._scheduler, GainScheduler):
            self._timed("enter", self._scheduler.appraise, ticket, figures(luck))
        self._waiting.append(name)

    def _dispatch(self) -> None:
        for admission in self._timed("dispatch", self._scheduler.dispatch, self._now_us):
            self._leases.append(admission.ticket.id)
            del self._names[admission.ticket.id]

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
                self._names.pop(leaving, None)
        other = rules_of(len(self._leases), Fraction(1, 30), is_by_gain=self._rules.is_by_gain)
        self._timed("other reserves", self._scheduler.change_rules, other)
        while self._scheduler._unsorted:
            self._timed("other reserves", self._scheduler.dispatch, self._now_us)
        for name in self._waiting:
            self._timed("all leave", self._scheduler.cancel, name, self._now_us)
        return self.longest


class Pool:
    """The pool of one process, with its event loop."""

    def __init__(self, waiting: int, leases: int, tenants: int, *, is_by_gain: bool, has_engines: bool) -> None:
        self.longest: Longest = {}
        self._luck, self._tenants, self._count, self._is_by_gain = random.Random(7), tenants, waiting, is_by_gain
        self._leases, self._has_engines = leases, has_engines
        policy = policy_with(None if has_engines else leases, is_by_gain=is_by_gain)
        self._pool = FleetPool(policy) if has_engines else LocalPool(policy)
        if isinstance(self._pool, FleetPool):
            self._pool.set_engines(offers(leases))

    async def play(self) -> Longest:
        """Everything that concerns very many requests at one time."""
        asked = [self._pool.enter_now(self._ask(number)) for number in range(self._leases + self._count)]
        waits = [asyncio.ensure_future(self._wait(lease)) for lease in asked if lease.grant is None]
        await asyncio.sleep(0)
        await self._timed("other reserves", lambda: self._reserve(Fraction(1, 30)))
        await self._timed("a pool that shrinks", lambda: self._resize(self._leases // 8))
        await self._timed("a pool that grows", lambda: self._resize(2 * self._leases))
        await self._timed("a pool that stops", lambda: self._pool.pause("it is to stop"))
        for lease in asked:
            if lease.grant is not None and not lease.is_over:
                await self._timed("end", lease.settle)
        await self._timed("a pool that goes on", lambda: self._pool.pause(None))
        await self._timed("how the oldest wait", self._pool.oldest)
        if not self._has_engines:
            await self._lose_store([lease for lease in asked if not lease.is_over])
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await self._pool.close()
        return self.longest

    async def _lose_store(self, leases: list[Lease]) -> None:
        """A replica's part of a pool takes over what this pool has, in its own scheduler."""
        policy = policy_with(self._leases, is_by_gain=self._is_by_gain)
        began_ns = time.thread_time_ns()
        part = Partition(policy.rules, leases, monotonic_us)
        while True:
            note(self.longest, "a lost store", (time.thread_time_ns() - began_ns) / 1e6)
            if not (part._left or part._soon):
                break
            began_ns = time.thread_time_ns()
            await asyncio.sleep(0)
        part.stop()

    def _ask(self, number: int) -> Ask:
        """Every hundredth that waits is too large for a pool that shrinks."""
        is_large = number > self._leases and number % 100 == 0
        tokens = self._leases * TOKENS // 6 if is_large and not self._has_engines else TOKENS
        gain = figures(self._luck) if self._is_by_gain else None
        return Ask(number % 3, f"tenant-{self._luck.randrange(self._tenants)}", 1, tokens, 1, gain=gain)

    @staticmethod
    async def _wait(lease: Lease) -> None:
        try:
            await lease.wait()
        except AdmissionError:
            return

    def _reserve(self, reserve: Fraction) -> None:
        leases = None if self._has_engines else self._leases
        self._pool.change_policy(policy_with(leases, reserve, is_by_gain=self._is_by_gain))

    def _resize(self, leases: int) -> None:
        if isinstance(self._pool, FleetPool):
            self._pool.set_engines(offers(leases))
        else:
            self._pool.change_policy(policy_with(leases, Fraction(1, 30), is_by_gain=self._is_by_gain))

    async def _timed(self, what: str, do: Callable[[], object]) -> None:
        """The operation, then the turns of the event loop until it is quiet, but for its timer."""
        began_ns = time.thread_time_ns()
        do()
        while True:
            note(self.longest, what, (time.thread_time_ns() - began_ns) / 1e6)
            began_ns = time.thread_time_ns()
            await asyncio.sleep(0)
            if self._is_quiet():
                return

    def _is_quiet(self) -> bool:
        runtime = self._pool._runtime
        return runtime._soon is None and self._pool._outgrown._soon is None and not runtime.scheduler._unsorted


class Store:
    """The script, called as a replica does: by operations of many requests at once."""

    def __init__(
        self, client: Any, pid: int, waiting: int, leases: int, tenants: int, *, is_by_gain: bool, has_engines: bool
    ) -> None:
        self.longest: Longest = {}
        self._client, self._luck, self._tenants = client, random.Random(7), tenants
        self._server = ServerTime(client, pid)
        self._room, self._is_by_gain, self._has_engines = leases, is_by_gain, has_engines
        self._reserve = Fraction(1, 10)
        self._root = protocol.root_key("pause", has_engines=has_engines, is_by_gain=is_by_gain)
        self._sha = client.script_load(source(has_engines=has_engines, is_by_gain=is_by_gain))
        self._ids, self._asks, self._leases = count(1), dict[int, Ask](), dict[int, Ask]()
        self._what, self._most = "", operations_in_line(has_engines=has_engines, is_by_gain=is_by_gain).most
        self._state(protocol.SYNC, protocol.KEEPS, *self._engines(), fence=1)
        for numbers in batched(range(waiting + leases), self._most):
            self._call(*chain.from_iterable(self._entering() for _ in numbers))

    def _script(self, kind: bytes, *arguments: protocol.Argument, replica: str = "replica") -> protocol.Reply:
        """One call, timed where it is part of something."""
        with self._server.timed(self.longest, self._what):
            answer = self._client.evalsha(self._sha, 1, self._root, kind, replica, *arguments)
        if not protocol.is_ok(answer):
            raise RuntimeError(f"the script answered {answer}")
        reply = protocol.read_reply(answer)
        self._leases.update(
            (lease_id, self._asks.pop(lease_id)) for lease_id, _ in reply.grants if lease_id in self._asks
        )
        return reply

    def _state(
        self, kind: bytes, brings: int, *operations: protocol.Argument, fence: int, replica: str = "replica"
    ) -> None:
        leases = None if self._has_engines else self._room
        policy = policy_with(leases, self._reserve, is_by_gain=self._is_by_gain)
        if self._has_engines:
            text = protocol.engines_rules_text(policy, WEIGHT_PERCENT)
        else:
            text = protocol.rules_text(policy, policy.rules)
        self._fence = fence
        self._script(kind, fence, 0, text, brings, 0, *operations, replica=replica)

    def _engines(self) -> Iterable[protocol.Argument]:
        return protocol.engines(offers(self._room), (), 0) if self._has_engines else ()

    def _call(self, *operations: protocol.Argument) -> protocol.Reply:
        return self._script(protocol.CALL, self._fence, 0, *operations)

    def _call_until_quiet(self) -> None:
        """Calls as long as the script wants to be called again at once."""
        change_us, calls = 0, 0
        while change_us <= SOON_US and calls < MOST_CALLS:
            change_us, calls = self._call().change_after_us or NEVER_US, calls + 1

    def _entering(self) -> list[protocol.Argument]:
        lease_id, luck = next(self._ids), self._luck
        gain = figures(luck) if self._is_by_gain else None
        ask = Ask(luck.randrange(3), f"tenant-{luck.randrange(self._tenants)}", 1, TOKENS, 1, gain=gain)
        self._asks[lease_id] = ask
        return [*self._placing(ask), *protocol.gain(lease_id, ask), *protocol.enter(lease_id, ask, None)]

    def _placing(self, ask: Ask) -> Iterable[protocol.Argument]:
        return protocol.placing(ask) if self._has_engines else ()

    def play(self, operations: int) -> Longest:
        """See the module."""
        steps: dict[str, Callable[[], None]] = {
            "enter, end": lambda: self._turn_over(operations),
            f"enter, end, {self._most} a call": lambda: self._turn_over_together(operations),
            f"{MOST_RESIZES} sizes": self._resize_leases,
            "other reserves": self._share_out_otherwise,
            "a pool that grows": self._grow,
            "a flushed store": self._flush,
            "a dead replica": self._die,
        }
        for self._what, do in steps.items():
            do()
        return self.longest

    def _turn_over(self, operations: int) -> None:
        for _ in range(operations):
            self._call(*self._entering())
            self._call(protocol.END, self._oldest())

    def _turn_over_together(self, operations: int) -> None:
        half = self._most // 2
        for _ in range(operations // half):
            ends = [said for _ in range(half) for said in (protocol.END, self._oldest())]
            entering = chain.from_iterable(self._entering() for _ in range(half))
            self._call(*entering, *ends)

    def _oldest(self) -> int:
        lease_id = next(iter(self._leases))
        del self._leases[lease_id]
        return lease_id

    def _resize_leases(self) -> None:
        for many in batched(list(self._leases), MOST_RESIZES):
            self._call(*(said for lease_id in many for said in (protocol.RESIZE, lease_id, TOKENS - 1)))

    def _share_out_otherwise(self) -> None:
        self._reserve = Fraction(1, 30)
        self._restate()

    def _grow(self) -> None:
        self._room *= 2
        if self._has_engines:
            self._call(*self._engines())
        else:
            self._restate()
        self._call_until_quiet()

    def _flush(self) -> None:
        self._client.execute_command("FLUSHALL", "SYNC")  # else the server still frees memory while calls follow
        self._restate()

    def _restate(self) -> None:
        """The replica states all, in the calls in which a pool does: leases first."""
        self._state(protocol.BEGIN, protocol.REPLACES, fence=self._fence + 1)
        for many in batched(list(self._leases.items()), STATED_AT_ONCE):
            self._call(*self._engines(), *(said for lease in many for said in self._runs(lease)))
        self._call(protocol.LEASES_STATED)
        for many in batched(list(self._asks.items()), STATED_AT_ONCE):
            self._call(*chain.from_iterable(map(self._waits, many)))
        self._call(protocol.ALL_STATED)
        self._call_until_quiet()

    def _runs(self, lease: tuple[int, Ask]) -> list[protocol.Argument]:
        number, ask = lease
        engine = f"engine-{number % ENGINES}#1"
        on_engine: Iterable[protocol.Argument] = protocol.on_engine(engine, 0) if self._has_engines else ()
        return [*on_engine, *protocol.statement(number, ask, None)]

    def _waits(self, ticket: tuple[int, Ask]) -> list[protocol.Argument]:
        number, ask = ticket
        return [*self._placing(ask), *protocol.gain(number, ask), *protocol.statement(number, ask, 1)]

    def _die(self) -> None:
        """It says good-bye with all that it has; the calls of another end that."""
        self._script(protocol.BYE, self._fence, 0)
        self._state(protocol.SYNC, protocol.KEEPS, *self._engines(), fence=1, replica="heir")
        left = 1
        while left:
            time.sleep(0.011)  # the pause between two slices
            left = self._script(protocol.BEAT, 1, 0, replica="heir").waiting


class ServerTime:
    """The processor time of a server's main thread, by Linux; the time of its slow log elsewhere."""

    def __init__(self, client: Any, pid: int) -> None:
        self._client = client
        self._file = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self._is_known = self._file.exists()
        if not self._is_known:
            client.config_set("slowlog-log-slower-than", 0)

    @contextlib.contextmanager
    def timed(self, longest: Longest, what: str) -> Iterator[None]:
        """Notes the time of one call under its name. Nothing is noted without a name."""
        before_ns = self._ns()
        yield
        if what:
            note(longest, what, (self._ns() - before_ns) / 1e6)

    def _ns(self) -> int:
        if self._is_known:
            return int(self._file.read_text().split()[0])
        calls = (entry for entry in self._client.slowlog_get(8) if entry["command"].startswith(b"EVALSHA"))
        return int(next(calls)["duration"]) * 1_000


def plays(waiting: int, leases: int, operations: int) -> Iterator[tuple[str, Callable[[], Longest]]]:
    """Each place, order and number of tenants, with what returns its longest times."""
    for is_by_gain in (False, True):
        for tenants in TENANTS:
            where = f"by {'gain' if is_by_gain else 'level'}, {tenants:,} tenants"
            sizes = (waiting, leases, tenants)
            yield f"the scheduler, {where}", partial(in_scheduler, *sizes, operations, is_by_gain=is_by_gain)
            for has_engines in (False, True):
                more = f"{where}, {ENGINES} engines" if has_engines else where
                kind = {"is_by_gain": is_by_gain, "has_engines": has_engines}
                yield f"one process, {more}", partial(in_process, *sizes, **kind)
                yield f"a store, {more}", partial(in_store, *sizes, operations // 25, **kind)


def in_scheduler(waiting: int, leases: int, tenants: int, operations: int, *, is_by_gain: bool) -> Longest:
    """See `InProcess`."""
    return InProcess(waiting, leases, tenants, is_by_gain=is_by_gain).play(operations)


def in_process(waiting: int, leases: int, tenants: int, *, is_by_gain: bool, has_engines: bool) -> Longest:
    """See `Pool`."""
    return asyncio.run(Pool(waiting, leases, tenants, is_by_gain=is_by_gain, has_engines=has_engines).play())


def in_store(
    waiting: int, leases: int, tenants: int, operations: int, *, is_by_gain: bool, has_engines: bool
) -> Longest:
    """See `Store`."""
    sizes = (waiting, leases, tenants)
    with running_server() as server, redis.Redis(host=server.host, port=server.port) as client:
        store = Store(client, server.pid, *sizes, is_by_gain=is_by_gain, has_engines=has_engines)
        return store.play(operations)


def least(runs: Sequence[Longest], what: str) -> float:
    """The longest of the run in which it took least, in ms."""
    return min(run[what] for run in runs)


def is_missed(runs: Sequence[Longest], what: str) -> bool:
    """Whether it is too long in every run."""
    return what != A_DICT and least(runs, what) > TARGET_MS


def shown(runs: Sequence[Longest], what: str) -> str:
    """It, and the longest of all runs where that is more than asked."""
    longest = max(run[what] for run in runs)
    return f"{least(runs, what):.1f}" + (f" (up to {longest:.1f})" if longest > TARGET_MS else "")


def main() -> int:
    """Prints the longest times. 1 where `--check` finds one that is too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--leases", type=int, default=5_000)
    parser.add_argument("--operations", type=int, default=250_000)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only lines whose beginning has this text")
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    gc.disable()
    missed: list[str] = []
    print(f"{wanted.waiting:,} waiting, {wanted.leases:,} running, {wanted.runs} runs")
    print(f"the longest in ms; at most {TARGET_MS:g} is asked")
    for name, play in plays(wanted.waiting, wanted.leases, wanted.operations):
        if wanted.only not in name:
            continue
        runs = [play() for _ in range(wanted.runs)]
        print(f"{name}: " + ", ".join(f"{what} {shown(runs, what)}" for what in runs[0]), flush=True)
        missed += [f"{name}: {what} {least(runs, what):.1f}" for what in runs[0] if is_missed(runs, what)]
    print("every target is met" if not missed else "THE TARGET IS MISSED: " + "; ".join(missed))
    return int(wanted.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
