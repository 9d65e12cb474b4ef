"""Shadow request: it waits and holds in the pool as an observed request would have when enforcing.

    ENTERING -> WAITING -> HOLDING -> OVER        (each may also end in OVER: refused, disconnected, stopped)

The request itself runs meanwhile, or is over. Where the engine is quiet, the shadow is later than its request by its
own queue wait, so all that it needs to know of the request has happened by then. Where the engine runs more than the
pool would admit, the request may be the later one: `engine_times` has what the shadow takes instead. The module
`request` lists the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sidecar.admission.event_reporter import EventReporter
from sidecar.admission.intake import SizedRequest, count_tokens, sized_ask
from sidecar.admission.policy_snapshot import PolicySnapshot
from sidecar.admission.turn import Cause, Turn, TurnEnded
from sidecar.errors import AdmissionError, QueueTimeout
from sidecar.events import Verdict
from sidecar.pools import Ask, Grant

if TYPE_CHECKING:
    from sidecar.admission.controller import AdmissionController

LONGEST_WAIT_S = 3600.0
"""The longest wait of a shadow where its tier has none."""
CLIENT_LEFT, WAITED_TOO_LONG = "client_left", "waited_too_long"
SLIGHTLY = 0.1
"""A request that is later than its shadow by this part of the time that it generates is waited for."""


class ShadowResult(NamedTuple):
    """The result of a shadow request. `code` is None where it was admitted; `wait` where it never waited."""

    verdict: Verdict
    code: str | None
    wait: Grant | None


class WaitingShadow(NamedTuple):
    """A shadow request that still waits: the generation of its policy, and how long it has waited."""

    generation: str
    tier: str
    tenant: str
    waited_us: int


class ShadowRequest:
    """The shadow of one request. `report` is called once, with the result.

    Its request calls `begun` with the first byte of the response, then `lost`, `disconnected` or `ended`, each after
    `EngineTimes` knows of it. `sent` is the request at the engine. `run` is called once, in a task of its own.
    """

    __slots__ = (
        "_ask", "_began_us", "_begun", "_controller", "_disconnected", "_ended", "_follows", "_holds", "_pool",
        "_preempted", "_report", "_request", "_snapshot", "_times", "_turn", "_used", "_waits", "sent",
    )  # fmt: skip

    def __init__(
        self,
        controller: AdmissionController,
        snapshot: PolicySnapshot,
        request: SizedRequest,
        report: Callable[[ShadowResult], None],
    ) -> None:
        self._controller = controller
        self._pool, self._times = controller.pool, controller.engine_times
        self._snapshot = snapshot
        self._request = request
        self._report: Callable[[ShadowResult], None] | None = report
        self._ask = None if snapshot.estimator.counter is not None else self._sized()
        self._used: int | None = None
        self._began_us = self._pool.now_us()
        self.sent = self._times.sent(request, self._began_us)
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._disconnected: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._preempted: asyncio.Future[None] = loop.create_future()
        self._holds = self._waits = self._follows = False
        self._turn = Turn(
            self._pool,
            snapshot.policy,
            request.classification.tenant,
            EventReporter(),
            budgets=controller.usage,
            max_wait_s=request.max_wait_s,
            disconnect=lambda: self._disconnected,
            unlimited_s=LONGEST_WAIT_S,
        )

    @property
    def is_real(self) -> bool:
        """Whether it holds room that its request uses at the engine at this moment."""
        return self._holds and self.sent.end_us is None

    def waiting(self) -> WaitingShadow | None:
        """How it waits; None where it does not."""
        if not self._waits:
            return None
        policy, classification = self._snapshot.policy, self._request.classification
        tier, waited_us = policy.tiers[classification.level].name, self._pool.now_us() - self._began_us
        return WaitingShadow(policy.generation, tier, classification.tenant.name, waited_us)

    def begun(self) -> None:
        """The first byte of the response goes out."""
        if not self._begun.done():
            self._begun.set_result(None)

    def disconnected(self) -> None:
        """The client disconnected before the first byte."""
        if not self._disconnected.done():
            self._disconnected.set_result(None)

    def ended(self, used_tokens: int | None = None) -> None:
        """The request is over. `used_tokens` corrects its tenant's charge."""
        self.begun()
        self._used = used_tokens if self._used is None else self._used
        if not self._ended.done():
            self._ended.set_result(None)

    def follow_request(self) -> None:
        """Real requests wait now: the shadow holds its room until its request ends."""
        self._follows = True

    async def run(self) -> None:
        """Waits and holds in the pool. Canceled, it leaves nothing there."""
        try:
            if self._ask is None:
                await count_tokens(self._request, self._snapshot)
                self._ask = self._sized()
            await self._pass_through(self._ask)
        except AdmissionError as refusal:
            self._end(Verdict.REFUSED, refusal.code, None)
        except TurnEnded as end:
            self._end(*_verdict(end), end.wait)

    def _sized(self) -> Ask:
        """What the request asks of the pool. Its body is not kept."""
        controller, request = self._controller, self._request
        ask = sized_ask(self._pool, request, controller.lease_sizes, controller.appraiser(self._snapshot))
        ask = msgspec.structs.replace(ask, request=hash(request))
        request.drop_body()
        return ask

    def give_up(self, code: str) -> None:
        """The shadow ends early. Where its result is not known yet, it is unknown."""
        self._end(Verdict.UNKNOWN, code, None)

    async def _pass_through(self, ask: Ask) -> None:
        request, classification = self._request, self._request.classification
        turn = self._turn
        try:
            lease = await turn.enter(ask)
        finally:
            classification.note_charged(turn.level)
        try:
            is_preemptible = self._snapshot.are_preemptible[classification.level] and request.may_be_repeated
            if is_preemptible:
                lease.on_preempt = self._preempt
            if request.expected is not None:
                lease.size_now = partial(request.expect, self._controller.lease_sizes, self._pool)
            grant = await self._wait(turn.granted)
            while True:
                self._holds = True
                if not is_preemptible:
                    self._end(Verdict.ADMITTED, None, grant)
                first_us = await self._first_byte(grant)
                if first_us is not None:
                    lease.prefilled()
                if first_us is not None or not self._preempted.done() or self._disconnected.done():
                    break
                self._times.leave(self.sent)
                self._holds, self._preempted = False, asyncio.get_running_loop().create_future()
                grant = await self._wait(turn.requeue)
            if is_preemptible:
                lease.keep()
            self._end(Verdict.ADMITTED, None, grant)
            await self._hold(grant, first_us)
        finally:
            self._times.leave(self.sent)
            if not lease.settle(self._used):
                lease.leave()

    async def _wait(self, granted: Callable[[], Awaitable[Grant]]) -> Grant:
        self._waits = True
        try:
            return await granted()
        finally:
            self._waits = False

    def _preempt(self) -> None:
        """Called by the pool: a more important request needs the room."""
        if not self._preempted.done():
            self._preempted.set_result(None)

    async def _first_byte(self, grant: Grant) -> float | None:
        """Returns at the shadow's first byte, with its moment. None where it was preempted, or its client left, before.

        None as well where the request ended without one, and nothing is known of such requests.
        """
        times, sent, granted_us = self._times, self.sent, grant.at_us
        runs_us = await self._enter_engine(grant)
        if grant.queue_wait_us:  # its request's own time in the engine's queue says nothing of this one
            granted_us = runs_us
        begins_us = times.prompt_begins_us(sent, runs_us)
        if not self._begun.done():
            latest_us = times.unloaded_until_us(sent)
            timeout_s = None if latest_us is None else self._left_s(latest_us)
            waits_for = (self._begun, self._preempted, self._disconnected)
            await asyncio.wait(waits_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._preempted.done():
            return None
        first_us = times.first_byte_us(sent, granted_us, begins_us)
        if first_us is None or (self._disconnected.done() and first_us > self._pool.now_us()):
            return None
        if left_s := self._left_s(first_us):
            await asyncio.wait(
                (self._preempted, self._disconnected), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._left_s(first_us) and (self._preempted.done() or self._disconnected.done()):
                return None
        return None if self._preempted.done() else first_us

    async def _enter_engine(self, grant: Grant) -> int:
        """Returns when the shadow runs in the engine, with the moment; or when it was preempted or left before."""
        times, place = self._times, self._times.enter(self.sent)
        if place.done():
            return grant.at_us
        own = () if grant.queue_wait_us else (self._begun,)
        await self._until(None, place, self._preempted, self._disconnected, *own)
        if place.done() or self._preempted.done() or self._disconnected.done():
            return self._pool.now_us()
        times.run_now(self.sent)
        return grant.at_us

    async def _hold(self, grant: Grant, first_us: float | None) -> None:
        """Holds the lease for as long as the request would take, from the grant on; or until the client disconnects."""
        times, sent = self._times, self.sent
        if first_us is None:
            await self._until(None, self._ended, self._disconnected)
            if sent.end_us is not None and not self._disconnected.done():
                await self._until(grant.at_us + sent.end_us - sent.sent_us)
            times.held(sent, is_guessed=False, is_left=False)
            return
        times.generates(sent, self._pool.now_us())
        try:
            is_guessed = await self._generate(first_us)
        finally:
            times.generated(sent, self._pool.now_us())
        times.held(sent, is_guessed=is_guessed, is_left=self._disconnected.done())
        if self._follows and not self._ended.done():
            await self._until(None, self._ended, self._disconnected)

    async def _generate(self, first_us: float) -> bool:
        """Returns at the shadow's last byte: whether its time was guessed."""
        times, sent = self._times, self.sent
        ends = (self._ended, self._disconnected)
        while (guess_us := self._guess_us()) is None and not any(end.done() for end in ends):
            # Its own end may be far off: the engine does what the pool would not have admitted yet.
            await self._until(None, times.learned(), *ends)
        if guess_us is not None:
            if not self._generates_now() and not sent.is_lost and not self._disconnected.done():
                await self._until(first_us + guess_us * SLIGHTLY, self._begun)
            was_late = not self._generates_now()
            times.guessed(sent, guess_us)
            if not sent.is_lost:
                await self._until(first_us + guess_us, self._ended)
            if sent.is_lost or (not self._ended.done() and (was_late or times.is_stretched(sent, self._pool.now_us()))):
                self._used = self._request.prompt_tokens + round((sent.output_tokens or 0) * sent.sequences)
                await self._until(first_us + guess_us)
                return True
            sent.guessed_us = None
        await self._until(None, self._ended, self._disconnected)
        if self._ended.done() and (lasts_us := times.generating_us(sent)) is not None:
            await self._until(first_us + lasts_us)
        return False

    def _guess_us(self) -> float | None:
        """How long it generates, where its request does not say; None where nothing is known of it."""
        return None if self._ended.done() and not self.sent.is_lost else self._times.generating_us(self.sent)

    def _generates_now(self) -> bool:
        """Whether the response's first byte has come."""
        return self.sent.first_us is not None

    async def _until(self, at_us: float | None, *events: asyncio.Future[None]) -> None:
        """Waits until the first of `events`, but not after `at_us`."""
        left_s = None if at_us is None else self._left_s(at_us)
        if events:
            await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        elif left_s:
            await asyncio.sleep(left_s)

    def _left_s(self, at_us: float) -> float:
        """The time until a moment of the pool's clock, in seconds; 0 where it is over."""
        return max(0.0, at_us - self._pool.now_us()) / 1e6

    def _end(self, verdict: Verdict, code: str | None, wait: Grant | None) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(ShadowResult(verdict, code, wait))


def _verdict(end: TurnEnded) -> tuple[Verdict, str]:
    """The result of a shadow whose wait ended without a grant, and its code."""
    if end.cause is Cause.DISCONNECTED:
        return Verdict.ABANDONED, CLIENT_LEFT
    if end.refusal is not None:
        return Verdict.REFUSED, end.refusal.code
    return (Verdict.UNKNOWN, WAITED_TOO_LONG) if end.most_s is None else (Verdict.REFUSED, QueueTimeout.code)


MOST_SHADOWS = 10_000
"""The most shadow requests that wait or hold; 10 KB each. It also bounds a tier's queue that has no bound."""
STOPPED, DEFECT = "stopped", "defect"

_log = logging.getLogger("sidecar.observing")


class ShadowRegistry:
    """All shadow requests of a controller: a bounded number, each in a task of its own, and none after `close`.

    `close` is called at the server's end, before the pool's.
    """

    def __init__(self, most: int = MOST_SHADOWS) -> None:
        self._most = most
        self._following: dict[asyncio.Task[None], ShadowRequest] = {}
        self._is_closed = False
        self._reported = False

    def __len__(self) -> int:
        return len(self._following)

    def follow(self, shadow: ShadowRequest) -> bool:
        """Runs a shadow request in the background. False where there are too many already."""
        if self._is_closed or len(self._following) >= self._most:
            return False
        task = asyncio.get_running_loop().create_task(shadow.run(), name="sidecar shadow")
        self._following[task] = shadow
        task.add_done_callback(self._over)
        return True

    def waiting(self) -> Iterator[WaitingShadow]:
        """The shadows that still wait."""
        for shadow in self._following.values():
            if (one := shadow.waiting()) is not None:
                yield one

    def end_unreal(self) -> None:
        """Ends the shadows that wait, or hold for a request that is over: real requests must not wait for them."""
        for task, shadow in tuple(self._following.items()):
            if shadow.is_real:
                shadow.follow_request()
            else:
                task.cancel()

    async def close(self) -> None:
        """Ends all of them; each releases what it holds."""
        self._is_closed = True
        following = tuple(self._following)
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    def report(self, defect: BaseException) -> None:
        """Logs the first defect of the dry run; later ones would write a line for each request."""
        if not self._reported:
            self._reported = True
            _log.error(
                "a defect in the sidecar: a request was not observed, and passed; further ones are not logged",
                exc_info=defect,
                extra={"event": "observing_failed"},
            )

    def _over(self, task: asyncio.Task[None]) -> None:
        shadow = self._following.pop(task)
        defect = None if task.cancelled() else task.exception()
        shadow.give_up(STOPPED if defect is None else DEFECT)
        if defect is not None:
            self.report(defect)
