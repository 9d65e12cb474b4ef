"""A store that does not answer as it should: whatever it says, or does not say, a link tells it once, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from sidecar.errors import StoreUnavailable
from sidecar.policy.choices import StoreLoss
from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.pools.base import StoreError
from sidecar.pools.calls import LAYOUT, Call, Reply, WakeUp
from sidecar.pools.redis import RedisLink, ledger_connector
from sidecar.pools.redis.connection import SideConnection, StoreReach
from sidecar.pools.redis.script import Script
from tests.pools.harness import ask, simple
from tests.pools.load import nothing_left, recovered, replicas
from tests.support.redis_servers import RedisServer, ReplyError
from tests.support.shared_pools import begun_store
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], "asyncio.Future[None]"]
REPLY = msgspec.msgpack.encode(Reply(1, "unknown"))
GOOD = b"$%d\r\n%s\r\n" % (len(REPLY), REPLY)


class User:
    """Who hears of a link's answers."""

    def __init__(self) -> None:
        self.heard: list[Reply | str] = []

    def answered(self, reply: Reply) -> None:
        self.heard.append(reply)

    def unanswered(self, why: str) -> None:
        self.heard.append(why)

    def woken(self, wake_up: WakeUp) -> None:
        raise AssertionError


class Store:
    """A server of our own: `answers` are what it writes for each call in turn, in pieces; None ends the connection."""

    def __init__(self) -> None:
        self.answers: list[list[bytes | None]] = []
        self.calls = self.connections = 0
        self.was_read = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while words := await self._read(reader):
                if words[0] not in (b"FCALL", b"EVALSHA"):
                    writer.write(b"+OK\r\n")
                    continue
                self.calls += 1
                self.was_read.set()
                for piece in self.answers.pop(0) if self.answers else [GOOD]:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> list[bytes]:
        head = await reader.readline()
        words = []
        for _ in range(int(head[1:] or 0)):
            size = int((await reader.readline())[1:])
            words.append((await reader.readexactly(size + 2))[:-2])
        return words


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Store, RedisLink, User, StoreReach]]:
    store, user, reach = Store(), User(), StoreReach()
    server = await asyncio.start_server(store.serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    link = RedisLink(ledger_connector(store_address(f"redis://127.0.0.1:{port}/0"), "p"), "p", reach=reach)
    try:
        yield store, link, user, reach
    finally:
        await link.close()
        server.close()


async def heard(user: User, count: int = 1) -> list[Reply | str]:
    await until(lambda: len(user.heard) >= count, what="an answer")
    return user.heard


def call(number: int = 1) -> Call:
    return Call(LAYOUT, "me", number, "ask")


async def test_an_answer_may_come_in_any_pieces() -> None:
    async with linked() as (store, link, user, _):
        store.answers = [[GOOD[at : at + 1] for at in range(len(GOOD))]]
        link.send(call(), user)
        assert await heard(user) == [Reply(1, "unknown")]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([None], "onnection"),
        ([GOOD[:7], None], "onnection"),
        ([b"-READONLY You can't write against a read only replica.\r\n"], "read only"),
        ([b"-MISCONF Errors writing to the AOF file\r\n"], "AOF"),
        ([b"-BUSY Redis is busy running a script.\r\n"], "busy"),
        ([b"-LOADING Redis is loading the dataset in memory\r\n"], "loading"),
        ([b"$-1\r\n"], "none of the ledger's"),
        ([b"*0\r\n"], "none of the ledger's"),
        ([b":1\r\n"], "none of the ledger's"),
        ([b"$3\r\nfoo\r\n"], "none of the ledger's"),
        ([b"what?\r\n"], ""),
    ],
)
async def test_anything_else_is_told_once_and_the_next_call_has_a_new_connection(
    answer: list[bytes | None], words: str
) -> None:
    async with linked() as (store, link, user, reach):
        store.answers = [answer]
        link.send(call(), user)
        (why,) = await heard(user)
        assert isinstance(why, str)
        assert words in why
        lost = [reach.lost_because]
        link.send(call(2), user)
        await heard(user, 2)
        assert user.heard[1:] == [Reply(1, "unknown")]
        assert [*lost, reach.lost_because] == [why, None]
        assert store.calls == 2


async def test_a_late_answer_is_not_taken_for_that_of_the_next_call() -> None:
    async with linked() as (store, link, user, _):
        store.answers = [[b""], [GOOD]]
        link.send(call(), user)
        await asyncio.wait_for(store.was_read.wait(), 60)
        link.send(call(2), user)  # its member has given the first one up
        assert await heard(user) == [Reply(1, "unknown")]
        assert store.connections >= 2


async def test_a_link_that_closes_while_a_call_is_on_its_way_leaves_nothing() -> None:
    async with linked() as (store, link, user, _):
        store.answers = [[b""]]
        link.send(call(), user)
        await asyncio.wait_for(store.was_read.wait(), 60)
        await link.close()
        assert user.heard == []
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "sidecar store"]


async def test_while_the_store_is_lost_nothing_else_connects_to_it() -> None:
    async def connect() -> None:
        raise AssertionError

    reach = StoreReach()
    reach.lost_because = "it is away"
    with pytest.raises(StoreError, match="it is away"):
        await SideConnection(connect, reach).run(Script.of(""), [])  # type: ignore[arg-type]


# -- a real server that cannot be written to


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with begun_store(tmp_path, "faults") as started:
        yield started


def policy() -> Policy:
    return simple(tokens=120)


FAULTS = {
    "out of memory": ("CONFIG SET maxmemory 1mb", "CONFIG SET maxmemory 0"),
    "read-only": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "too few replicas": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    "no right": ("ACL SETUSER default -@scripting", "ACL SETUSER default +@all"),
    "a script that hangs": ("EVAL while(true)do(''):len()end 0", "SCRIPT KILL"),
    "no right to keys": ("ACL SETUSER default resetkeys", "ACL SETUSER default allkeys"),
}
IN_EVERY_RUN = ("read-only", "a script that hangs")
"""One that answers an error, and one that does not answer: the others are errors, too."""


@pytest.mark.hasty
@pytest.mark.parametrize("on_loss", list(StoreLoss))
@pytest.mark.parametrize(
    "fault", [it if it in IN_EVERY_RUN else pytest.param(it, marks=pytest.mark.long) for it in FAULTS]
)
async def test_a_store_that_cannot_be_written_is_lost_and_heals_by_itself(
    server: RedisServer, fault: str, on_loss: StoreLoss
) -> None:
    breaks, heals = FAULTS[fault]
    async with replicas(policy(), [server.url] * 2, on_loss=on_loss) as pools:
        running = await pools[0].enter(ask(tokens=10))
        began_s, connected = time.monotonic(), connections(server)
        server.command("CONFIG", "SET", "busy-reply-threshold", "100")
        broken = asyncio.get_running_loop().run_in_executor(None, said, server, *breaks.split())
        await until(lambda: broken.done() or is_busy(server), what="it is broken")
        if on_loss is StoreLoss.DIVIDE:
            lease = await asyncio.wait_for(pools[0].enter(ask(tokens=10)), 60)
            await asyncio.wait_for(lease.wait(), 60)
            assert lease.settle()
            await until(lambda: bool(pools[0].notices()), what="it is lost")
            (notice,) = pools[0].notices()
            assert "its part of the pool is" in notice
        else:
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(pools[0].enter(ask(tokens=10)), 60)
            assert "new requests are refused" in pools[0].readiness()[0]
        await asyncio.sleep(1)
        server.command(*heals.split())
        await broken
        per_replica = (connections(server) - connected) / len(pools)
        assert per_replica <= 2 * (time.monotonic() - began_s) + 4
        await recovered(pools)
        assert running.settle()
        await nothing_left(pools)


def said(server: RedisServer, *words: str) -> None:
    """A command that may end by being killed."""
    with contextlib.suppress(Exception):
        server.command(*words)


def is_busy(server: RedisServer) -> bool:
    """Whether a script hangs."""
    try:
        return bool(server.command("PING") != "PONG")
    except ReplyError as error:
        return str(error).startswith("BUSY")


def connections(server: RedisServer) -> int:
    lines = server.command("INFO", "stats").splitlines()
    return next(int(line.split(":")[1]) for line in lines if line.startswith("total_connections_received"))
