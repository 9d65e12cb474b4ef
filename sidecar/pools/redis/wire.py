"""The wire of a connection: commands go out, and answers come in, in the turn of the event loop in which they do.

A client's streams wake a task for each answer, and a limit of time makes a timer for each. That is more than an
uncontended admission needs for all of the rest. The client still opens the connection, and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

NO_ANSWER_YET: Final = object()

Answered = Callable[[Any], None]
"""Called once with an answer, or with the error that came instead of it. Must not raise."""


class AnswerReader(Protocol):
    """The reader of hiredis. Where an answer has not come in full, `gets` returns NO_ANSWER_YET."""

    def feed(self, data: bytes, /) -> None:
        """Takes what has come."""

    def gets(self) -> Any:
        """The next answer."""

    def has_data(self) -> bool:
        """Whether more has come than was got."""


class Wire(asyncio.Protocol):
    """An open connection, one command at a time. It takes the place of the protocol that the transport had.

    An error is its end: a late answer must not be taken for the next.
    """

    def __init__(self, transport: asyncio.Transport, reader: AnswerReader) -> None:
        self._transport = transport
        self._reader = reader
        self._clients = transport.get_protocol()
        self._loop = asyncio.get_running_loop()
        self._answered: Answered | None = None
        self._error: Exception | None = None
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        transport.set_protocol(self)

    def send(self, command: bytes, answered: Answered, within_s: float) -> None:
        """Sends a command. Where no answer comes within the time, an `asyncio.TimeoutError` does.

        Where the connection has ended, the error comes at once.
        """
        if self._answered is not None:
            raise RuntimeError("one command at a time")
        self._answered = answered
        if self._error is not None or self._transport.is_closing():
            self._fail(ConnectionError("the connection is closed"))
            return
        self._deadline_s = self._loop.time() + within_s
        if self._timer is None or self._timer.when() > self._deadline_s:
            self._look_after(within_s)
        try:
            self._transport.write(command)
        except RuntimeError as error:  # uvloop's, of a connection that was reset
            self._fail(error)

    async def answer(self, command: bytes, within_s: float) -> Any:
        """Sends a command and returns its answer. Raises it where it is an error."""
        coming: asyncio.Future[Any] = self._loop.create_future()

        def came(answer: Any) -> None:
            if not coming.done():  # else it was canceled in this turn
                coming.set_result(answer)

        self.send(command, came, within_s)
        try:
            answer = await coming
        except asyncio.CancelledError:
            self.end()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Nothing is sent any more. Nor is anything said of the command that is on its way."""
        self._answered = None
        self._fail(ConnectionError("the connection is closed"))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            self._reader.feed(data)
            answer = self._reader.gets()
            if answer is NO_ANSWER_YET:
                return
            if self._answered is None or self._reader.has_data():
                raise ConnectionError("an answer that nothing had asked for")
        except Exception as error:  # also hiredis's
            self._fail(error)
            return
        answered, self._answered = self._answered, None
        answered(answer)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`. The client waits for this where it closes the connection."""
        self._clients.connection_lost(error)
        self._fail(error or ConnectionError("Connection closed by server."))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(self._error)

    def _look_after(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        """Looks whether an answer is late. One timer serves many commands: nearly all are answered before it ends."""
        self._timer = None
        if self._answered is None:
            return
        left_s = self._deadline_s - self._loop.time()
        if left_s > 0:
            self._look_after(left_s)
        else:
            self._fail(asyncio.TimeoutError())
