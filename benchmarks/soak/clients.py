"""The clients of a soak: what they sent, and how each request ended as far as its client could tell."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.soak.setting import MEAN_OUTPUT_TOKENS, PER_S, TRAFFIC, Traffic

LOAD = 1.2
HANG_UP_SHARE = 0.06
"""Of the requests: their clients leave after a random time, be it in the queue or in the middle of the answer."""
COME_BACK_SHARE = 0.2
"""Of the refused: they come again when they were told to, once."""
LONGEST_RETRY_S = 20.0
GIVE_UP_S = 90.0
"""A client that has heard the end of nothing for so long was forgotten: that is a failure of the soak."""
PRIMING = Traffic("chat", "high", 0.0, 0.0)
PRIMING_AT_ONCE = 32
AFTER_ADMISSION = frozenset(("engine_unreachable", "engine_timeout"))
"""Errors that an admitted request ends with; all others end a request at the proxy."""

ADMITTED, REFUSED, LEFT, LOST = "admitted", "refused", "left", "lost"


@dataclass(slots=True)
class Ledger:
    """The clients' own account, by tier: requests sent, and how each ended.

    `left` counts those whose client disconnected before it was told anything; `lost` those that had no complete ending:
    that should never be. A tier's name is empty where the proxy cannot have known it: a key that was not valid.
    """

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    broken_off: int = 0
    preempted: int = 0
    lost: list[str] = field(default_factory=list)

    def count(self, tier: str, ended: str) -> None:
        """One request and its ending."""
        self.sent[tier] += 1
        self.ended[tier, ended] += 1


class Lost(Exception):
    """The answer ended in a way in which no answer should."""


class Clients:
    """An open loop of Poisson arrivals over both replicas."""

    def __init__(self, proxies: Sequence[str], seed: int) -> None:
        self.ledger = Ledger()
        self._sidecars = [(str(proxy.hostname), proxy.port or 0) for proxy in map(urlsplit, proxies)]
        self._luck = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self.primed = 0

    @property
    def under_way(self) -> int:
        """Requests that have not ended for their clients."""
        return len(self._tasks)

    async def send_for(self, seconds: float) -> None:
        """Sends the load for so long. What is under way goes on."""
        began_s, at_s = time.monotonic(), 0.0
        while (at_s := at_s + self._luck.expovariate(LOAD * PER_S)) < seconds:
            await asyncio.sleep(began_s + at_s - time.monotonic())
            (traffic,) = self._luck.choices(TRAFFIC, [one.share for one in TRAFFIC])
            self._begin(traffic, random.Random(self._luck.random()))

    async def prime(self, requests: int, within_s: float) -> None:
        """Sends short requests, a few at a time, until so many have ended, or for so long.

        A proxy remembers its last requests, a number of them: this fills that memory, which the load alone would take
        half an hour for.
        """
        end_s = time.monotonic() + within_s

        async def one_after_another() -> None:
            while self.primed < requests and time.monotonic() < end_s:
                self.primed += 1
                body = _written({"max_tokens": 1, "messages": [{"role": "user", "content": f"Say {self.primed}."}]})
                proxy = self._sidecars[self.primed % len(self._sidecars)]
                await self._ask(PRIMING, body, GIVE_UP_S, leaves=False, proxy=proxy)

        await asyncio.gather(*(one_after_another() for _ in range(PRIMING_AT_ONCE)))

    async def finish(self, within_s: float) -> None:
        """Waits for the end of everything that is under way; what has none by then is lost."""
        while self._tasks and within_s > 0:
            await asyncio.sleep(0.1)
            within_s -= 0.1
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, traffic: Traffic, luck: random.Random) -> None:
        self._number += 1
        task = asyncio.ensure_future(self._client(traffic, self._number, luck))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _client(self, traffic: Traffic, number: int, luck: random.Random) -> None:
        leaves = not traffic.removable and luck.random() < HANG_UP_SHARE
        stays_s = luck.uniform(0.05, 4.0) if leaves else GIVE_UP_S
        body = _body(traffic, number, luck)
        retry_s = await self._ask(traffic, body, stays_s, leaves=leaves, proxy=luck.choice(self._sidecars))
        if retry_s is not None and retry_s < LONGEST_RETRY_S and luck.random() < COME_BACK_SHARE:
            await asyncio.sleep(retry_s)
            await self._ask(traffic, body, GIVE_UP_S, leaves=False, proxy=luck.choice(self._sidecars), attempt=1)

    async def _ask(
        self, traffic: Traffic, body: bytes, stays_s: float, *, leaves: bool, proxy: tuple[str, int], attempt: int = 0
    ) -> float | None:
        """One request, counted once. Returns when to come again, None where it was not refused."""
        answer = Answer()
        try:
            await asyncio.wait_for(answer.read(proxy, _head(traffic, body, attempt) + body), stays_s)
        except asyncio.TimeoutError:
            if not leaves:
                self._lose(traffic, f"no end within {stays_s:g} s, {len(answer.received)} bytes came")
                return None
            self.ledger.count(traffic.tier, ADMITTED if answer.is_admitted() else LEFT)
            return None
        except asyncio.CancelledError:
            self._lose(traffic, "had not ended when everything had")
            raise
        except (OSError, Lost) as error:
            self._lose(traffic, f"{type(error).__name__}: {error}")
            return None
        return self._account(traffic, answer)

    def _account(self, traffic: Traffic, answer: Answer) -> float | None:
        try:
            is_admitted, code = answer.is_admitted() or answer.is_broken_off(), answer.code()
        except ValueError as error:
            self._lose(traffic, f"an answer that cannot be read: {error}")
            return None
        ledger = self.ledger
        ledger.preempted += int(answer.headers.get("x-admission-preempted", 0))
        if code is not None:
            ledger.codes[code] += 1
        if is_admitted:
            ledger.broken_off += not answer.is_whole()
            ledger.count(traffic.tier, ADMITTED)
            return None
        if code is None:
            self._lose(traffic, f"neither admitted nor refused: {bytes(answer.received[:200])!r}")
            return None
        ledger.count("" if code == "invalid_api_key" else traffic.tier, REFUSED)
        return float(answer.headers.get("retry-after-ms", 1e9)) / 1000

    def _lose(self, traffic: Traffic, why: str) -> None:
        self.ledger.count(traffic.tier, LOST)
        self.ledger.lost.append(f"{traffic.tenant}: {why}")


class Answer:
    """One answer as it comes: over a connection of its own, which ends with it."""

    def __init__(self) -> None:
        self.received = bytearray()

    async def read(self, proxy: tuple[str, int], request: bytes) -> None:
        """Sends the request and reads to the end of the connection. Canceled, it disconnects."""
        reader, writer = await asyncio.open_connection(*proxy)
        try:
            writer.write(request)
            while data := await reader.read(65536):
                self.received += data
        finally:
            writer.close()
        if not self.received:
            raise Lost("the connection ended without an answer")

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer, as far as it came."""
        head = self.received.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head)}

    def is_admitted(self) -> bool:
        """Whether the proxy let it in, as far as its client can tell. Comments while it waits say nothing yet."""
        if b"x-admission-wait-ms" in self.received and self._status() in (200, 502, 504):
            return True
        code = self.code()
        return code in AFTER_ADMISSION or (code is None and b"\ndata: {" in self.received)

    def code(self) -> str | None:
        """The code of the error that it ended with, be it a body or an event. None where there was none."""
        body = bytes(self.received.partition(b"\r\n\r\n")[2])
        at = body.find(b'{"error":')
        if at < 0:
            return None
        said, _ = json.JSONDecoder().raw_decode(body[at:].decode("utf-8", "replace"))
        return str(said["error"]["code"])

    def is_whole(self) -> bool:
        """Whether an admitted request's answer came to its end: engines are killed."""
        return b"[DONE]" in self.received or b'"usage"' in self.received

    def is_broken_off(self) -> bool:
        """Of an answer that the server has ended: whether that was no end. Only the engine's can break off so."""
        return self.headers.get("transfer-encoding") == "chunked" and not self.received.endswith(b"0\r\n\r\n")

    def _status(self) -> int:
        return int(self.received[9:12] or b"0")


def _body(traffic: Traffic, number: int, luck: random.Random) -> bytes:
    is_stream = luck.random() < traffic.streams
    tokens = luck.randint(4, 2 * MEAN_OUTPUT_TOKENS - 4)
    messages = [{"role": "user", "content": f"Request {number} of {traffic.tenant}. " * luck.randint(1, 20)}]
    return _written({"messages": messages, "max_tokens": tokens, "stream": is_stream})


def _written(body: dict[str, object]) -> bytes:
    return json.dumps({"model": "emulated", **body}).encode()


def _head(traffic: Traffic, body: bytes, attempt: int) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: soak", f"authorization: Bearer {traffic.key}"]
    lines += ["content-type: application/json", f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([*lines, f"x-stainless-retry-count: {attempt}", "", ""]).encode()
