"""`sidecar serve` before an engine that runs in this process, and what its admin port says."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.processes import addresses, start

POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running `sidecar serve`: its addresses for clients and of its admin port, and what it logs."""

    url: str
    admin: str
    log: Path

    def defects(self) -> int:
        """How often it has logged a defect of its own so far."""
        return self.log.read_text().count('"event": "defect"')


@asynccontextmanager
async def proxy(
    upstream: str, policy: str | Path, tenants: Mapping[str, str] | None = None, **variables: str
) -> AsyncIterator[Proxy]:
    """Runs it with a policy of that text, or in that folder; `tenants` are the tenants' files by their names."""
    with tempfile.TemporaryDirectory() as folder:
        where = policy if isinstance(policy, Path) else _written(Path(folder), policy, tenants or {})
        words = ("serve", "--upstream", upstream, "--policy", str(where), "--port", "0", "--admin-port", "0")
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = start(*words, "--grace", "1s", "--log-format", "json", stderr=stderr, **variables)
        try:
            # In a thread: the engine that it talks to lives in this event loop.
            url, admin = await asyncio.to_thread(addresses, process, 2)
            yield Proxy(url, admin, log)
        finally:
            process.terminate()
            await asyncio.to_thread(process.communicate)


def _written(folder: Path, policy: str, tenants: Mapping[str, str]) -> Path:
    (folder / "policy.yaml").write_text(policy)
    for name, text in tenants.items():
        path = folder / "tenants" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def tenant_file(name: str, tier: str) -> str:
    """A tenant's file; its key is `key_of` its name."""
    digest = hashlib.sha256(key_of(name).encode()).hexdigest()
    return f'tenant: {name}\nkeys: ["sha256:{digest}"]\ntier: {tier}\n'


def key_of(name: str) -> str:
    """The API key of a tenant of these benchmarks."""
    return f"sk-adversary-{name}"


@dataclass(frozen=True, slots=True)
class Held:
    """What one request held while the engine worked on it, or the status that refused it."""

    tokens: int = 0
    requests: int = 0
    refused: int | None = None


async def state_of(client: aiohttp.ClientSession, admin: str) -> Any:
    """The pool as `/state` of an admin port says it; the document of the one pool."""
    async with client.get(f"{admin}/state") as response:
        return await response.json()


def held_in(state: Any) -> Held:
    """What all tiers hold together."""
    tiers = [tier["held"] for tier in pool_in(state)["tiers"]]
    return Held(sum(tier["tokens"] for tier in tiers), sum(tier["requests"] for tier in tiers))


def pool_in(state: Any) -> Any:
    """The pool's part of a `/state` document, wherever it stands there."""
    if "tiers" in state and "leases" in state:
        return state
    return next(found for found in map(_pool_or_none, state.values()) if found is not None)


def _pool_or_none(value: Any) -> Any:
    if isinstance(value, dict) and ("tiers" in value and "leases" in value):
        return value
    return None


async def held_by(
    client: aiohttp.ClientSession, where: Proxy, gate: asyncio.Event, path: str, body: bytes, *, key: str | None = None
) -> Held:
    """Sends one request to an engine that answers when `gate` opens, and says what it held until then."""
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    gate.clear()
    sent = asyncio.ensure_future(_status(client, where.url + path, body, headers))
    try:
        while not sent.done():
            held = held_in(await state_of(client, where.admin))
            if held.requests:
                return held
            await asyncio.sleep(POLL_S)
        return Held(refused=await sent)
    finally:
        gate.set()
        await sent
        await _nothing_held(client, where)


async def _status(client: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str]) -> int:
    async with client.post(url, data=body, headers=headers) as response:
        await response.read()
        return response.status


async def _nothing_held(client: aiohttp.ClientSession, where: Proxy) -> None:
    for _ in range(1_000):
        if not held_in(await state_of(client, where.admin)).requests:
            return
        await asyncio.sleep(POLL_S)
    raise RuntimeError("a lease is left after its request was answered")
