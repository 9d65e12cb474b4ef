"""Keeps one replica connected to its store: it calls, beats, listens, and connects anew. What is said, the pool knows.

One call is on its way at a time. What happens meanwhile, or in one tick of the event loop, travels in the next. After
any failure the connection is given up, a new one made, and the replica states everything it has before it says anything
else: a lost answer needs no other remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from sidecar.pools.redis import protocol
from sidecar.pools.redis.connection import ANSWER_WITHIN_S, Connect, Connection, PoolRefuses, StoreError
from sidecar.pools.redis.lease import RedisLease
from sidecar.pools.redis.outbox import Batch, Outbox
from sidecar.pools.redis.statement import Slice, Statement

RETRY_S = 0.5
"""How often a lost store is tried: four times a heartbeat, so that its return is noticed within one."""
BEAT_EVERY_S = 0.9 * protocol.BEAT_S
"""An idle replica hears of an empty store by its beat; the store waits for it for one heartbeat."""
SILENT_SUBSCRIPTION_S = 2.5 * protocol.BEAT_S
"""The store repeats every beat to its replica; two that are not heard mean that the subscription is dead."""
CLOSE_WITHIN_S = 1.0

RoundTripObserver = Callable[[float], None]
"""Told how long each call to the store took, in seconds, answered or not. Must not raise and must not block."""

_log = logging.getLogger("sidecar.store")


class Replica(Protocol):
    """What the link connects. Everything here returns at once."""

    name: str

    def statement(self) -> tuple[Sequence[protocol.Argument], Statement]:
        """What a sync says after its fence, and then of what the replica has. From now on the store decides."""

    def now_us(self) -> int:
        """The replica's clock."""

    def synced(self, reply: protocol.Reply, batch: Batch) -> None:
        """The store knows all leases of the statement."""

    def answered(self, reply: protocol.Reply, batch: Batch) -> None:
        """A call was answered."""

    def unanswered(self, batch: Batch) -> None:
        """A call was not: it may have been done or not. A sync follows."""

    def heard(self, message: bytes) -> None:
        """Grants that other replicas' calls gave, a line each."""

    def lost(self, error: StoreError) -> None:
        """The store cannot be reached. Told again after every attempt."""


class _SyncNeeded(Exception):
    """The store does not know this replica: it was swept, or the store lost everything."""


class Link:
    """Belongs to the event loop in which it is made."""

    def __init__(
        self,
        replica: Replica,
        connect: Connect,
        channel: str,
        outbox: Outbox,
        fences: Iterator[int],
        *,
        took: RoundTripObserver | None = None,
    ) -> None:
        self._fences = fences
        self._fence = 0
        self.round_trips = 0
        self._took = took
        self.loop = asyncio.get_running_loop()
        self._replica = replica
        self._connect = connect
        self._channel = channel
        self._outbox = outbox
        self._listed = 0
        self._statement: Statement | None = None  # of which something is left to say
        self._beat_timer: asyncio.TimerHandle | None = None
        self.decided = asyncio.Event()
        self._is_closing = False
        self._is_connected = False
        self._was_lost = False
        self._restates = False
        self._task = self.loop.create_task(self._run(), name="sidecar store link")

    def restate(self) -> None:
        """Has the replica state everything anew with the next call: what it says has changed as a whole."""
        self._restates = True
        self._outbox.wake()

    async def close(self) -> None:
        """Says good-bye, where the store is there to hear it: what the replica held is free at once."""
        self._is_closing = True
        self._outbox.wake()
        if not self._is_connected:
            self._task.cancel()
        done, _ = await asyncio.wait((self._task,), timeout=CLOSE_WITHIN_S)
        if not done:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._beat_timer is not None:
            self._beat_timer.cancel()

    async def _run(self) -> None:
        while not self._is_closing:
            error = await self._failure()
            if error is not None and self._gives_up(error):
                await asyncio.sleep(RETRY_S * random.uniform(0.8, 1.2))

    async def _failure(self) -> StoreError | None:
        """Connects, and returns why that ended. None where the link was closed."""
        try:
            await self._stay_connected()
        except StoreError as error:
            return error
        except Exception as defect:
            _log.exception("a defect in the sidecar; going on as if the store were lost", extra={"event": "defect"})
            self._is_connected = False
            return StoreError(f"{type(defect).__name__}: {defect}")
        return None

    def _gives_up(self, error: StoreError) -> bool:
        """Whether the store is lost. A connection that worked is first made anew, at once."""
        if self._is_connected:
            self._is_connected = False
            return False
        self._was_lost = True
        self._replica.lost(error)
        self.decided.set()
        return True

    async def _stay_connected(self) -> None:
        """Returns when the link is closed, and raises StoreError when the connection is of no use any more."""
        connection = await self._connect()
        listening: asyncio.Task[None] | None = None
        try:
            if self._was_lost:
                await self._probe(connection)
            await self._sync(connection)
            listening = asyncio.ensure_future(self._listen(connection))
            while await self._serve(connection):
                pass
        finally:
            if listening is not None:
                connection.is_closed = True  # the client may take a cancellation for a failure, and connect anew
                listening.cancel()
                await asyncio.wait((listening,), timeout=CLOSE_WITHIN_S / 2)
            await connection.close()

    async def _serve(self, connection: Connection) -> bool:
        """One call, as soon as there is a reason for it. False where it was the last: the good-bye."""
        await self._outbox.filled()
        if self._restates and not self._is_closing:
            await self._sync(connection)
            return True
        is_last = self._is_closing and not self._outbox.has_more
        batch = self._outbox.take()
        if self._statement is not None and not is_last:
            self._state_more(self._statement, batch)
        kind = protocol.BYE if is_last else protocol.BEAT if batch.is_beat else protocol.CALL
        try:
            reply = await self._call(
                connection, [kind, self._replica.name, self._fence, self._listed, *batch.arguments]
            )
        except _SyncNeeded:
            self._replica.unanswered(batch)
            if not is_last:  # else it is not known there, and need not say good-bye
                await self._sync(connection)
            return not is_last
        except BaseException:
            self._replica.unanswered(batch)
            raise
        self._replica.answered(reply, batch)
        self._goes_on(reply)
        if batch.is_beat:
            self._beat_later()
        return not is_last

    async def _call(self, connection: Connection, arguments: Sequence[protocol.Argument]) -> protocol.Reply:
        answer = await self._timed(connection, arguments)
        if answer[0] == protocol.OK:
            reply = protocol.read_reply(answer)
            self._listed = reply.listed
            return reply
        if answer[0] == protocol.UNKNOWN:
            raise _SyncNeeded
        if answer[0] == protocol.FOREIGN:
            raise PoolRefuses(answer[1].decode())
        if answer[0] == protocol.ABSENT:
            raise PoolRefuses(None)
        raise StoreError("the store took a call for a late one")

    async def _timed(self, connection: Connection, arguments: Sequence[protocol.Argument]) -> list[Any]:
        self.round_trips += 1
        began_s = time.perf_counter()
        try:
            return await connection.call(arguments, ANSWER_WITHIN_S)
        finally:
            if self._took is not None:
                self._took(time.perf_counter() - began_s)

    async def _probe(self, connection: Connection) -> None:
        """Finds out whether the script runs, before the replica gives up deciding by itself."""
        await connection.call([protocol.CALL, self._replica.name, -1, 0])

    async def _sync(self, connection: Connection) -> None:
        """States everything that the replica has, under a new fence: late calls of older ones do nothing.

        Its leases here; its tickets, where they are many, go with the calls that follow.
        """
        self._restates = False
        self._fence = next(self._fences)
        self._listed = 0
        self._statement = None
        header, statement = self._replica.statement()
        try:
            reply, entering = await self._state_leases(connection, header, statement)
        except _SyncNeeded:
            raise StoreError("the pool was damaged; it is being made anew") from None
        self._is_connected = True
        self._was_lost = False
        self._statement = statement
        self._replica.synced(reply, Batch(entering=entering))
        self._goes_on(reply)
        self.decided.set()
        self._beat_later()
        if self._is_closing:  # the reason for a last call went with what was stated
            self._outbox.wake()

    async def _state_leases(
        self, connection: Connection, header: Sequence[protocol.Argument], statement: Statement
    ) -> tuple[protocol.Reply, list[RedisLease]]:
        """All leases, and as many tickets as go with them. The last answer, and the requests that were looked at."""
        part = statement.next_slice(self._replica.now_us())
        entering = list(part.entering)
        kind = protocol.SYNC if statement.is_over else protocol.BEGIN
        said = [*header, *_leases_of(part, statement, is_whole=statement.is_over)]
        reply = await self._call(connection, [kind, self._replica.name, self._fence, *said])
        while statement.has_leases:
            part = statement.next_slice(self._replica.now_us())
            entering += part.entering
            said = _leases_of(part, statement)
            reply = await self._call(connection, [protocol.CALL, self._replica.name, self._fence, self._listed, *said])
        return reply, entering

    def _state_more(self, statement: Statement, batch: Batch) -> None:
        """Adds a part of what is left to state to a call; at last, that nothing is."""
        part = statement.next_slice(self._replica.now_us())
        end = (protocol.ALL_STATED,) if statement.is_over else ()
        batch.arguments = [*part.arguments, *end, *batch.arguments]
        batch.entering = [*part.entering, *batch.entering]

    def _goes_on(self, reply: protocol.Reply) -> None:
        """Has the next call made at once, where something is left to state."""
        if reply.is_stating:
            self._outbox.wake()
        else:
            self._statement = None

    def _beat_later(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = self.loop.call_later(BEAT_EVERY_S, self._outbox.beat)

    async def _listen(self, connection: Connection) -> None:
        """What is not heard here comes with the next beat."""
        while not connection.is_closed:
            with contextlib.suppress(StoreError):
                await connection.listen(self._channel, self._replica.heard, SILENT_SUBSCRIPTION_S)
            await asyncio.sleep(RETRY_S)


def _leases_of(part: Slice, statement: Statement, *, is_whole: bool = False) -> list[protocol.Argument]:
    """A part with leases, and that these were all."""
    is_last = not is_whole and not statement.has_leases
    return [*part.arguments, *((protocol.LEASES_STATED,) if is_last else ())]
