"""The session of one replica with its store: calls, heartbeats, the subscription to grants, and new connections.

One call is on its way at a time. Operations of that time, or of one tick of the event loop, travel in the next; only a
request that comes alone is asked for at once. A call of which only the answer matters is made without the session's
task: to wake that takes longer than the rest of what the replica does for an uncontended admission.

After any failure the connection is closed, a new one made, and the replica states everything that it has before it says
anything else: a lost answer needs no other remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from sidecar.pools.base import Lease
from sidecar.pools.redis import protocol
from sidecar.pools.redis import protocol as script
from sidecar.pools.redis.batch import Batch, BatchQueue
from sidecar.pools.redis.connection import (
    ANSWER_WITHIN_S,
    Connect,
    PoolRefuses,
    StoreConnection,
    StoreError,
    is_unknown_script,
    not_of_script,
    store_error,
)
from sidecar.pools.redis.resync import Statement

RETRY_S = 0.5
"""How often a lost store is tried: four times a heartbeat, so that a replica notices its return within one."""
BEAT_EVERY_S = 0.9 * script.BEAT_S
"""An idle replica hears of an empty store by its beat; the store waits for it for one heartbeat."""
SILENT_SUBSCRIPTION_S = 2.5 * protocol.BEAT_S
"""The store repeats every beat to its replica; two that are not heard mean that the subscription is dead."""
CLOSE_WITHIN_S = 1.0

RoundTripObserver = Callable[[float], None]
"""Called with how long each call to the store took, in seconds, answered or not. Must not raise and must not block."""

_log = logging.getLogger("sidecar.store")


class SessionOwner(Protocol):
    """A pool, as its session sees it. Every method returns at once."""

    name: str

    def statement(self) -> tuple[Sequence[script.Argument], Statement]:
        """The arguments of a resync after its fence, and the replica's leases. From now on the store decides."""

    def synced(self, reply: protocol.Reply, batch: Batch) -> None:
        """The store knows all leases of the statement."""

    def answered(self, reply: script.Reply, batch: Batch) -> None:
        """The store did what a call said. Applies its answer."""

    def unanswered(self, batch: Batch) -> None:
        """A call was not answered: it may have run or not. A resync follows."""

    def heard(self, message: bytes) -> None:
        """A message for this replica, a line each: grants, victims and displaced requests of other replicas' calls."""

    def lost(self, error: StoreError) -> None:
        """The store cannot be reached. Called again after every attempt."""


class _SyncNeeded(Exception):
    """The store does not know this replica: it was swept, or the store lost everything."""


class StoreSession:
    """Belongs to the event loop in which it is made. `decided` is set once the store has answered or was lost."""

    def __init__(
        self,
        owner: SessionOwner,
        connect: Connect,
        channel: str,
        batches: BatchQueue,
        fences: Iterator[int],
        *,
        took: RoundTripObserver | None = None,
    ) -> None:
        self._fences = fences
        self._fence = 0
        self.round_trips = 0
        self._took = took
        self.loop = asyncio.get_running_loop()
        self._owner = owner
        self._connect = connect
        self._channel = channel
        self._batches = batches
        self._listed = 0
        self._statement: Statement | None = None  # of which something is left to state
        self._beat_timer: asyncio.TimerHandle | None = None
        self.decided = asyncio.Event()
        self._is_closing = False
        self._is_connected = False
        self._is_first_connection = True
        self._restates = False
        self._connection: StoreConnection | None = None  # of the calls that are made without the task
        self._in_flight: Batch | None = None
        self._began_s = 0.0
        self._is_quiet = True  # the last of them had one operation at most
        self._sends_soon = False
        self._needed: asyncio.Future[Exception | None] | None = None
        self._task = self.loop.create_task(self._run(), name="sidecar store session")

    def restate(self) -> None:
        """Makes the next call a resync: everything that the replica states has changed."""
        self._restates = True
        self._batches.wake()

    async def close(self) -> None:
        """Takes the replica out of the store, where that can be reached: what it held is free at once."""
        self._is_closing = True
        self._batches.wake()
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
            if error is None:
                return
            if self._is_connected:  # a connection that worked is first made anew, at once
                self._is_connected = False
                continue
            self._owner.lost(error)
            self.decided.set()
            await asyncio.sleep(RETRY_S * random.uniform(0.8, 1.2))

    async def _failure(self) -> StoreError | None:
        """Connects, and returns why the connection ended. None where the session was closed."""
        try:
            await self._stay_connected()
        except StoreError as error:
            return error
        except Exception as defect:
            _log.exception("a defect in the sidecar; going on as if the store were lost", extra={"event": "defect"})
            self._is_connected = False
            return StoreError(f"{type(defect).__name__}: {defect}")
        return None

    async def _stay_connected(self) -> None:
        """Returns when the session is closed. Raises StoreError when the connection is of no use any more."""
        is_first, self._is_first_connection = self._is_first_connection, False
        connection = await self._connect()
        listening: asyncio.Task[None] | None = None
        try:
            if not is_first:
                # Does the script run? Before that is known the replica must not stop deciding by itself. Nor may it
                # state what it has: a store that hangs may apply that later, and without its answer the replica knows
                # of no free room.
                await connection.call([script.CALL, self._owner.name, -1, 0])
            await self._sync(connection)
            listening = asyncio.ensure_future(self._listen(connection))
            while await self._serve(connection):
                pass
        finally:
            try:
                if listening is not None:
                    connection.is_closed = True  # the client may take a cancellation for a failure, and connect anew
                    listening.cancel()
                    await asyncio.wait((listening,), timeout=CLOSE_WITHIN_S / 2)
            finally:  # also where the session is canceled while it ends by itself
                await connection.close()

    async def _serve(self, connection: StoreConnection) -> bool:
        """Makes one call, as soon as there is a reason for it. False where it was the last."""
        try:
            left = await self._until_needed(connection)
        except _SyncNeeded:
            await self._sync(connection)
            return True
        if self._restates and not self._is_closing and left is None:
            await self._sync(connection)
            return True
        is_last = self._is_closing and not self._batches.has_more and left is None
        batch = left or self._batches.take()
        if self._statement is not None and not is_last:
            self._state_more(self._statement, batch)
        try:
            reply = await self._call(connection, self._said(batch, is_last=is_last))
        except _SyncNeeded:
            self._owner.unanswered(batch)
            if not is_last:  # else the store does not know the replica, and has nothing to free
                await self._sync(connection)
            return not is_last
        except BaseException:
            self._owner.unanswered(batch)
            raise
        self._answered(reply, batch)
        return not is_last

    def _said(self, batch: Batch, *, is_last: bool = False) -> Sequence[script.Argument]:
        kind = protocol.BYE if is_last else protocol.BEAT if batch.is_beat else protocol.CALL
        return (kind, self._owner.name, self._fence, self._listed, *batch.arguments)

    def _answered(self, reply: script.Reply, batch: Batch) -> None:
        self._owner.answered(reply, batch)
        self._continue_statement(reply)
        if batch.is_beat:
            self._beat_later()

    async def _call(self, connection: StoreConnection, arguments: Sequence[script.Argument]) -> script.Reply:
        self.round_trips += 1
        began_s = time.perf_counter()
        try:
            answer = await connection.call(arguments, ANSWER_WITHIN_S)
        finally:
            self._note_time(began_s)
        return self._read(answer)

    def _note_time(self, began_s: float) -> None:
        if self._took is not None:
            self._took(time.perf_counter() - began_s)

    def _read(self, answer: Any) -> script.Reply:
        if script.is_ok(answer):
            reply = script.read_reply(answer)
            self._listed = reply.listed
            return reply
        if not isinstance(answer, list):
            raise not_of_script(answer)
        if answer[0] == protocol.UNKNOWN:
            raise _SyncNeeded
        if answer[0] == protocol.FOREIGN:
            raise PoolRefuses(answer[1].decode())
        if answer[0] == protocol.ABSENT:
            raise PoolRefuses(None)
        raise StoreError("the store took a call for a late one")

    async def _until_needed(self, connection: StoreConnection) -> Batch | None:
        """Returns when there is something to do for the task: a statement, a part of one, the last call.

        Calls are made meanwhile. A batch is returned where the server did not know the script. Raises what came
        instead of an answer, or _SyncNeeded.
        """
        if not connection.sends:
            await self._batches.filled()
            return None
        self._connection = connection
        self._needed = self.loop.create_future()
        self._batches.on_reason = self._on_reason
        try:
            if self._batches.is_filled:
                self._send()
            error = await self._needed
            if error is not None:
                raise error
            return self._in_flight
        except BaseException:
            if self._in_flight is not None:
                self._owner.unanswered(self._in_flight)
            raise
        finally:
            self._batches.on_reason = self._connection = self._needed = self._in_flight = None

    def _on_reason(self, is_awaited: bool) -> None:
        if self._in_flight is not None:
            return
        if is_awaited and self._is_quiet:
            self._send()
        elif not self._sends_soon:
            self._sends_soon = True
            self.loop.call_soon(self._send)

    def _send(self) -> None:
        """Makes the next call without the task, or wakes it."""
        self._sends_soon = False
        if self._connection is None or self._needed is None or self._needed.done():
            return
        if self._in_flight is not None or not self._batches.is_filled:
            return
        if self._restates or self._is_closing or self._statement is not None:
            self._needed.set_result(None)
            return
        self._in_flight = batch = self._batches.take()
        self.round_trips += 1
        self._began_s = time.perf_counter()
        try:
            self._connection.send(self._said(batch), self._came)
        except Exception as error:  # the request in whose turn this is has no part in it
            self._came(error)

    def _came(self, answer: Any) -> None:
        """Takes the answer of such a call, or the error that came instead."""
        batch, needed = self._in_flight, self._needed
        if batch is None or needed is None or needed.done():
            return
        self._note_time(self._began_s)
        if isinstance(answer, Exception):
            needed.set_result(None if is_unknown_script(answer) else store_error(answer))
            return
        try:
            reply = self._read(answer)
            self._in_flight = None
            self._answered(reply, batch)
        except Exception as error:  # the task deals with it
            needed.set_result(error)
            return
        self._is_quiet = batch.operations <= 1
        if self._batches.is_filled:
            self._send()

    async def _sync(self, connection: StoreConnection) -> None:
        """States everything that the replica has, under a new fence: late calls under an older fence do nothing.

        All its leases are stated here. Where its tickets are many, they travel with the calls that follow.
        """
        self._restates = False
        self._fence = next(self._fences)
        self._listed = 0
        self._statement = None
        header, statement = self._owner.statement()
        try:
            reply, entering = await self._state_leases(connection, header, statement)
        except _SyncNeeded:
            raise StoreError("the pool was damaged; it is being made anew") from None
        self._is_connected = True
        self._statement = statement
        self._owner.synced(reply, Batch(entering=entering))
        self._continue_statement(reply)
        self.decided.set()
        self._beat_later()
        if self._is_closing:  # the statement took the reason for a last call with it
            self._batches.wake()

    async def _state_leases(
        self, connection: StoreConnection, header: Sequence[script.Argument], statement: Statement
    ) -> tuple[script.Reply, list[Lease]]:
        """States all leases, and as many tickets as fit. Returns the last answer, and the requests that it is about."""
        arguments, entering = statement.next_slice()
        kind = script.SYNC if statement.is_over else script.BEGIN
        call: list[script.Argument] = [kind, self._owner.name, self._fence, *header]
        while True:
            is_last = kind != script.SYNC and not statement.has_leases
            stated = (script.LEASES_STATED,) if is_last else ()
            reply = await self._call(connection, [*call, *arguments, *stated])
            if not statement.has_leases:
                return reply, entering
            arguments, more = statement.next_slice()
            entering += more
            call = [script.CALL, self._owner.name, self._fence, self._listed]

    def _state_more(self, statement: Statement, batch: Batch) -> None:
        """Adds the next part of the statement to a call; to the last call also that nothing is left."""
        arguments, entering = statement.next_slice()
        end = (script.ALL_STATED,) if statement.is_over else ()
        batch.arguments = [*arguments, *end, *batch.arguments]
        batch.entering = [*entering, *batch.entering]

    def _continue_statement(self, reply: script.Reply) -> None:
        """Makes the next call at once, where something is left to state."""
        if reply.is_stating:
            self._batches.wake()
        else:
            self._statement = None

    def _beat_later(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = self.loop.call_later(BEAT_EVERY_S, self._batches.beat)

    async def _listen(self, connection: StoreConnection) -> None:
        """Passes on the messages for this replica. A message that is lost comes again with the next heartbeat."""
        while not connection.is_closed:
            with contextlib.suppress(StoreError):
                await connection.listen((self._channel,), self._owner.heard, SILENT_SUBSCRIPTION_S)
            await asyncio.sleep(RETRY_S)
