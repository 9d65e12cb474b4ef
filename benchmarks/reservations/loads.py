"""Loads that are not a trace as it is: lengths that jump, max_tokens that says nothing, answers that do not stream."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reservations.traces import Asked

HUGE = 32_768
"""Tokens: what some clients send always, whatever they ask."""
JUMP = 10


def absent(requests: Sequence[Asked]) -> list[Asked]:
    """No client says a maximum."""
    return [one._replace(max_tokens=None) for one in requests]


def huge(requests: Sequence[Asked]) -> list[Asked]:
    """Every client asks for the same huge maximum."""
    return [one._replace(max_tokens=HUGE) for one in requests]


def unstreamed(requests: Sequence[Asked]) -> list[Asked]:
    """Every second answer does not stream: its lease keeps its size."""
    return [one._replace(streams=number % 2 == 0) for number, one in enumerate(requests)]


def jump(requests: Sequence[Asked]) -> list[Asked]:
    """Two tenants take turns. The answers of `jumps` have a tenth of the trace's length until the middle of the run."""
    half = len(requests) // 2
    found = []
    for number, one in enumerate(requests):
        if number % 2:
            found.append(one._replace(tenant="steady"))
        else:
            output = max(1, one.output // JUMP) if number < half else one.output
            found.append(one._replace(output=output, tenant="jumps"))
    return found
