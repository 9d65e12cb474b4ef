"""The way to a pool's ledger in Redis or Valkey: a connection for calls, and one on which wake-ups come.

`Member` makes one call at a time and says when an answer is late. What else ends a call without a reply is reported at
once, and the connection is made anew for the next: also after an answer that is an error, because another server may be
the one that can be written to now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from sidecar.pools.base import MOST_REPORT_BYTES, Clock, PeerReport, StoreError
from sidecar.pools.calls import HEARTBEAT_US, Call, Reply, WakeUp
from sidecar.pools.member import LAZY_US
from sidecar.pools.redis import script
from sidecar.pools.redis.connection import Connect, SideConnection, StoreConnection, StoreReach, ledger_key
from sidecar.pools.redis.script import Library

if TYPE_CHECKING:
    from sidecar.pools.pool import Pool


# -- Gossip of replicas through the store: each leaves a report for the others. No admission depends on it.
#
# It has a connection of its own, opened when it is first needed: no admission waits for a large answer, and a
# failure here does not count as a loss of the store.

_SILENCE_MS = 10_000
_MOST = 128


class Gossip:
    """The reports that one replica leaves and reads. Use it from one event loop.

    Beside the `root` of the pool `ROOT:reports` is a hash, replica -> "MICROSECONDS REPORT". It lasts for as long as a
    replica may be silent.
    """

    def __init__(self, replica: str, root: str, connect: Connect, reach: StoreReach | None = None) -> None:
        self._replica, self._own_name = replica, replica.encode()
        self._reports = f"{root}:reports"
        self._connection = SideConnection(connect, reach)

    async def share(self, report: bytes) -> Mapping[str, PeerReport]:
        """See `Pool.share`."""
        if len(report) > MOST_REPORT_BYTES:
            raise StoreError(f"a report of {len(report)} bytes is more than the {MOST_REPORT_BYTES} that it may have")
        async with self._connection.turn():
            now_us = await self._now_us()
            *_, fields = await self._connection.commands(
                ("HSET", self._reports, self._replica, b"%d %b" % (now_us, report)),
                ("PEXPIRE", self._reports, _SILENCE_MS),
                ("HGETALL", self._reports),
            )
            found = {name: _read(written, now_us) for name, written in zip(fields[::2], fields[1::2], strict=True)}
            if silent := [name for name, read in found.items() if read is None]:
                await self._connection.commands(("HDEL", self._reports, *silent))
        others = ((name, read) for name, read in found.items() if read is not None and name != self._own_name)
        return {name.decode(): read for name, read in islice(others, _MOST)}

    async def close(self) -> None:
        """Removes this replica's report, where it has left one and the store can be reached."""
        with contextlib.suppress(StoreError):  # the report expires
            async with self._connection.turn():
                if (connection := self._connection.open) is not None:
                    await connection.commands(("HDEL", self._reports, self._replica))
        await self._connection.close()

    async def _now_us(self) -> int:
        ((seconds, microseconds),) = await self._connection.commands(("TIME",))
        return int(seconds) * 1_000_000 + int(microseconds)


def _read(written: bytes, now_us: int) -> PeerReport | None:
    """None where it is too old, too long or no report."""
    stamp, _, report = written.partition(b" ")
    if not stamp.isdigit() or len(report) > MOST_REPORT_BYTES:
        return None
    age_us = max(0, now_us - int(stamp))
    return PeerReport(age_us / 1e6, report) if age_us <= 1_000 * _SILENCE_MS else None


BETWEEN_CONNECTIONS_S = 0.5
SILENT_SUBSCRIPTION_S = 5.0
"""A subscription on which nothing came for so long is asked whether it lives. Way-stations forget silent ones."""

RoundTripObserver = Callable[[float], None]
"""Called with how long each call to the store took, in seconds, answered or not. Must not raise and must not block."""

_log = logging.getLogger("sidecar.store")
_reply, _wake_up = msgspec.msgpack.Decoder(Reply), msgspec.msgpack.Decoder(WakeUp)


def old_pools(pool: str) -> Sequence[str]:
    """The roots of the layouts before the ledger. While a pool there is alive, the ledger grants nothing."""
    return [f"admission:{layout}:{{{pool}}}" for layout in ("9", "engines-5", "gain-4", "gain-engines-4")]


@cache
def ledger_library() -> Library:
    """The ledger's script."""
    return script.library(script.texts())


class RedisLink:
    """See `Link`. `connect` is `ledger_connector(...)`; use it from one event loop at a time.

    `reach` gets whether the store answers. `took` is called with how long each call takes. `library` and `clock` are
    for tests: the script, and its time.
    """

    heartbeat_us, lazy_us = HEARTBEAT_US, LAZY_US
    is_shared = True
    near = None

    def __init__(
        self,
        connect: Connect,
        pool: str,
        *,
        reach: StoreReach | None = None,
        took: RoundTripObserver | None = None,
        library: Library | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.round_trips = 0
        self._connect, self._took, self._reach = connect, took, reach or StoreReach()
        self._root, self._keys = ledger_key(pool), (ledger_key(pool), *old_pools(pool))
        self._library, self._clock = library or ledger_library(), clock
        self._user: Pool | None = None
        self._who = ""
        self._call: bytes | None = None
        self._is_on_its_way = False
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connected_s = 0.0
        self._gossip: Gossip | None = None

    def send(self, call: Call, user: Pool) -> None:
        """See `Link.send`. A call that is on its way was given up: its answer must not be taken for this one's."""
        self._user, self._who, self._call = user, call.who, msgspec.msgpack.encode(call)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the one before may have ended, with its tasks and connections
            self._loop, self._task, self._gossip, self._connected_s = loop, None, None, 0.0
        if self._is_on_its_way and self._task is not None:
            self._task.cancel()
            self._task = None
        if self._task is None:
            self._wanted = asyncio.Event()
            self._is_on_its_way = False
            self._task = loop.create_task(self._run(self._wanted), name="sidecar store")
        self._wanted.set()

    async def share(self, who: str, report: bytes) -> Mapping[str, PeerReport]:
        """See `Link.share`."""
        if self._gossip is None:
            self._gossip = Gossip(who, self._root, self._connect, self._reach)
        return await self._gossip.share(report)

    async def close(self) -> None:
        """See `Link.close`."""
        task, gossip, self._task, self._gossip, self._user = self._task, self._gossip, None, None, None
        self._reach.lost_because = None
        if gossip is not None:
            await gossip.close()
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self, wanted: asyncio.Event) -> None:
        while True:
            await wanted.wait()
            loop = asyncio.get_running_loop()
            await asyncio.sleep(self._connected_s + BETWEEN_CONNECTIONS_S - loop.time())
            self._connected_s = loop.time()
            try:
                await self._stay_connected(wanted)
            except StoreError as error:
                why = str(error)
            except Exception as defect:
                _log.exception("a defect in the sidecar; going on as if the store were lost", extra={"event": "defect"})
                why = f"{type(defect).__name__}: {defect}"
            wanted.clear()
            self._is_on_its_way, self._reach.lost_because = False, why
            if self._user is not None:
                self._user.unanswered(why)

    async def _stay_connected(self, wanted: asyncio.Event) -> None:
        """Carries calls until one has no answer, and raises StoreError then."""
        connection = await self._connect()
        listening: asyncio.Task[None] | None = None
        try:
            while True:
                await wanted.wait()
                wanted.clear()
                reply = await self._answer(connection)
                self._reach.lost_because = None
                if listening is None:
                    listening = asyncio.ensure_future(self._listen(connection))
                if self._user is not None:
                    self._user.answered(reply)
        finally:
            try:
                if listening is not None:
                    listening.cancel()
                    await asyncio.wait((listening,))
            finally:
                await connection.close()

    async def _answer(self, connection: StoreConnection) -> Reply:
        assert self._call is not None
        self._is_on_its_way = True
        self.round_trips += 1
        began_s = time.perf_counter()
        try:
            now = () if self._clock is None else (self._clock(),)
            answer = await connection.ask(self._library, self._keys, (self._call, *now))
        finally:
            if self._took is not None:
                self._took(time.perf_counter() - began_s)
        self._is_on_its_way = False
        try:
            return _reply.decode(answer)
        except (msgspec.DecodeError, TypeError):
            raise StoreError(f"an answer that is none of the ledger's: {answer!r:.100}") from None

    async def _listen(self, connection: StoreConnection) -> None:
        """Passes on wake-ups. One that is lost comes again with the next reply."""
        while True:
            with contextlib.suppress(StoreError):
                await connection.listen(
                    (self._root, f"{self._root}:{self._who}"), self._on_message, SILENT_SUBSCRIPTION_S
                )
            await asyncio.sleep(2 * BETWEEN_CONNECTIONS_S)

    def _on_message(self, message: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):  # of another layout
            wake_up = _wake_up.decode(message)
            if self._user is not None:
                self._user.woken(wake_up)
