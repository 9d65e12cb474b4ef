"""Plays the worked example of docs/how-it-works.md on the real pool, and prints what it decided."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sidecar.policy.compiler import load
from sidecar.pools import Ask, Grant, Lease, Pool

# (second, what happens, request, tier, tokens)
STEPS = (
    (0, "arrives", "A", "batch", 700),
    (1, "arrives", "B", "batch", 300),
    (2, "arrives", "C", "normal", 400),
    (3, "arrives", "D", "high", 100),
    (4, "arrives", "E", "high", 300),
    (10, "ends", "A", "", 0),
    (12, "arrives", "F", "normal", 50),
    (15, "ends", "D", "", 0),
    (20, "ends", "E", "", 0),
)


async def main() -> None:
    """Prints one line per step, and one for each request that it admitted."""
    policy = load(Path(__file__).with_name("policy.yaml"))
    names = [tier.name for tier in policy.tiers]
    now_s = 0
    pool = Pool(policy, lambda: now_s * 1_000_000)
    leases: dict[str, Lease] = {}
    waiting: set[str] = set()
    for now_s, event, request, tier, tokens in STEPS:
        if event == "arrives":
            print(f"{now_s:>3} s  {request} arrives: {tier}, {tokens} tokens")
            leases[request] = await pool.enter(Ask(names.index(tier), "somebody", 1, tokens, 1, 0))
            waiting.add(request)
        else:
            print(f"{now_s:>3} s  {request} ends")
            leases[request].settle()
        for admitted in sorted(waiting):
            if grant := leases[admitted].grant:
                print(f"         {admitted} is admitted{said(grant)}")
                waiting.remove(admitted)
    await pool.close()


def said(grant: Grant) -> str:
    """How it has waited."""
    if not grant.queue_wait_us:
        return " at once"
    ahead = ", ".join(f"{tokens} of {name}" for name, tokens in grant.served_ahead.items())
    queued_s, starved_s = grant.queue_wait_us / 1e6, grant.starvation_us / 1e6
    return f": queued {queued_s:g} s, starved {starved_s:g} s, served ahead {ahead or 'nothing'}"


if __name__ == "__main__":
    asyncio.run(main())
