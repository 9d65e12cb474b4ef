"""Several real servers that know each other: a master with its replica, the same under sentinels, a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.redis_servers import HOST, Binary, RedisServer, ReplyError, until

MASTER_NAME = "mymaster"
SLOTS = 16_384
AT_ONCE = ("--repl-diskless-sync-delay", "0")
"""Otherwise a master waits 5 s for more replicas before it sends the first one its data."""
PERIODS_MS = {"info-period": 500, "publish-period": 200, "ask-period": 200}
"""A tenth or so of what sentinels do by themselves, where hearing of one another takes 2 s, and of a replica 10 s.

The ping-period stays at its 1 s: a sentinel promotes no replica whose last INFO is older than five of them, and while
the master is away, it asks for one each second, whatever the info-period.
"""


@contextmanager
def replica_pair(binary: Binary, folder: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A master and its replica, in step."""
    with (
        RedisServer(binary, folder, *AT_ONCE) as master,
        RedisServer(binary, folder, *AT_ONCE, "--replicaof", f"{HOST} {master.port}") as replica,
    ):
        until(lambda: "master_link_status:up" in replica.command("INFO", "replication"), "the replica is in step")
        yield master, replica


class SentinelServer(RedisServer):
    """One sentinel. What it learns is in its configuration file, and outlives a restart."""

    def __init__(self, binary: Binary, folder: Path, master: RedisServer, quorum: int) -> None:
        super().__init__(binary, folder)
        self._settings = [
            f"sentinel monitor {MASTER_NAME} {HOST} {master.port} {quorum}",
            f"sentinel down-after-milliseconds {MASTER_NAME} 500",
            f"sentinel failover-timeout {MASTER_NAME} 2000",
        ]

    def wait_ready(self) -> None:
        super().wait_ready()
        with suppress(ReplyError):  # before Redis 7 the periods are fixed
            self.command("SENTINEL", "DEBUG", *(word for pair in PERIODS_MS.items() for word in pair))

    def knows(self) -> tuple[int, int]:
        """How many replicas and how many other sentinels it knows."""
        state = self.command("SENTINEL", "MASTER", MASTER_NAME)
        fields = dict(zip(state[::2], state[1::2], strict=True))
        return int(fields["num-slaves"]), int(fields["num-other-sentinels"])

    def master_port(self) -> int:
        """The port of the server that it takes for the master."""
        return int(self.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER_NAME)[1])

    def _command_line(self) -> list[str]:
        file = self.folder / f"sentinel-{self.port}.conf"
        if not file.exists():
            lines = [f"port {self.port}", f"bind {HOST}", *self._settings]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [str(self.binary.path), str(file), "--sentinel"]


@dataclass(frozen=True)
class Sentinels:
    """A master and its replica, as they started, and the sentinels that watch them."""

    master: RedisServer
    replica: RedisServer
    sentinels: list[SentinelServer]
    master_name: str = MASTER_NAME

    @property
    def url(self) -> str:
        """All sentinels, the master's name and database 0."""
        return f"redis+sentinel://{_addresses(self.sentinels)}/{self.master_name}/0"

    def wait_master_is_not(self, port: int, within_s: float = 15.0) -> int:
        """Waits until every running sentinel names another master than the one on `port`; returns that one's port.

        A failover takes 2 s or so; when two sentinels vote for themselves, the next try comes 4 s later.
        """
        until(lambda: port not in self._master_ports(), "the sentinels name another master", within_s)
        return self._master_ports().pop()

    def _master_ports(self) -> set[int]:
        return {sentinel.master_port() for sentinel in self.sentinels if sentinel.is_running}


@contextmanager
def sentinel(binary: Binary, folder: Path, quorum: int = 2) -> Iterator[Sentinels]:
    """A pair under three sentinels that all know it and each other. A failover needs two of them in any case."""
    with replica_pair(binary, folder) as (master, replica), ExitStack() as stack:
        watchers = [SentinelServer(binary, folder, master, quorum) for _ in range(3)]
        for watcher in watchers:
            stack.enter_context(watcher)
        until(lambda: {watcher.knows() for watcher in watchers} == {(1, 2)}, "the sentinels know everybody")
        yield Sentinels(master, replica, watchers)


@dataclass(frozen=True)
class Cluster:
    """Masters that share the slots evenly."""

    nodes: list[RedisServer]

    @property
    def url(self) -> str:
        """All nodes."""
        return f"redis+cluster://{_addresses(self.nodes)}"

    def is_whole(self) -> bool:
        """Whether every node knows every other, and an owner of each slot."""
        wanted = {"cluster_state:ok", f"cluster_known_nodes:{len(self.nodes)}"}
        return all(wanted <= set(node.command("CLUSTER", "INFO").split("\r\n")) for node in self.nodes)


@contextmanager
def cluster(binary: Binary, folder: Path, masters: int = 3) -> Iterator[Cluster]:
    """A cluster that serves every slot. It takes 2 s: so long a new node waits before it serves any."""
    arguments = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
    with ExitStack() as stack:
        nodes = [stack.enter_context(RedisServer(binary, folder, *arguments)) for _ in range(masters)]
        for index, node in enumerate(nodes):
            _own_slots(node, index * SLOTS // masters, (index + 1) * SLOTS // masters - 1)
            # Nodes that start with the same epoch first have to settle whose is whose.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            node.command("CLUSTER", "MEET", HOST, nodes[0].port)
        whole = Cluster(nodes)
        until(whole.is_whole, "the cluster is whole")
        yield whole


def _own_slots(node: RedisServer, first: int, last: int) -> None:
    try:
        node.command("CLUSTER", "ADDSLOTSRANGE", first, last)
    except ReplyError:  # new in Redis 7
        node.command("CLUSTER", "ADDSLOTS", *range(first, last + 1))


def _addresses(servers: Sequence[RedisServer]) -> str:
    return ",".join(f"{server.host}:{server.port}" for server in servers)
