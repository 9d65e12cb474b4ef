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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sidecar.admission.intake import SizedRequest, counted, sized_for
from sidecar.admission.policy_snapshot import PolicySnapshot
from sidecar.admission.slo import SloFollower
from sidecar.admission.turn import EndCause, Turn, TurnEnded, TurnUser
from sidecar.admission.usage import UsageReader
from sidecar.errors import AdmissionError
from sidecar.events import Outcome, Verdict
from sidecar.pools import Ask, Grant, Lease

if TYPE_CHECKING:
    from sidecar.admission.controller import AdmissionController

LONGEST_WAIT_S = 3600.0
"""The longest wait of a shadow where its tier has none."""
CLIENT_LEFT, WAITED_TOO_LONG = "client_left", "waited_too_long"
_REFUSED_BY_ENGINE = frozenset((429, 502, 503, 504, 529))
"""Statuses by which an engine, or the proxy before it, says that it cannot take a request now."""
SLIGHTLY = 0.1
"""A request that is later than its shadow by this part of the time that it generates is waited for."""


Report = Callable[[Verdict, str | None, Grant | None], None]
"""Gets the result of a shadow request: a code where it was not admitted, and how it waited."""


class WaitingShadow(NamedTuple):
    """A shadow request that still waits: the generation of its policy, and how long it has waited."""

    generation: str
    tier: str
    tenant: str
    waited_us: int


class ShadowRequest(TurnUser):
    """The shadow of one request. `report` is called once, with the result.

    Its request calls `first_byte`, then `ended` or `unwatched`. `request` is that request as it is now, `sent` as it is
    at the engine. `run` is called once, in a task of its own.
    """

    __slots__ = (
        "_ask", "_began_us", "_begun", "_controller", "_disconnected", "_ended", "_follows", "_lease", "_pool",
        "_preempted", "_report", "_slo", "_snapshot", "_times", "_turn", "_used", "request", "sent",
    )  # fmt: skip

    def __init__(
        self,
        controller: AdmissionController,
        snapshot: PolicySnapshot,
        request: SizedRequest,
        report: Report,
    ) -> None:
        self._controller = controller
        self._pool, self._times = controller.pool, controller.engine_times
        self._snapshot = snapshot
        self.request = request
        self._report: Report | None = report
        self._ask = None if snapshot.estimator.counter is not None else self._sized()
        self._used: int | None = None
        self._began_us = self._pool.now_us()
        self.sent = self._times.sent(request, self._began_us)
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._disconnected: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._preempted: asyncio.Future[None] = loop.create_future()
        self._turn: Turn | None = None
        self._lease: Lease | None = None
        self._follows = False
        self._slo: SloFollower | None = None

    @property
    def is_guarded(self) -> bool:
        """True if its tier has `hold`, and its answer streams: other answers' times are not corrected by the load."""
        request, hold = self.request, self._snapshot.policy.tiers[self.sent.level].slo.hold
        return hold is not None and request.objective is not None and self.sent.is_stream and request.assumed_output > 0

    @property
    def is_real(self) -> bool:
        """True if it holds room that its request uses at the engine at this moment."""
        return self._lease is not None and self._lease.grant is not None and self.sent.end_us is None

    def waiting(self) -> WaitingShadow | None:
        """How it waits; None where it does not."""
        if self._lease is None or self._lease.grant is not None:
            return None
        policy, classification = self._snapshot.policy, self.request.classification
        tier, waited_us = policy.tiers[classification.level].name, self._pool.now_us() - self._began_us
        return WaitingShadow(policy.generation, tier, classification.tenant.name, waited_us)

    def first_byte(self, status: int | None) -> None:
        """The first byte of the response goes out."""
        if (status or 0) not in _REFUSED_BY_ENGINE:
            self._times.first_byte(self.sent, self._pool.now_us(), is_served=(status or 0) < 400)
            _set(self._begun)

    def ended(self, outcome: Outcome, status: int | None, usage: UsageReader, charged: int | None) -> None:
        """The request is over: its times are known, or say nothing. `charged` corrects its tenant's charge."""
        times, sent, now_us, code = self._times, self.sent, self._pool.now_us(), status or 0
        is_complete = outcome is Outcome.COMPLETED
        if is_complete and sent.first_us is None and code not in _REFUSED_BY_ENGINE:
            times.first_byte(sent, now_us, is_served=False)  # a response without a body
        sent.is_lost = sent.first_us is None
        output_tokens = usage.output_tokens
        if output_tokens is None and usage.chunks:
            output_tokens = usage.chunks - 1  # the last one is `[DONE]`
        times.ended(sent, now_us, output_tokens, is_complete=is_complete and 0 < code < 400)
        if outcome is Outcome.CLIENT_LEFT and sent.is_lost:
            _set(self._disconnected)
        else:
            self._request_over(charged)

    def unwatched(self) -> None:
        """The request goes on, and nothing is known of it any more."""
        self._times.ended(self.sent, self._pool.now_us(), None, is_complete=False)
        self._request_over(None)

    def _request_over(self, charged: int | None) -> None:
        self._used = charged if self._used is None else self._used
        _set(self._begun)
        _set(self._ended)

    def follow_request(self) -> None:
        """Real requests wait now: the shadow holds its room until its request ends."""
        self._follows = True

    async def run(self) -> None:
        """Waits and holds in the pool. Canceled, it leaves nothing there."""
        if self.is_guarded:
            self._slo = self._slo_follower()
        try:
            await self._run()
        finally:
            if self._slo is not None:
                self._slo.close()

    def _slo_follower(self) -> SloFollower:
        """Tells the shadows' pool whether the request would have met the SLO."""
        sent, times, objective = self.sent, self._times, self.request.objective
        level, tenant = self.request.classification.level, self.request.classification.tenant.name
        assert objective is not None

        def note(is_missed: bool) -> None:
            times.note_slo(sent, is_missed=is_missed, is_shadow=True)
            self._pool.note_slo(level, tenant, is_missed)

        def is_too_long() -> bool:
            return (times.speed.computing_us(sent.prompt_tokens) or 0) >= objective.ttft_us

        return SloFollower(self._pool, objective, self._began_us, note, is_too_long)

    async def _run(self) -> None:
        try:
            if self._ask is None:
                self.request = await counted(self.request, self._snapshot)
                self._ask = self._sized()
            await self._pass_through(self._ask)
        except AdmissionError as refusal:
            self._end(Verdict.REFUSED, refusal.code, None)
        except TurnEnded as end:
            if self._slo is not None and end.cause is not EndCause.DISCONNECTED:
                self._slo.refused()
            self._end(*_verdict(end), end.wait)

    def _sized(self) -> Ask:
        """The request's ask of the pool. Its body is not kept."""
        controller, snapshot = self._controller, self._snapshot
        meter = controller.gain if snapshot.policy.rules.is_by_gain else None
        request = sized_for(self._pool, self.request, controller.lease_sizes, meter, snapshot.tier_names)
        self.request = request
        ask = msgspec.structs.replace(request.ask(), request=hash(request))
        request.payload.drop_text()
        return ask

    def give_up(self, code: str) -> None:
        """The shadow ends early. Where its result is not known yet, it is unknown."""
        self._end(Verdict.UNKNOWN, code, None)

    async def _pass_through(self, ask: Ask) -> None:
        controller, policy = self._controller, self._snapshot.policy
        budgets, sizes, longest_s = controller.usage, controller.lease_sizes, LONGEST_WAIT_S
        turn = self._turn = Turn(
            self._pool, policy, self.request, ask, self, budgets=budgets, sizes=sizes, unlimited_s=longest_s
        )
        async with turn as grant:
            try:
                await self._take_time(turn, grant)
            finally:
                self._times.leave(self.sent)
                turn.settle(self._used)

    async def _take_time(self, turn: Turn, grant: Grant) -> None:
        """Holds room from its grant to its end. It waits again where it is preempted before its first byte."""
        lease = turn.lease
        while True:
            if lease.on_preempt is None:
                self._end(Verdict.ADMITTED, None, grant)
            if self._slo is not None:
                self._slo.granted()
            first_us = await self._first_byte(grant)
            if first_us is not None:
                lease.prefilled()
                if self._slo is not None:
                    self._slo.first_token()
            if first_us is not None or not self._preempted.done() or self._disconnected.done():
                break
            self._times.leave(self.sent)
            self._preempted = asyncio.get_running_loop().create_future()
            grant = await turn.requeue()
        if lease.on_preempt is not None:
            lease.keep()
        self._end(Verdict.ADMITTED, None, grant)
        await self._hold(grant, first_us)

    def entered(self, lease: Lease | None) -> None:
        """See `TurnUser`."""
        assert self._turn is not None
        self._lease, request = lease, self._turn.request
        self.request = request
        is_preemptible = self._snapshot.are_preemptible[request.classification.level] and request.may_be_repeated
        if lease is not None and is_preemptible:
            lease.on_preempt = self._preempt
        if self._slo is not None:
            self._slo.entered(lease)
            if request.classification.downgraded_from is not None:
                self._slo.close()
                self._slo = None

    def rose(self, request: SizedRequest) -> None:
        """See `TurnUser`."""
        self.request = request

    def disconnect(self) -> asyncio.Future[Any]:
        """See `TurnUser`."""
        return self._disconnected

    def _preempt(self) -> None:
        """Called by the pool: a more important request needs the room."""
        if self._slo is not None:
            self._slo.preempted()
        _set(self._preempted)

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
            await self._until(times.unloaded_until_us(sent), self._begun, self._preempted, self._disconnected)
        if self._preempted.done() or (first_us := times.first_byte_us(sent, granted_us, begins_us)) is None:
            return None
        await self._until(first_us, self._preempted, self._disconnected)
        has_left = self._disconnected.done() and self._left_s(first_us) > 0
        return None if self._preempted.done() or has_left else first_us

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
        lasted_us, tokens = times.generating_us(sent), sent.output_tokens
        if self._slo is not None and lasted_us is not None and tokens and not self._disconnected.done():
            self._slo.finished(lasted_us, tokens)
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
            if sent.first_us is None and not sent.is_lost and not self._disconnected.done():
                await self._until(first_us + guess_us * SLIGHTLY, self._begun)
            was_late = sent.first_us is None
            times.guessed(sent, guess_us)
            if not sent.is_lost:
                await self._until(first_us + guess_us, self._ended)
            if sent.is_lost or (not self._ended.done() and (was_late or times.is_stretched(sent, self._pool.now_us()))):
                self._used = self.request.prompt_tokens + round((sent.output_tokens or 0) * sent.sequences)
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

    async def _until(self, at_us: float | None, *events: asyncio.Future[None]) -> None:
        """Waits until the first of `events`, but not after `at_us`."""
        left_s = None if at_us is None else self._left_s(at_us)
        if left_s == 0 or any(event.done() for event in events):
            return
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
            report(verdict, code, wait)


def _set(event: asyncio.Future[None]) -> None:
    if not event.done():
        event.set_result(None)


def _verdict(end: TurnEnded) -> tuple[Verdict, str]:
    """The result of a shadow whose wait ended without a grant, and its code."""
    if end.cause is EndCause.DISCONNECTED:
        return Verdict.ABANDONED, CLIENT_LEFT
    if end.refusal is not None:
        return Verdict.REFUSED, end.refusal.code
    is_known = end.most_s is not None or end.cause is EndCause.DEADLINE
    return (Verdict.REFUSED, end.code) if is_known else (Verdict.UNKNOWN, WAITED_TOO_LONG)


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
