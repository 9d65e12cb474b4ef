"""The refusals of requests that waited, or found no place to wait, and the headers of every refusal."""

from __future__ import annotations

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
from sidecar.middleware.controller import AdmissionController
from sidecar.middleware.engine_route import no_engine
from sidecar.middleware.intake import SizedRequest
from sidecar.middleware.response_headers import allowance_headers, wait_headers
from sidecar.middleware.wait import WaitedTooLong
from sidecar.policy.model import Policy
from sidecar.pools import Grant


def refusal_of(
    controller: AdmissionController, request: SizedRequest, policy: Policy, end: Exception, *, is_given_up: bool
) -> tuple[AdmissionError, Grant | None]:
    """The refusal of a request that ended without a grant, and how it had waited.

    `end` is WaitedTooLong or an AdmissionError. `is_given_up`: the process is about to end.
    """
    if isinstance(end, WaitedTooLong):
        return end.refusal or _end_of_wait(controller, request, policy, is_given_up=is_given_up), end.wait
    assert isinstance(end, AdmissionError)
    return _without_place(controller, request, policy, end) if isinstance(end, QueueFull) else end, None


def _end_of_wait(
    controller: AdmissionController, request: SizedRequest, policy: Policy, *, is_given_up: bool
) -> AdmissionError:
    """The refusal of a request whose wait is over."""
    if is_given_up:
        return Draining("this server is shutting down, and the request still waited; try another", retry_after_s=1)
    if not controller.engine_watch.is_usable:
        return no_engine(controller.engine_watch)
    level = request.classification.level
    return QueueTimeout(
        f"no room came free for tier {policy.tiers[level].name} within {request.longest_wait_s(policy):g} s; try again "
        "later",
        retry_after_s=controller.pool.retry_after_s(level),
    )


def _without_place(
    controller: AdmissionController, request: SizedRequest, policy: Policy, refusal: QueueFull
) -> AdmissionError:
    """A tier that never queues has no place for a request while there is no engine: that is the reason, then."""
    watch = controller.engine_watch
    if watch.is_usable:
        return refusal
    level = request.classification.level if refusal.level is None else refusal.level
    return refusal if policy.tiers[level].max_waiting != 0 else no_engine(watch)


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
