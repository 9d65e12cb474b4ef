"""The refusals of requests that waited, or found no place to wait, and the headers of every refusal."""

from __future__ import annotations

from sidecar.admission.controller import AdmissionController
from sidecar.admission.engine_route import no_engine
from sidecar.admission.response_headers import allowance_headers, wait_headers
from sidecar.admission.turn import Cause, TurnEnded
from sidecar.errors import (
    AdmissionError,
    BodyTimeout,
    BodyTooLarge,
    Draining,
    InvalidHeader,
    QueueFull,
    QueueTimeout,
    TenantLimit,
    UnknownCoding,
)
from sidecar.policy.model import Policy, Tier
from sidecar.pools import Grant, Pool


def refusal_of(controller: AdmissionController, policy: Policy, end: Exception, *, level: int | None) -> AdmissionError:
    """The refusal of a request, or of a lease from Python, that ended without a grant.

    `end` is TurnEnded or an AdmissionError. `level` is the level that is charged, None before that is known.
    """
    if isinstance(end, TurnEnded):
        assert level is not None
        return end.refusal or _end_of_wait(controller, policy.tiers[level], end)
    assert isinstance(end, AdmissionError)
    if isinstance(end, QueueFull) and level is not None and policy.tiers[level].queue.max_requests == 0:
        # A tier that never queues has no place while there is no engine: that is the reason, then.
        return end if controller.engine_watch.is_usable else no_engine(controller.engine_watch)
    return end


def _end_of_wait(controller: AdmissionController, tier: Tier, end: TurnEnded) -> AdmissionError:
    """The refusal of a request whose wait is over."""
    if end.cause is Cause.GIVEN_UP:
        return Draining("this server is shutting down, and the request still waited; try another", retry_after_s=1)
    if not controller.engine_watch.is_usable:
        return no_engine(controller.engine_watch)
    assert end.most_s is not None
    return no_room(controller.pool, tier, end.most_s)


def no_room(pool: Pool, tier: Tier, most_s: float) -> QueueTimeout:
    """The refusal of a request of a tier that has waited for as long as it may."""
    return QueueTimeout(
        f"no room came free for tier {tier.name} within {most_s:g} s; try again later",
        retry_after_s=pool.retry_after_s(tier.level),
    )


def refusal_headers(error: AdmissionError, waited: Grant | None, *, is_cut: bool) -> list[tuple[bytes, bytes]]:
    """Headers of a refusal, perhaps after a wait. `is_cut`: the server stops, and the request gets no other answer."""
    # The rest of an unread body is not read: the connection ends with the response.
    closes = is_cut or isinstance(error, BodyTimeout | BodyTooLarge | InvalidHeader)
    headers = [(b"connection", b"close")] if closes else []
    if isinstance(error, TenantLimit):
        headers += allowance_headers(error.allowance)
    if isinstance(error, UnknownCoding):
        headers.append((b"accept-encoding", error.known.encode("ascii")))
    if waited is not None:
        headers += wait_headers(waited)
    return headers
