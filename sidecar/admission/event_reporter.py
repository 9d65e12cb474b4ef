"""Event reporter: tells an observer what happens to one request.

An observer that follows requests is told each event as it comes. One that does not is told of failures only, and then
with all that came before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
from starlette.types import Scope

from sidecar.admission.intake import SizedRequest
from sidecar.admission.policy_snapshot import PolicySnapshot
from sidecar.admission.request_gain import RequestGain
from sidecar.errors import AdmissionError
from sidecar.events import (
    FIRST_FAILURE,
    LONGEST_MODEL,
    Admitted,
    Classified,
    Event,
    FirstByte,
    Observation,
    Observer,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Replayed,
    ReplayReason,
    ServiceGain,
    Settled,
)
from sidecar.lengths.lease_size import LeaseSize
from sidecar.policy.tenant import Tenant
from sidecar.pools import Grant

DISCONNECTED_CODE = "client_left"
CANCELED_CODE = "canceled"
PASSED_CODE = "passed"


class Asker(Protocol):
    """The one who asks for admission: the intake of a request, or a lease from Python."""

    @property
    def tenant(self) -> Tenant | None:
        """Its tenant, None where its key is not known yet."""

    @property
    def tier(self) -> str | None:
        """The name of its tier, None where that is not known yet."""


class EventReporter(msgspec.Struct, eq=False):
    """Reports one request: see `new_reporter`. Without arguments it reports nothing.

    `now_us` is the pool's clock in microseconds. `observation` is there from the beginning where an observer follows
    the request. Where one is told of failures only, `_begin` makes it, and `_kept` are what it is told then.

    A request that was admitted once ends with `Settled`, even where it ends while it waits again. `asker` knows the
    tenant and the tier of a request that ends before it is classified. `gain` is told of its first byte and its end,
    whether an observer listens or not.
    """

    _now_us: Callable[[], int] = lambda: 0
    _asker: Asker | None = None
    observation: Observation | None = None
    _begin: Callable[[], Observation | None] | None = None
    _kept: list[Event] = []
    _was_admitted: bool = False
    gain: RequestGain | None = None

    def classified(
        self,
        request: SizedRequest,
        snapshot: PolicySnapshot,
        at_us: int,
        *,
        api: str | None = None,
        is_kept: bool = False,
    ) -> None:
        """The request was classified at `at_us`, and the pool has said now which tier it charges.

        `api` is what stands for its API; None: its own. `is_kept`: it is never preempted, whatever its tier.
        """
        classification, payload, tiers = request.classification, request.payload, snapshot.policy.tiers
        clamped_from, downgraded_from = classification.clamped_from, classification.downgraded_from
        event = Classified(  # with more than 15 names Python would make a dict of them
            at_us,
            tiers[classification.level].name,
            classification.tenant.name,
            classification.source._value_,  # `value` itself costs two calls
            clamped_from=None if clamped_from is None else tiers[clamped_from].name,
            api=api or request.api._value_,
            model=None if payload.model is None else payload.model[:LONGEST_MODEL],
            max_output_tokens=payload.max_output_tokens,
            stream=payload.stream,
            tokens=request.tokens,
            requests=request.requests,
            preemptible=not is_kept and snapshot.are_preemptible_by_rule[classification.level],
            downgraded_from=None if downgraded_from is None else tiers[downgraded_from].name,
            expected=None if request.expected is None else request.expected.expectation(payload),
            key=classification.tenant.key_name,
            is_deferred=request.deadline_us is not None,
            user=None if classification.user is None else classification.user.shown,
        )
        self.event(event)

    def queued(self, obstacle: Callable[[], tuple[Obstacle, str]], mark: tuple[int, int] | None = None) -> None:
        """The request has to wait from now on. `obstacle` says why; it is called only where someone listens."""
        if self.gain is not None and self.gain.report is not None:
            self.gain.report.queued(obstacle)
        if self.observation is not None or self._begin is not None:
            self.event(Queued(self._now_us(), *obstacle(), mark))

    def waited_for_store(self, since_us: int) -> None:
        """The pool's first answer admitted the request, but took so long that it counts as a wait."""
        self.event(Queued(since_us, Obstacle.STORE, "the pool took a moment to answer"))

    def admitted(self, grant: Grant, priority: int | float | None, *, is_dry_run: bool = False) -> None:
        """The request holds its lease, or none where it passes in a dry run.

        `priority` is the engine's, None where the engine gets none.
        """
        self._was_admitted = True
        self.event(Admitted(**msgspec.structs.asdict(grant), engine_priority=priority, is_dry_run=is_dry_run))

    def event(self, event: Event) -> None:
        """Reports an event that does not end the request, or keeps it."""
        if self.observation is not None:
            self.observation.on_event(event)
        elif self._begin is not None:
            self._kept.append(event)

    def replayed(self, engine: str, reason: ReplayReason) -> None:
        """An engine, by its id, did not serve the request. `preempted` with `is_unreached` comes next."""
        self.event(Replayed(self._now_us(), engine, reason))

    def preempted(self, admitted_us: int, times: int, *, is_unreached: bool = False) -> None:
        """The request was preempted for the n-th time, or did not reach the engine, and waits again."""
        self.event(Preempted(self._now_us(), admitted_us, times, is_unreached))

    def refused(self, error: AdmissionError, wait: Grant | None) -> None:
        """The request was answered with an error, perhaps after a wait."""
        self.ended(error.code, error.message, error.status, wait)

    def disconnected(self, wait: Grant | None) -> None:
        """The client disconnected before it was admitted."""
        self.ended(DISCONNECTED_CODE, "the client disconnected before it was admitted", None, wait)

    def canceled(self, wait: Grant | None) -> None:
        """The server canceled the request before it was admitted: it stops, or an app around the middleware failed."""
        self.ended(CANCELED_CODE, "the server canceled the request before it was admitted", None, wait)

    def let_pass(self, wait: Grant | None) -> None:
        """The request left the queue, or was about to be refused, and went on: `mode: pass` was switched on."""
        self.ended(PASSED_CODE, "every request passes (mode: pass)", None, wait)

    def first_byte(self, status: int | None) -> None:
        """The response's first byte goes out."""
        if self.gain is not None:
            self.gain.first_byte(status)
        self.event(FirstByte(self._now_us(), status or 0))

    def check(self, *, has_left: bool) -> None:
        """Looks for a first token that is overdue. Called from time to time; `has_left`: its client is gone."""
        if self.gain is not None and not has_left:
            self.gain.check()

    def settled(  # noqa: PLR0917  # names at the call would cost as much as the rest
        self,
        outcome: Outcome,
        status: int | None,
        used: tuple[int, int | None, int | None, int | None],
        error: str | None,
        message: str | None = None,
        size: LeaseSize | None = None,
    ) -> None:
        """The request is over. `used` is all tokens, then the engine's own count of input, output and cached input.

        `message` is that of the error that was answered in the engine's place. `size` is that of the lease.
        """
        gain = None if self.gain is None else self.gain.settled(outcome, status, is_failure=message is not None)
        if self.observation is None and outcome is Outcome.COMPLETED and (status or 0) < FIRST_FAILURE:
            return
        tokens, input_tokens, output_tokens, cached_tokens = used
        held, growths = (None, 0) if size is None else (size.held, size.growths)
        event = Settled(
            at_us=self._now_us(),
            outcome=outcome,
            status=status,
            tokens_used=tokens,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            error=error,
            message=message,
            held_tokens=held,
            growths=growths,
            gain=gain,
            cached_tokens=cached_tokens,
        )
        self._end(event)

    def ended(self, code: str, message: str, status: int | None, wait: Grant | None, tokens: int = 0) -> None:
        """The request ended without a grant, or waiting for another one. It has used `tokens` by then."""
        is_abandoned = code == DISCONNECTED_CODE
        gain = None if self.gain is None else self.gain.refused(status, is_abandoned=is_abandoned)
        if self.observation is None and self._begin is None:
            return
        at_us = self._now_us() if wait is None else wait.at_us
        refused = _refused((at_us, code, message, status), wait, self._asker, gain)
        if not self._was_admitted:
            self._end(refused)
            return
        outcome = Outcome.CLIENT_LEFT if is_abandoned else Outcome.FAILED
        waited = None if wait is None else refused
        self._end(Settled(self._now_us(), outcome, status, tokens, None, None, code, waited, gain=gain))

    def _end(self, event: Refused | Settled) -> None:
        """Tells the event that ends the request, and before it what was kept."""
        if self._begin is not None:
            self.observation, self._begin = self._begin(), None
            for kept in self._kept:
                self.event(kept)
        if self.observation is not None:
            self.observation.on_event(event)


def new_reporter(  # noqa: PLR0917
    observer: Observer | None,
    scope: Scope,
    request_id: str,
    received_us: int,
    now_us: Callable[[], int],
    asker: Asker,
) -> EventReporter:
    """The reporter of a request that came at `received_us`."""
    if observer is None:
        return EventReporter(now_us, asker)
    # Right after the clock: what the processor did since the request came would be in all of its times.
    wall_ns, method, path = time.time_ns() - (now_us() - received_us) * 1000, scope["method"], scope["path"]
    received = Received(received_us, wall_ns, method, path, scope["headers"], request_id)
    if observer.follows():
        return EventReporter(now_us, asker, observer.received(received))
    return EventReporter(now_us, asker, _begin=partial(observer.received, received))


def _refused(
    end: tuple[int, str, str, int | None], wait: Grant | None, asker: Asker | None, gain: ServiceGain | None
) -> Refused:
    tenant, tier = (None, None) if asker is None else (asker.tenant, asker.tier)
    waited = (
        (0, 0, None, {})
        if wait is None
        else (wait.queue_wait_us, wait.starvation_us, wait.overtaken_at_us, wait.served_ahead)
    )
    name, key = (None, None) if tenant is None else (tenant.name, tenant.key_name)
    return Refused(*end, *waited, name, gain, tier, key)
