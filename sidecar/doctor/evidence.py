"""The figures of a probe as clauses for people."""

from __future__ import annotations

import math

from sidecar.doctor.burst import Burst
from sidecar.doctor.judging import Effect, Judgment
from sidecar.doctor.probing import Probed
from sidecar.doctor.survey import Survey

IN_ORDER = 0.9
"""From this correlation with arrival on, requests are said to be served in the order in which they came."""


def order(burst: Burst, control: Burst | None) -> str:
    """In which order a burst was served."""
    judgment = burst.judgment
    text = f"first token after {_medians(judgment)} s from the most to the least important (medians of "
    text += f"{judgment.waited} that waited), rank correlation {_correlation(judgment)}"
    if control is not None and control.judgment.correlation is not None:
        text += f"; at equal priorities {control.judgment.correlation.value:+.2f}"
    arrival = judgment.by_arrival
    if judgment.effect is Effect.NONE and arrival is not None and arrival.value >= IN_ORDER:
        text += f"; served in the order of arrival ({arrival.value:+.2f})"
    return text


def waits(burst: Burst, probed: Probed) -> str:
    """How long requests waited, and for what."""
    alone_s, wait_s = probed.alone.ttft_s, burst.median_wait_s
    text = f"{burst.judgment.waited} of {len(burst.seen)} requests waited"
    if wait_s is not None and alone_s is not None:
        text += f", {_seconds(wait_s)} s to the first token (median) against {_seconds(alone_s)} s alone"
    text += f"; {burst.at_once} ran at once"
    if probed.is_door:
        return text + f", {burst.held_at_door} were held at the sidecar"
    return text + (f", up to {burst.waiting_inside} waited in the engine" if burst.waiting_inside else "")


def too_little(probed: Probed) -> str:
    """Why a burst says nothing."""
    tried = ", ".join(str(burst.plan.requests) for burst in probed.mixed)
    burst = probed.mixed[-1]
    if burst.is_refused:
        return f"{len(burst.refused)} of {len(burst.seen)} requests were refused: {burst.refused[0].error}"
    if burst.is_cut:
        served = f"{burst.judgment.served} of the {burst.judgment.waited} that waited"
        return f"not enough time: {served} were served within {burst.allowed_s:.0f} s"
    waited = f"{burst.judgment.waited} waited and {burst.at_once} ran at once"
    return f"not enough load: of {tried} requests at once, {waited}"


def more(survey: Survey, burst: Burst) -> str:
    """How to make it say something."""
    if burst.is_refused:
        return "run this again when the engine is less busy, or with a smaller burst (--requests)"
    if burst.is_cut:
        return "run this with a longer --timeout, such as 300s"
    least = max(2 * burst.plan.requests, (survey.gauges.max_running or 0) + 40)
    return f"run this while the engine is busy, or with --requests {least} --timeout 120s"


def _medians(judgment: Judgment) -> str:
    return " / ".join("none" if median is None else _seconds(median) for median in judgment.medians_s)


def _correlation(judgment: Judgment) -> str:
    found = judgment.correlation
    if found is None:
        return "none to speak of"
    return f"{found.value:+.2f} (95%: {found.low:+.2f} to {found.high:+.2f})"


def _seconds(seconds: float) -> str:
    if math.isinf(seconds):
        return "more"  # than the burst was given
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"
