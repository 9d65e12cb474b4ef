"""A batch driver that uses only the idle capacity of a live deployment.

    python examples/leases/nightly.py REQUESTS.jsonl --engine http://127.0.0.1:8001 > answers.jsonl

Each line of REQUESTS.jsonl is the body of a chat completion. Each request takes a lease of the tier `nightly` in the
pool of the policy, waits there after everything that is more important, and then goes straight to the engine, with the
priority of its lease. What is preempted before its answer is sent once more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

import sidecar
from sidecar.leases import Admission, HeldLease

POLICY = Path(__file__).parent / "policy.yaml"
PROMPT_BYTES_PER_TOKEN = 4


async def answer(admission: Admission, engine: aiohttp.ClientSession, request: dict[str, Any]) -> dict[str, Any]:
    """The engine's answer to one request, as soon as there is room for it."""
    prompt_tokens = len(json.dumps(request["messages"])) // PROMPT_BYTES_PER_TOKEN
    tokens = prompt_tokens + int(request.get("max_tokens", 256))

    async def send(lease: HeldLease) -> dict[str, Any]:
        body = {**request, "priority": lease.priority}
        async with engine.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
        lease.used(found["usage"]["total_tokens"])
        return found

    return await admission.run(send, tier="nightly", tokens=tokens, prompt_tokens=prompt_tokens)


async def main() -> None:
    """Sends all requests, at most `--at-once` of them at one time, and prints the answers as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=argparse.FileType())
    parser.add_argument("--engine", required=True, help="the engine's address")
    parser.add_argument("--policy", default=POLICY, help="the pool's policy, the same as that of the deployment")
    parser.add_argument("--store", help="the pool's store, where the policy has none")
    parser.add_argument("--at-once", type=int, default=32, help="requests that wait or run at one time")
    wanted = parser.parse_args()
    places = asyncio.Semaphore(wanted.at_once)

    async def one(line: str) -> None:
        async with places:
            print(json.dumps(await answer(admission, engine, json.loads(line))), flush=True)

    without_limit = aiohttp.ClientTimeout(total=None)
    async with (
        sidecar.connect(wanted.store, policy=wanted.policy) as admission,
        aiohttp.ClientSession(wanted.engine, timeout=without_limit) as engine,
    ):
        done = await asyncio.gather(*map(one, wanted.requests), return_exceptions=True)
    failed = [each for each in done if each is not None]
    for each in failed:
        print(f"failed: {each!r}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    asyncio.run(main())
