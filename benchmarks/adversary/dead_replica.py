"""A replica that is killed with many requests waiting: whether the others take its end for a lost store.

The replica is a process of its own with a real server as its store; two others share the pool and are told of every
change of the store's state. SLOWLOG says how long the scripts took from the kill until another replica's request, which
came after all of them, is admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.adversary.policies import shipped, with_tiers
from benchmarks.adversary.report import Line, at_most
from benchmarks.redis_setup import chosen_binary
from sidecar.events import StoreChanged, StoreState
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED, TierRules
from sidecar.policy.store import store_address
from sidecar.pools import Ask, Pool
from sidecar.pools.base import Lease
from sidecar.pools.redis import RedisLink, ledger_connector
from tests.support.redis_servers import RedisServer

WAITING = (25_000, 125_000)
AT_ONCE = 500
FILLED_WITHIN_S, ADMITTED_WITHIN_S = 240.0, 15.0
LONGEST_SCRIPT_MS = 20.0


@dataclass(slots=True)
class Seen:
    """What the others went through. Times in seconds."""

    divided_s: float = 0.0
    times_divided: int = 0
    longest_script_ms: float = 0.0
    admitted_after_s: float = 0.0
    changes: list[tuple[float, StoreState]] = field(default_factory=list)

    def note(self, change: StoreChanged) -> None:
        """Takes in a change of one of the others."""
        self.changes.append((time.monotonic(), change.state))


async def rows() -> AsyncIterator[Line]:
    """A pair of lines for each number of waiting requests."""
    for waiting in WAITING:
        for line in lines(waiting, await killed(waiting)):
            yield line


def lines(waiting: int, seen: Seen) -> Iterator[Line]:
    """What is asked of one kill."""
    figure = f"{seen.times_divided} times, {seen.divided_s:.1f} s" if seen.times_divided else "never"
    attack = f"replica with {waiting:,} waiting killed: the others divided"
    yield Line(attack, figure, "never", not seen.times_divided)
    yield at_most("  longest script meanwhile (SLOWLOG)", seen.longest_script_ms, LONGEST_SCRIPT_MS, " ms", 1)
    yield at_most("  until another replica's request is admitted", seen.admitted_after_s, ADMITTED_WITHIN_S, " s", 1)


async def killed(waiting: int) -> Seen:
    """Fills, kills, and watches."""
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder, RedisServer(chosen_binary(), Path(folder)) as server:
        pools = [pool_of(server.url, seen) for _ in range(2)]
        try:
            await asyncio.gather(*(pool.open() for pool in pools))
            blocker = await pools[0].enter(Ask(0, "here", 1, 1, 1))
            await blocker.wait()
            process = await _filled(server.url, waiting)
            for words in (("CONFIG", "SET", "slowlog-log-slower-than", "1000"), ("SLOWLOG", "RESET")):
                await asyncio.to_thread(server.command, *words)
            seen.changes.clear()
            process.kill()
            await process.wait()
            await _admitted(pools[1], blocker, seen)
            seen.longest_script_ms = longest_ms(await asyncio.to_thread(server.command, "SLOWLOG", "GET", "128"))
        finally:
            await asyncio.gather(*(pool.close() for pool in pools))
    seen.times_divided, seen.divided_s = divided(seen.changes, time.monotonic())
    return seen


def policy() -> Policy:
    """One tier whose pool holds one request: all others wait."""
    loaded = shipped(with_tiers({"only": {}}))
    rules = replace(loaded.rules, tokens=1, requests=1, tiers=tuple(_whole(tier) for tier in loaded.rules.tiers))
    return replace(loaded, rules=rules, pool="adversary-dead")


def _whole(tier: TierRules) -> TierRules:
    return replace(tier, limit=(1, 1, UNLIMITED))


def pool_of(url: str, seen: Seen | None = None) -> Pool:
    """A replica."""
    shared = policy()
    link = RedisLink(ledger_connector(store_address(url), shared.pool), shared.pool)
    return Pool(shared, link=link, observer=None if seen is None else seen.note)


def divided(changes: Sequence[tuple[float, StoreState]], end_s: float) -> tuple[int, float]:
    """How often any pool left the shared state, and the seconds from the first such change until the last return."""
    lost = [at_s for at_s, state in changes if state is not StoreState.SHARED]
    back = [at_s for at_s, state in changes if state is StoreState.SHARED]
    if not lost:
        return 0, 0.0
    is_over = len(back) >= len(lost)
    return len(lost), (max(back) if is_over else end_s) - min(lost)


def longest_ms(slowlog: Sequence[Sequence[object]]) -> float:
    """The longest script in an answer of SLOWLOG GET; 0 for none above a millisecond."""
    scripts = [entry for entry in slowlog if str(entry[3][0]).upper().startswith(("EVAL", "FCALL"))]  # type: ignore[index]
    return max((int(str(entry[2])) / 1000 for entry in scripts), default=0.0)


async def _filled(url: str, waiting: int) -> asyncio.subprocess.Process:
    words = ("-m", "benchmarks.adversary.dead_replica", url, str(waiting))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    said = await asyncio.wait_for(process.stdout.readline(), FILLED_WITHIN_S)
    if said.strip() != b"waiting":
        raise RuntimeError(f"the replica that is to be killed said {said!r}")
    return process


async def _admitted(pool: Pool, blocker: Lease, seen: Seen) -> None:
    """Returns when a request of a replica that lives is admitted, or after some time."""
    began_s = time.monotonic()
    lease = await pool.enter(Ask(0, "there", 1, 1, 1))
    blocker.settle()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(lease.wait(), 4 * ADMITTED_WITHIN_S)
    seen.admitted_after_s = time.monotonic() - began_s


async def _fill(url: str, waiting: int) -> None:
    """The replica that is to be killed: it enters so many requests, says so, and waits for its end."""
    pool = pool_of(url)
    await pool.open()
    for first in range(0, waiting, AT_ONCE):
        asks = [Ask(0, f"tenant-{number % 50}", 1, 1, 1) for number in range(first, min(waiting, first + AT_ONCE))]
        leases = await asyncio.gather(*(pool.enter(ask) for ask in asks))
        if any(lease.grant is not None for lease in leases):
            raise RuntimeError("a request was admitted that should wait")
    print("waiting", flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(FILLED_WITHIN_S)


if __name__ == "__main__":
    asyncio.run(_fill(sys.argv[1], int(sys.argv[2])))
