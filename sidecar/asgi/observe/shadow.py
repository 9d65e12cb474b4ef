"""One observed request's stand-in in the pool: it waits and holds as the request would have, had it been held.

    ENTERING -> WAITING -> HOLDING -> OVER        (each may also end in OVER: refused, left, or the door closes)

The request itself runs meanwhile, or has run. So whatever the shadow needs to know of it has happened by the time that
it is needed: the shadow stands where its request stood `queue wait` ago. `observing` has the law.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from sidecar.asgi.allowances import note_tier
from sidecar.asgi.ruling import Ruling
from sidecar.asgi.understanding import Understood, longest_wait_s
from sidecar.errors import AdmissionError, QueueTimeout
from sidecar.events import Verdict
from sidecar.pools import Grant, Lease, Pool

LONGEST_WAIT_S = 3600.0
"""Where its tier waits for ever, a shadow does not: it is given up after so long."""
CLIENT_LEFT, WAITED_TOO_LONG = "client_left", "waited_too_long"


class Found(NamedTuple):
    """What became of a shadow. `code` is None where it was admitted; `wait` where it never stood in line."""

    verdict: Verdict
    code: str | None
    wait: Grant | None


class Shadow:
    """Follows one request. `tell` is called once, with what became of it.

    The request's own exchange calls `begun` with its first byte, then `left` or `ended`; until it does, one that was
    admitted holds on. `run` is called once, in a task of its own.
    """

    __slots__ = (
        "_began_us",
        "_begun",
        "_ended",
        "_holds",
        "_left",
        "_pool",
        "_ruling",
        "_taken",
        "_tell",
        "_understood",
        "_used",
    )

    def __init__(self, pool: Pool, ruling: Ruling, understood: Understood, tell: Callable[[Found], None]) -> None:
        self._pool = pool
        self._ruling = ruling
        self._understood = understood
        self._tell: Callable[[Found], None] | None = tell
        self._used: int | None = None
        self._began_us = pool.now_us()
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[int] = loop.create_future()
        self._left: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._taken: asyncio.Future[None] = loop.create_future()
        self._holds = False

    @property
    def is_real(self) -> bool:
        """Whether it holds room that its request takes up at the engine at this moment."""
        return self._holds and not self._ended.done()

    def begun(self) -> None:
        """The first byte of the answer goes out."""
        if not self._begun.done():
            self._begun.set_result(self._pool.now_us() - self._began_us)

    def left(self) -> None:
        """The client hung up before a byte had come: its patience, counted from its arrival, was over."""
        if not self._left.done():
            self._left.set_result(None)

    def ended(self, used_tokens: int | None = None) -> None:
        """The request is over: what it took is what it would have taken. `used_tokens` corrects its tenant's charge."""
        self.begun()
        self._used = used_tokens if self._used is None else self._used
        if not self._ended.done():
            self._ended.set_result(self._pool.now_us() - self._began_us)

    async def run(self) -> None:
        """Goes through the pool. Canceled, it leaves nothing behind there."""
        try:
            if self._ruling.intake.has_tokenizer:
                await self._ruling.intake.count(self._understood)
            if self._understood.payload.unsized is not None:
                self._understood.hold_at_least(self._pool.most_tokens(self._understood.classification.level))
            ask = self._understood.ask()
            self._understood.drop_body()
            await self._pass_through(await self._pool.enter(ask))
        except AdmissionError as refusal:
            self._found(Verdict.REFUSED, refusal.code, None)

    def give_up(self, code: str) -> None:
        """Nobody follows it any more. Where it is not known yet what became of it, it never will be."""
        self._found(Verdict.UNKNOWN, code, None)

    async def _pass_through(self, lease: Lease) -> None:
        try:
            note_tier(self._understood.classification, lease.tier)
            is_preemptible = self._ruling.is_preemptible(self._understood)
            if is_preemptible:
                lease.on_preempt = self._take_back
            grant = lease.grant or await self._wait(lease, lease.wait(), self._ruling.longest_wait_s(self._understood))
            self._holds = grant is not None
            while is_preemptible and grant is not None and await self._is_taken_back(lease, grant):
                self._holds, self._taken = False, asyncio.get_running_loop().create_future()
                # As when enforcing: only the client itself may limit how long it waits again.
                grant = await self._wait(lease, lease.requeue(), longest_wait_s(self._understood.headers, None))
                self._holds = grant is not None
            if grant is not None:
                self._found(Verdict.ADMITTED, None, grant)
                await self._hold(grant)
        finally:
            if not lease.settle(self._used):
                lease.leave()

    async def _wait(self, lease: Lease, granted: asyncio.Future[Grant], most_s: float | None) -> Grant | None:
        """The grant; None where it left the queue without one, which is told."""
        at_most_s = LONGEST_WAIT_S if most_s is None else most_s
        await asyncio.wait((granted, self._left), timeout=at_most_s, return_when=asyncio.FIRST_COMPLETED)
        if self._left.done():
            wait = lease.grant if lease.settle(0) else await lease.leave()
            self._found(Verdict.ABANDONED, CLIENT_LEFT, wait)
        elif granted.done():
            return granted.result()
        elif most_s is None:
            self._found(Verdict.UNKNOWN, WAITED_TOO_LONG, await lease.leave())
        else:
            self._found(Verdict.REFUSED, QueueTimeout.code, await lease.leave())
        return None

    def _take_back(self) -> None:
        """Called by the pool: the room is wanted by a more important request."""
        if not self._taken.done():
            self._taken.set_result(None)

    async def _is_taken_back(self, lease: Lease, grant: Grant) -> bool:
        """Holds until the first byte would have gone out: whether the room was wanted back before that."""
        await asyncio.wait((self._taken, self._begun, self._left), return_when=asyncio.FIRST_COMPLETED)
        if self._begun.done():
            await asyncio.wait((self._taken,), timeout=self._left_s(grant, self._begun.result()))
        if self._taken.done() and not self._left.done():
            return True
        lease.keep()
        return False

    async def _hold(self, grant: Grant) -> None:
        """Holds the lease for as long as the request took, from the grant on; until its client left, if it did."""
        await asyncio.wait((self._ended, self._left), return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            await asyncio.sleep(self._left_s(grant, self._ended.result()))

    def _left_s(self, grant: Grant, lasts_us: int) -> float:
        """Until so long after the grant."""
        return max(0, grant.at_us + lasts_us - self._pool.now_us()) / 1e6

    def _found(self, verdict: Verdict, code: str | None, wait: Grant | None) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(Found(verdict, code, wait))
