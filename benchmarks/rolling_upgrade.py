"""A rolling upgrade between two versions on one store, under load, forth and back: the peak in use, the longest gap.

    python -m benchmarks.rolling_upgrade OLD

OLD is a checkout of the version before, `git worktree add OLD COMMIT` for one. Every replica is a process that keeps
requests waiting; they write down what they hold, and a real server keeps the pool. It starts two of OLD, then two of
this version beside them, ends the old ones one by one (with a goodbye, or killed), and goes the same way back.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CAPACITY = 12
REPLICA = """
import asyncio, random, sys, time
from dataclasses import replace
from sidecar.policy.store import store_address
from tests.pools.harness import ask, simple

url, file, seed = sys.argv[1:4]
luck = random.Random(int(seed))

def pool_of(policy):
    try:
        from sidecar.pools import Pool
        from sidecar.pools.redis import RedisLink, ledger_connector
    except ImportError:
        from sidecar.pools.redis import RedisPool, connector
        return RedisPool(policy, connector(store_address(url), "roll"))
    return Pool(policy, link=RedisLink(ledger_connector(store_address(url), "roll"), "roll"))

async def main():
    import signal
    pool = pool_of(replace(simple(tokens=CAPACITY), pool="roll"))
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    await pool.open()
    log = open(file, "a", buffering=1)
    waiting = set()

    async def one():
        lease = None
        try:
            lease = await pool.enter(ask(luck.randrange(2), 1, tenant=luck.choice("xyz")))
            waiting.add(lease)
            await lease.wait()
            waiting.discard(lease)
            print(time.time(), 1, file=log)
            await asyncio.sleep(luck.uniform(0.05, 0.2))
            print(time.time(), -1, file=log)
            lease.settle()
        except asyncio.CancelledError:
            if lease is not None and lease.grant is None:
                lease.leave()
            raise
        except Exception as error:
            print(time.time(), 0, type(error).__name__, file=log)
            await asyncio.sleep(0.1)

    async def worker():
        while not over.is_set():
            await one()

    workers = [asyncio.ensure_future(worker()) for _ in range(20)]
    await over.wait()
    for lease in list(waiting):
        lease.give_up()
        lease.leave()
    await asyncio.wait(workers, timeout=2)
    await pool.close()
    print(time.time(), 0, "closed", file=log)

asyncio.run(main())
""".replace("CAPACITY", str(CAPACITY))


class Replicas:
    """The processes; what each held is in a file of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._started = url, folder, 0

    def start(self, tree: Path) -> subprocess.Popen[bytes]:
        """One of the version in `tree`."""
        self._started += 1
        command = [sys.executable, "-c", REPLICA, self._url, str(self._folder / f"{self._started}.log")]
        return subprocess.Popen([*command, str(self._started)], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})

    def events(self) -> list[tuple[float, int]]:
        """What all of them have admitted and ended, in the order of time; a killed one's end with it."""
        found = []
        for log in self._folder.glob("*.log"):
            held = 0
            for line in log.read_text().splitlines():
                at_s, change, *_ = line.split()
                found.append((float(at_s), int(change)))
                held += int(change)
            if held:
                found.append((found[-1][0], -held))
        return sorted(found)

    def show(self, name: str, since_s: float) -> None:
        """The peak in use, and the longest time without an admission, of what happened since."""
        held = peak = 0
        last_s, gap_s = since_s, 0.0
        for at_s, change in self.events():
            held += change
            if at_s >= since_s:
                peak = max(peak, held)
                if change > 0:
                    gap_s, last_s = max(gap_s, at_s - last_s), at_s
        sys.stdout.write(f"{name}: peak {peak} of {CAPACITY}, longest gap {gap_s:.1f} s\n")


def roll(
    replicas: Replicas, old: list[subprocess.Popen[bytes]], tree: Path, how: signal.Signals, name: str
) -> list[subprocess.Popen[bytes]]:
    """Replicas of the version in `tree` come, and then the others end, one after the other."""
    began_s = time.time()
    new = [replicas.start(tree) for _ in old]
    time.sleep(6)
    for process in old:
        process.send_signal(how)
        process.wait(30)
        time.sleep(3)
    time.sleep(14 if how is signal.SIGKILL else 6)
    replicas.show(name, began_s)
    return new


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the version before")
    old_tree, this = parser.parse_args().old.resolve(), Path(__file__).parents[1]
    from tests.support.redis_servers import RedisServer, first_binary

    with tempfile.TemporaryDirectory() as folder, RedisServer(first_binary(), Path(folder)) as server:
        replicas = Replicas(server.url, Path(folder))
        running = [replicas.start(old_tree) for _ in range(2)]
        try:
            time.sleep(4)
            for how in (signal.SIGTERM, signal.SIGKILL):
                running = roll(replicas, running, this, how, f"forth, {how.name}")
                running = roll(replicas, running, old_tree, how, f"back, {how.name}")
        finally:
            for process in running:
                process.kill()


if __name__ == "__main__":
    main()
