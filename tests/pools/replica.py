"""A replica in a process of its own, to be killed or stopped: it takes leases and holds them for as long as it lives.

`python -m tests.pools.replica URL POOL LEASES TOKENS` prints `holding`; a line on its input settles one lease and
answers with what its pool's store is.
"""

from __future__ import annotations

import asyncio
import sys

from tests.pools.harness import ask, simple
from tests.pools.load import replica


async def main(url: str, name: str, leases: int, tokens: int) -> None:
    pool = replica(url, simple(tokens=100), name=name)
    await pool.open()
    held = [await pool.enter(ask(tokens=tokens)) for _ in range(leases)]
    await asyncio.gather(*(lease.wait() for lease in held))
    say("holding" if all(lease.grant for lease in held) else "waiting")
    reader = asyncio.get_running_loop().run_in_executor
    while held:
        await reader(None, sys.stdin.readline)
        held.pop().settle()
        await asyncio.sleep(0.1)
        say(f"settled, {pool.status.state.value}, own {len(held)}")
    await pool.close()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
