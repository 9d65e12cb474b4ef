"""Open-loop client: every request is sent at its time, whatever happens to the others.

A client that waits for an answer before it sends the next request slows down with the server. It measures the best of
the server's bad moments ("coordinated omission"). This client never does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sidecar.tools.loadgen.connection import ClientConnection, Target, connect

AHEAD_S = 0.5
"""How long before its time a request's connection is opened: on a network one takes milliseconds, with TLS tens."""
CONNECTING_AT_ONCE = 64
"""Fewer than the 100 that asyncio's own servers let wait for `accept`."""
REPORT_EVERY_S = 0.25
LOOK_EVERY_S = 0.05
"""How often the client looks whether it runs as it should itself."""
CANCEL_EVERY_S = 0.05
Report = Callable[[float, "Progress"], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send: a POST of `body` to `path`, `at_s` seconds after the run's start.

    `label` is the caller's own. `after` makes it the next turn of a conversation: it is the position of the turn
    before, and the request is not sent until `delay_s` after that one's answer has ended, however late that is.
    `write` makes the body when it is needed, half a second before its time: for bodies that are too many to keep, or
    that continue a conversation. It is given the text of the answer before, empty where there is none.
    """

    at_s: float
    path: str
    headers: Mapping[str, str]
    body: bytes
    label: str = ""
    after: int | None = None
    delay_s: float = 0.0
    write: Callable[[str], bytes] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request's result at its client. Times are in seconds since the run's start.

    `first_token_s` is None where no token came, and for an answer that does not stream (`connection`). `status` is None
    where no answer came at all. `error` is one line that says what went wrong, and None where nothing did.
    `output_tokens` is what the engine's usage says, or else the number of events that carried a token; `prompt_tokens`
    is None without usage, `cached_tokens` where usage does not say what a prefix cache held. `request_id` is the id in
    the answer, `url_index` the position of the server that was asked.
    """

    planned: Planned
    sent_s: float
    first_token_s: float | None
    end_s: float
    status: int | None
    error: str | None
    output_tokens: int
    prompt_tokens: int | None
    headers: Mapping[str, str] = field(repr=False)
    request_id: str | None
    url_index: int
    cached_tokens: int | None = None

    @property
    def is_complete(self) -> bool:
        """True if the whole answer came, and was none that says that something went wrong."""
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, None where none came."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, None for less than two tokens or an answer that is not complete."""
        if self.first_token_s is None or self.output_tokens < 2 or not self.is_complete:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)


def most_at_once(seen: Sequence[Seen]) -> int:
    """How many ran at the same moment, as their clients saw it: from the first token to the end."""
    moves = [(one.first_token_s, 1) for one in seen if one.first_token_s is not None]
    moves += [(one.end_s, -1) for one in seen if one.first_token_s is not None]
    return max(accumulate((step for _, step in sorted(moves)), initial=0))


@dataclass(slots=True)
class Progress:
    """How far a run is.

    `stalled_s` is the longest time for which this process itself did not run: a machine that is too busy, and then no
    moment that was measured is right to less than that.
    """

    sent: int = 0
    answered: int = 0
    failed: int = 0
    is_over: bool = False
    stalled_s: float = 0.0

    @property
    def under_way(self) -> int:
        """Requests that have no complete answer yet."""
        return self.sent - self.answered - self.failed


async def play(
    urls: Sequence[str],
    requests: Sequence[Planned],
    *,
    timeout_s: float,
    report: Report | None = None,
    progress: Progress | None = None,
    pick: random.Random | None = None,
) -> list[Seen]:
    """Sends all requests and returns what came back, in the order of `requests`.

    Every request has a connection of its own, opened half a second before its time; those of the first half second are
    opened before the clock starts. So connecting is in no figure, and a burst at 0 leaves in one go. Requests with the
    same time leave in the order of `requests`. `timeout_s` bounds connecting, and an answer from its request on.

    Among several `urls` each request goes to one that `pick` chooses (by default with a fixed seed), so that they get
    uneven parts, as behind a load balancer that knows nothing of them. `report` is called about four times a second
    with the seconds since the start, and once at the end; `progress` is what it gets. Canceling closes all connections
    at once, so that nothing is left to do for the servers. Raises ValueError for an address or a header that cannot be
    one, and for a turn that is to follow a later one, before anything is sent.
    """
    run = _Run(urls, requests, timeout_s, pick or random.Random(1), progress or Progress())
    try:
        return await run.play(report)
    finally:
        await run.close()


class _Exchange:
    """One request of a run: where it goes, and the moments it waits for."""

    def __init__(self, planned: Planned, url_index: int, target: Target) -> None:
        self.planned = planned
        self.url_index = url_index
        self.target = target
        self.wire = b""
        self.head = target.head(planned.path, planned.headers)
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.due: asyncio.Future[None] = loop.create_future()
        self.text: asyncio.Future[str] = loop.create_future()

    def write(self, text: str = "") -> None:
        """Makes ready what is sent, given the text of the answer before."""
        body = self.planned.body if self.planned.write is None else self.planned.write(text)
        self.wire = b"%bcontent-length: %d\r\n\r\n%b" % (self.head, len(body), body)


class _Run:
    def __init__(
        self,
        urls: Sequence[str],
        requests: Sequence[Planned],
        timeout_s: float,
        pick: random.Random,
        progress: Progress,
    ) -> None:
        targets = list(enumerate(Target.of(url) for url in urls))
        if any(planned.after is not None and planned.after not in range(i) for i, planned in enumerate(requests)):
            raise ValueError("a turn follows one that comes before it among the requests")
        self.exchanges = [_Exchange(planned, *pick.choice(targets)) for planned in requests]
        self.timeout_s = timeout_s
        self.progress = progress
        self.began_s = 0.0
        self._connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)
        self._tasks: dict[int, asyncio.Task[Seen]] = {}
        self._connections: set[ClientConnection] = set()
        self._reporter: asyncio.Task[None] | None = None

    async def play(self, report: Report | None) -> list[Seen]:
        scheduled = sorted(
            (index for index, exchange in enumerate(self.exchanges) if exchange.planned.after is None),
            key=lambda index: self.exchanges[index].planned.at_s,
        )
        ready = [index for index in scheduled if self.exchanges[index].planned.at_s < AHEAD_S]
        for index in ready:
            self._start(index)
        await asyncio.gather(*(self.exchanges[index].opened for index in ready))
        self.began_s = time.monotonic()
        self._reporter = asyncio.ensure_future(self._watch(report))
        for index, exchange in enumerate(self.exchanges):
            if exchange.planned.after is not None:
                self._start(index)
        await self._pace(scheduled, opened=len(ready))
        seen = await asyncio.gather(*(self._tasks[index] for index in range(len(self.exchanges))))
        self.progress.is_over = True
        if report is not None:
            report(self._now_s(), self.progress)
        return list(seen)

    async def close(self) -> None:
        """Ends everything. A task is canceled again until it has ended.

        Up to Python 3.11 `asyncio.wait_for` loses a cancellation that comes together with its result.
        """
        left = {*self._tasks.values(), *([] if self._reporter is None else [self._reporter])}
        while left:
            for task in left:
                task.cancel()
            for connection in tuple(self._connections):
                connection.close()
            _, left = await asyncio.wait(left, timeout=CANCEL_EVERY_S)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)  # their exceptions are taken note of

    async def _pace(self, scheduled: Sequence[int], opened: int) -> None:
        """Opens each connection, and lets each request go, when its time has come."""
        at_s = [self.exchanges[index].planned.at_s for index in scheduled]
        sent = 0
        while sent < len(scheduled):
            now_s = self._now_s()
            while opened < len(scheduled) and at_s[opened] - AHEAD_S <= now_s:
                self._start(scheduled[opened])
                opened += 1
            while sent < len(scheduled) and at_s[sent] <= now_s:
                self.exchanges[scheduled[sent]].due.set_result(None)
                sent += 1
            upcoming = at_s[sent : sent + 1] + [moment - AHEAD_S for moment in at_s[opened : opened + 1]]
            await asyncio.sleep(max(0.0, min(upcoming, default=0.0) - self._now_s()))

    def _start(self, index: int) -> None:
        self._tasks[index] = asyncio.ensure_future(self._exchange(self.exchanges[index]))

    async def _exchange(self, exchange: _Exchange) -> Seen:
        try:
            await self._until_near(exchange)
            connection = await self._connect(exchange)
            _set(exchange.opened)
            await exchange.due
            return await self._send(exchange, connection)
        finally:
            if not exchange.text.done():
                exchange.text.set_result("")

    async def _until_near(self, exchange: _Exchange) -> None:
        """For a turn: waits for the one before it, and until it is time to open its own connection."""
        planned = exchange.planned
        if planned.after is None:
            exchange.write()
            return
        exchange.write(await asyncio.shield(self.exchanges[planned.after].text))
        remaining_s = max(planned.delay_s, planned.at_s - self._now_s())
        asyncio.get_running_loop().call_later(remaining_s, _set, exchange.due)
        await asyncio.sleep(remaining_s - AHEAD_S)

    async def _connect(self, exchange: _Exchange) -> ClientConnection | str:
        async with self._connecting:
            connection = await connect(exchange.target, self.timeout_s)
        if isinstance(connection, ClientConnection):
            self._connections.add(connection)
            connection.done.add_done_callback(lambda _: self._connections.discard(connection))
        return connection

    async def _send(self, exchange: _Exchange, connection: ClientConnection | str) -> Seen:
        sent_s = self._now_s()
        self.progress.sent += 1
        if isinstance(connection, ClientConnection) and connection.done.done():  # the server did not wait so long
            connection = await self._connect(exchange)
        if isinstance(connection, ClientConnection):
            connection.send(exchange.wire)
            exchange.wire = b""
            remaining_s = self.timeout_s - (self._now_s() - sent_s)
            too_late = f"no complete answer within {self.timeout_s:g} s"
            ends = asyncio.get_running_loop().call_later(remaining_s, connection.end, too_late)
            try:
                await connection.done
            finally:
                ends.cancel()
                connection.close()  # canceling this also cancels `done`, and who is done is no longer among the open
            exchange.text.set_result(connection.answer.text if connection.answer else "")
        seen = self._observe(exchange, sent_s, connection)
        self.progress.answered += seen.is_complete
        self.progress.failed += not seen.is_complete
        return seen

    def _observe(self, exchange: _Exchange, sent_s: float, connection: ClientConnection | str) -> Seen:
        if isinstance(connection, str):
            return Seen(exchange.planned, sent_s, None, sent_s, None, connection, 0, None, {}, None, exchange.url_index)
        answer, end_s = connection.answer, connection.ended_s - self.began_s
        if answer is None:
            error = connection.error
            return Seen(exchange.planned, sent_s, None, end_s, None, error, 0, None, {}, None, exchange.url_index)
        first_s = answer.first_token_s
        return Seen(
            planned=exchange.planned,
            sent_s=sent_s,
            first_token_s=None if first_s is None else first_s - self.began_s,
            end_s=end_s,
            status=answer.status,
            error=connection.error or answer.error,
            output_tokens=answer.output_tokens,
            prompt_tokens=answer.prompt_tokens,
            headers=answer.headers,
            request_id=answer.request_id,
            url_index=exchange.url_index,
            cached_tokens=answer.cached_tokens,
        )

    async def _watch(self, report: Report | None) -> None:
        """Reports now and then, and measures how much later than asked for this process gets its turn."""
        reported_s = -REPORT_EVERY_S
        while True:
            now_s = self._now_s()
            if report is not None and now_s - reported_s >= REPORT_EVERY_S:
                report(now_s, self.progress)
                reported_s = now_s
            await asyncio.sleep(LOOK_EVERY_S)
            self.progress.stalled_s = max(self.progress.stalled_s, self._now_s() - now_s - LOOK_EVERY_S)

    def _now_s(self) -> float:
        return time.monotonic() - self.began_s


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
