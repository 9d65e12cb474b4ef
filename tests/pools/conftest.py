"""The pools that are held to the contract: that of one process, and one in every Redis that there is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.pools.harness import ByGain, Harness, LocalHarness
from tests.pools.store_harness import on_server
from tests.support.redis_servers import RedisServer, binaries, first_binary

BINARIES = {binary.name: binary for binary in binaries()}
FIRST, *OTHERS = [*BINARIES] or ["none"]  # where there is none, the tests fail: an empty list would skip them
SERVERS = [FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
"""The kinds of servers. What one of them does, the others hardly do otherwise: CI's second step asks them, too."""


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


@pytest.fixture(scope="session", params=SERVERS)
def redis_server(request: pytest.FixtureRequest, servers: dict[str, RedisServer]) -> RedisServer:
    """A real server, of every kind that is installed."""
    return servers[request.param]


KINDS = [
    "local",
    "shared",
    "three replicas",
    *(pytest.param(f"shared on {name}", marks=pytest.mark.long) for name in OTHERS),
]
BY_GAIN = ["local by gain", "shared by gain"]
"""Requests without deadlines, in a pool that orders by gain: it does what the contract says, too."""
in_both_orders = pytest.mark.parametrize("harness", [*KINDS, *BY_GAIN], indirect=True)
"""For tests of what another order decides elsewhere: who is next, what a size changes, who is preempted."""


@pytest.fixture(params=KINDS)
async def harness(request: pytest.FixtureRequest, servers: dict[str, RedisServer]) -> AsyncIterator[Harness]:
    made = harness_of(request.param, servers)
    yield made
    await made.close()


def harness_of(kind: str, servers: dict[str, RedisServer]) -> Harness:
    """That of one kind of pool."""
    kind, *order = kind.split(" by ")
    kind, *server = kind.split(" on ")
    made: Harness
    if kind == "local":
        made = LocalHarness()
    else:
        made = on_server(servers[server[0] if server else FIRST], 0 if kind == "shared" else 2)
    return ByGain(made) if order else made
