"""Attributes of the spans, for each event. Names are `semconv`'s; nothing here touches a span."""

from __future__ import annotations

from sidecar.events import Admitted, Classified, Observed, Outcome, Preempted, Refused, Settled
from sidecar.telemetry import semconv

Attributes = dict[str, str | int | float | bool]

CANCELED = "canceled"
ABANDONED = frozenset({Outcome.CLIENT_LEFT.value, CANCELED})
"""The codes of `Refused` without an answer: the client disconnected, or the server stopped."""


def of_classification(event: Classified) -> Attributes:
    """The tenant and the tier."""
    attributes: Attributes = {
        semconv.ADMISSION_TIER: event.tier,
        semconv.ADMISSION_TENANT: event.tenant,
        semconv.ADMISSION_SOURCE: event.source,
        semconv.ADMISSION_TOKENS_RESERVED: event.tokens,
    }
    if event.clamped_from is not None:
        attributes[semconv.ADMISSION_CLAMPED_FROM] = event.clamped_from
    if event.downgraded_from is not None:
        attributes[semconv.ADMISSION_DOWNGRADED_FROM] = event.downgraded_from
    return attributes


def of_admission(event: Admitted) -> Attributes:
    """That it was admitted, at which level, and which tiers it overtook by which rule."""
    attributes: Attributes = {semconv.ADMISSION_DECISION: "admitted", semconv.ADMISSION_LEVEL: event.level}
    if event.engine_priority is not None:
        attributes[semconv.ADMISSION_ENGINE_PRIORITY] = event.engine_priority
    for tier, rule in event.passed.items():
        attributes[semconv.ADMISSION_PASSED_PREFIX + tier] = rule
    return attributes


def of_refusal(event: Refused, classified: Classified | None) -> Attributes:
    """Why the middleware ended it. A client's mistake (4xx) has a reason, and is no error of this server's.

    That is the HTTP conventions' rule, for `error.type` as for the span's status.
    """
    is_abandoned = event.code in ABANDONED
    attributes: Attributes = {
        semconv.ADMISSION_DECISION: event.code if is_abandoned else "refused",
        semconv.ADMISSION_REASON: event.code,
    }
    if event.status is not None:
        attributes[semconv.HTTP_RESPONSE_STATUS_CODE] = event.status
    if classified is not None and classified.model is not None:
        attributes[semconv.GEN_AI_REQUEST_MODEL] = classified.model  # else `engine` has it
    if is_servers_failure(event):
        attributes[semconv.ERROR_TYPE] = event.code
    return attributes


def of_preemption(event: Preempted) -> Attributes:
    """How often it was preempted."""
    return {semconv.ADMISSION_PREEMPTIONS: event.times}


def is_servers_failure(event: Refused) -> bool:
    """Whether the request ended as it did through the server: an answer of 500 and above, or none."""
    return event.code == CANCELED if event.status is None else event.status >= 500


def of_observed(event: Observed) -> Attributes:
    """The end that enforcing would have given it."""
    attributes: Attributes = {
        semconv.OBSERVED_DECISION: event.verdict.value,
        semconv.OBSERVED_QUEUE_WAIT_S: event.queue_wait_us / 1e6,
        semconv.OBSERVED_STARVATION_S: event.starvation_us / 1e6,
    }
    if event.code is not None:
        attributes[semconv.OBSERVED_REASON] = event.code
    return attributes


def of_waiting(event: Admitted | Refused) -> Attributes:
    """How long it waited and starved; zeros where it did not."""
    attributes: Attributes = {
        semconv.ADMISSION_QUEUE_WAIT_S: event.queue_wait_us / 1e6,
        semconv.ADMISSION_STARVATION_S: event.starvation_us / 1e6,
    }
    if event.served_ahead:
        attributes.update(of_served_ahead(event))
    return attributes


def of_served_ahead(event: Admitted | Refused) -> Attributes:
    """Tokens that went ahead of it, by tier."""
    return {semconv.ADMISSION_SERVED_AHEAD_PREFIX + tier: tokens for tier, tokens in event.served_ahead.items()}


def of_settlement(event: Settled) -> Attributes:
    """How the admitted request ended."""
    attributes: Attributes = {
        semconv.ADMISSION_OUTCOME: event.outcome.value,
        semconv.ADMISSION_TOKENS_USED: event.tokens_used,
    }
    if event.status is not None:
        attributes[semconv.HTTP_RESPONSE_STATUS_CODE] = event.status
    return attributes


def of_engine_request(classified: Classified, provider_name: str | None) -> Attributes:
    """The attributes that the GenAI conventions want when a call to a model starts."""
    attributes: Attributes = {
        semconv.GEN_AI_OPERATION_NAME: semconv.OPERATIONS.get(classified.api, classified.api),
        semconv.GEN_AI_REQUEST_STREAM: classified.stream,
    }
    if provider_name is not None:
        attributes[semconv.GEN_AI_PROVIDER_NAME] = provider_name
    if classified.model is not None:
        attributes[semconv.GEN_AI_REQUEST_MODEL] = classified.model
    if classified.max_output_tokens is not None:
        attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] = classified.max_output_tokens
    return attributes


def of_engine_usage(event: Settled) -> Attributes:
    """The engine's own token counts, where it sent them."""
    attributes: Attributes = {}
    if event.input_tokens is not None:
        attributes[semconv.GEN_AI_USAGE_INPUT_TOKENS] = event.input_tokens
    if event.output_tokens is not None:
        attributes[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] = event.output_tokens
    return attributes


def engine_failure(event: Settled, *, from_status: int) -> tuple[str, str] | None:
    """`error.type` and the status description where the engine failed, or answered `from_status` and above.

    A client's disconnect is no failure.
    """
    if event.outcome is Outcome.CLIENT_LEFT:
        return None
    if event.outcome is Outcome.FAILED:
        error_type = event.error or Outcome.FAILED.value
        return error_type, f"the engine failed: {error_type}"
    if event.status is not None and event.status >= from_status:
        return event.error or str(event.status), f"the engine answered {event.status}"
    return None
