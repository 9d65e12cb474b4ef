"""Tells the observer of one request what happened to it. Without an observer every call is one comparison."""

from __future__ import annotations

import time
from collections.abc import Callable

from sidecar.asgi.types import Scope
from sidecar.asgi.understanding import Understood
from sidecar.errors import AdmissionError
from sidecar.events import (
    Admitted,
    Classified,
    FirstByte,
    Headers,
    Observation,
    Observed,
    Observer,
    Obstacle,
    Outcome,
    Preempted,
    Queued,
    Received,
    Refused,
    Settled,
)
from sidecar.policy.model import Endpoint, Policy
from sidecar.pools import Grant

LEFT_CODE = "client_left"
CANCELED_CODE = "canceled"


class Report:
    """One request's. `now_us` is the pool's clock, in microseconds; it is read only where somebody listens.

    Who was admitted once is told to have settled, also where its end comes while it waits again.
    """

    __slots__ = ("_now_us", "_observation", "_was_admitted")

    def __init__(
        self, observer: Observer | None, scope: Scope, request_id: str, received_us: int, now_us: Callable[[], int]
    ) -> None:
        self._now_us = now_us
        self._observation: Observation | None = None
        self._was_admitted = False
        if observer is not None and observer.listens():
            method, path, headers = scope["method"], scope["path"], scope["headers"]
            self._observation = observer.received(
                Received(received_us, time.time_ns(), method, path, headers, request_id)
            )

    def headers(self) -> Headers:
        """The trace context that goes on to the engine."""
        return () if self._observation is None else self._observation.headers()

    def classified(self, understood: Understood, endpoint: Endpoint, policy: Policy, at_us: int) -> None:
        """It has been known since `at_us` who asks, and for what; and now, too, at which tier the pool took it in."""
        if self._observation is None:
            return
        classification, payload = understood.classification, understood.payload
        self._observation.on_event(
            Classified(
                at_us=at_us,
                tier=policy.tiers[classification.level].name,
                tenant=classification.tenant.name,
                source=classification.source.value,
                clamped_from=None
                if classification.clamped_from is None
                else policy.tiers[classification.clamped_from].name,
                api=endpoint.api.value,
                model=payload.model,
                max_output_tokens=payload.max_output_tokens,
                stream=payload.stream,
                tokens=understood.tokens,
                requests=payload.prompts * payload.choices,
                downgraded_from=None
                if classification.downgraded_from is None
                else policy.tiers[classification.downgraded_from].name,
                preemptible=policy.rules.is_preemptible(classification.level),
            )
        )

    def queued(self, why: Callable[[], tuple[Obstacle, str]]) -> None:
        """It has to wait from now on. `why` is asked where somebody listens."""
        if self._observation is not None:
            self._observation.on_event(Queued(self._now_us(), *why()))

    def waited_for_the_answer(self, since_us: int) -> None:
        """It was admitted by the pool's first answer, which took so long that it counts as a wait."""
        if self._observation is not None:
            self._observation.on_event(Queued(since_us, Obstacle.STORE, "the pool took a moment to answer"))

    def admitted(self, grant: Grant, engine_priority: int | float | None) -> None:
        """It holds its lease."""
        self._was_admitted = True
        if self._observation is not None:
            self._observation.on_event(
                Admitted(
                    at_us=grant.at_us,
                    queue_wait_us=grant.queue_wait_us,
                    starvation_us=grant.starvation_us,
                    overtaken_at_us=grant.overtaken_at_us,
                    served_ahead=grant.served_ahead,
                    level=grant.level,
                    engine_priority=engine_priority,
                    passed=grant.passed,
                )
            )

    def passed(self, at_us: int, level: int) -> None:
        """It went to the app without a lease, and did not wait: nobody is held here."""
        if self._observation is not None:
            self._observation.on_event(Admitted(at_us, 0, 0, None, {}, level, None))

    def observed(self, observed: Observed) -> None:
        """It is known what enforcing would have done to it."""
        if self._observation is not None:
            self._observation.on_event(observed)

    def preempted(self, admitted_us: int, times: int) -> None:
        """It gave its room to a more important request, for the n-th time, and waits again."""
        if self._observation is not None:
            self._observation.on_event(Preempted(self._now_us(), admitted_us, times))

    def refused(self, error: AdmissionError, wait: Grant | None) -> None:
        """It was answered with an error, perhaps after a wait."""
        self._ended(error.code, error.message, error.status, wait)

    def left(self, wait: Grant | None) -> None:
        """The client hung up before it was admitted."""
        self._ended(LEFT_CODE, "the client hung up before it was admitted", None, wait)

    def canceled(self, wait: Grant | None) -> None:
        """The server gave it up before it was admitted: it stops, or the app around us failed."""
        self._ended(CANCELED_CODE, "the server gave the request up before it was admitted", None, wait)

    def first_byte(self, status: int | None) -> None:
        """The body's first byte goes out."""
        if self._observation is not None:
            self._observation.on_event(FirstByte(self._now_us(), status or 0))

    def settled(
        self,
        outcome: Outcome,
        *,
        status: int | None,
        used: tuple[int, int | None, int | None],
        error: str | None,
    ) -> None:
        """The lease is given back. `used` is tokens in all, and the engine's own input and output."""
        if self._observation is not None:
            self._observation.on_event(Settled(self._now_us(), outcome, status, *used, error))

    def _ended(self, code: str, message: str, status: int | None, wait: Grant | None) -> None:
        if self._observation is None:
            return
        if self._was_admitted:
            outcome = Outcome.CLIENT_LEFT if code == LEFT_CODE else Outcome.FAILED
            told = None if wait is None else _refused(code, message, status, wait)
            self._observation.on_event(Settled(self._now_us(), outcome, status, 0, None, None, code, told))
        elif wait is None:
            self._observation.on_event(Refused(self._now_us(), code, message, status))
        else:
            self._observation.on_event(_refused(code, message, status, wait))


def _refused(code: str, message: str, status: int | None, wait: Grant) -> Refused:
    return Refused(
        at_us=wait.at_us,
        code=code,
        message=message,
        status=status,
        queue_wait_us=wait.queue_wait_us,
        starvation_us=wait.starvation_us,
        overtaken_at_us=wait.overtaken_at_us,
        served_ahead=wait.served_ahead,
    )
