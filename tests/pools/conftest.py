"""The pools that are held to the contract: one process, and every Redis that there is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.pools.harness import ByGain, Harness, LocalHarness
from tests.pools.redis_harness import FakeHarness, RedisHarness
from tests.support.redis_servers import RedisServer, binaries, first_binary

BINARIES = {binary.name: binary for binary in binaries()}
SERVERS = [*BINARIES] or ["none"]  # where there is none, the tests fail: an empty list would skip them


@pytest.fixture(scope="session", params=SERVERS)
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real server, of every kind that is installed."""
    binary = BINARIES.get(request.param) or first_binary()
    with RedisServer(binary, tmp_path_factory.mktemp(binary.name)) as server:
        yield server


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RedisServer]]:
    """One real server of every kind, started when it is first asked for."""
    started = Servers(tmp_path_factory.mktemp("servers"))
    yield started
    for server in started.values():
        server.stop()


class Servers(dict[str, RedisServer]):
    """Servers by the name of their kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> RedisServer:
        binary = BINARIES.get(name) or first_binary()
        folder = self._folder / binary.name
        folder.mkdir()
        self[name] = RedisServer(binary, folder)
        self[name].start()
        return self[name]


KINDS = ["local", "fakeredis", *SERVERS]
BY_GAIN = ["local by gain", f"{SERVERS[0]} by gain"]
"""Requests without deadlines, in a pool that orders by gain: it does what the contract says, too."""


@pytest.fixture(params=[*KINDS, *BY_GAIN])
async def harness(request: pytest.FixtureRequest, servers: dict[str, RedisServer]) -> AsyncIterator[Harness]:
    kind, *order = request.param.split(" by ")
    made = new_harness(kind, servers)
    yield ByGain(made) if order else made
    await made.close()


@pytest.fixture(params=KINDS)
async def level_harness(request: pytest.FixtureRequest, servers: dict[str, RedisServer]) -> AsyncIterator[Harness]:
    """Pools that order by level only."""
    made = new_harness(request.param, servers)
    yield made
    await made.close()


def new_harness(kind: str, servers: dict[str, RedisServer]) -> Harness:
    """That of one kind of pool."""
    if kind == "local":
        return LocalHarness()
    return FakeHarness() if kind == "fakeredis" else RedisHarness(servers[kind])
