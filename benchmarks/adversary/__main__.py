"""Plays attacks against the product, and says what of them held.

    python -m benchmarks.adversary [--only NAME] [--json FILE]

Each attack is a module of this folder, which says what it does. Every figure that something is asked of has a control,
or fails by itself where the attack was none. The command fails where one figure is not as asked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.adversary import (
    batch_sizes,
    bounds,
    dead_replica,
    disconnects,
    estimates,
    largest,
    overtaking,
    prompts,
    store,
    tenants,
)
from benchmarks.adversary.report import Line, as_json, table

Rows = Callable[[], Iterator[Line] | AsyncIterator[Line]]
ATTACKS: Mapping[str, Rows] = {
    "largest": largest.rows,
    "batch": batch_sizes.rows,
    "tenants": tenants.rows,
    "overtaking": overtaking.rows,
    "bounds": bounds.rows,
    "disconnects": disconnects.rows,
    "prompts": prompts.rows,
    "estimates": estimates.rows,
    "store": store.rows,
    "dead-replica": dead_replica.rows,
}


async def played(rows: Rows) -> AsyncIterator[Line]:
    """The lines of one attack as they come; one that cannot be played is a line that says why, and did not hold."""
    try:
        lines = rows()
        if isinstance(lines, Iterator):
            for line in lines:
                yield line
        else:
            async for line in lines:
                yield line
    except Exception as error:  # the other attacks are to be played, whatever became of this one
        yield Line(f"  could not be played: {type(error).__name__}: {error}", "", "", False)


async def play(names: list[str]) -> list[Line]:
    """Plays attacks by their names, and prints what they found."""
    found: list[Line] = []
    for name in names:
        began_s = time.monotonic()
        print(f"-- {name}", flush=True)
        async for line in played(ATTACKS[name]):
            found.append(line)
            print(table([line]), flush=True)
        print(f"   {time.monotonic() - began_s:.0f} s\n", flush=True)
    return found


def main() -> int:
    """Returns 1 where a figure is not as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(ATTACKS), action="append", help="only this attack (default: all)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    logging.getLogger("sidecar").setLevel(logging.CRITICAL)  # a store that is lost here is lost on purpose
    found = asyncio.run(play(arguments.only or list(ATTACKS)))
    if arguments.json:
        Path(arguments.json).write_text(as_json(found))
    broken = sum(line.holds is False for line in found)
    print(f"{broken} of {sum(line.holds is not None for line in found)} figures are not as asked")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
