"""Engines of a pool of several as all its replicas see them: their rows, and replicas whose engine lists differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sidecar.cluster.document import Amount, EngineRow
from sidecar.cluster.merge import ReceivedReport
from sidecar.cluster.report import EngineReport, ReplicaReport
from sidecar.engines.view import EngineAmount, EngineDocument

LASTING_S = 10.0
"""Replicas look discovery up at different moments, and report every two seconds."""
MOST_NAMED = 3
_USABLE = frozenset(("ready", "starting", "capped", "draining"))


def engine_rows(documents: Sequence[EngineDocument], others: Iterable[ReceivedReport]) -> list[EngineRow]:
    """A row for each engine that this process knows, with what the other replicas have reported of it."""
    reports = [one.report for one in others if one.report.engines is not None]
    return [_row(document, reports) for document in documents]


def _row(document: EngineDocument, reports: Sequence[ReplicaReport]) -> EngineRow:
    theirs = [(report, _of(document.name, report)) for report in reports]
    same = [found for _, found in theirs if found is not None and found.id == document.id]
    hit_rate, is_measured = _hit_rate(document, same)
    return EngineRow(
        name=document.name,
        id=document.id,
        state=same[0].state if document.mounted and same else document.state,
        reason=document.reason or "",
        capacity=Amount() if document.capacity is None else _amount(document.capacity),
        held=_amount(document.held),
        unprefilled_tokens=document.unprefilled_tokens,
        claims=document.claims,
        in_flight=document.in_flight + sum(found.in_flight for found in same),
        hit_rate=hit_rate,
        is_measured=is_measured,
        elsewhere="" if document.url is None else _elsewhere(document, theirs),
    )


def _hit_rate(document: EngineDocument, others: Sequence[EngineReport]) -> tuple[float | None, bool]:
    """The rate over all replicas, by tokens; of measured ones alone where there are any."""
    reported: list[EngineDocument | EngineReport] = [document, *others]
    found = [(one.recent_tokens, one.hit_rate, one.is_measured) for one in reported if one.hit_rate is not None]
    is_measured = any(measured for _, _, measured in found)
    counted = [(tokens, rate) for tokens, rate, measured in found if measured or not is_measured]
    whole = sum(tokens for tokens, _ in counted)
    if not whole:
        return None, is_measured
    return round(sum(tokens * rate for tokens, rate in counted) / whole, 4), is_measured


def _elsewhere(document: EngineDocument, theirs: Sequence[tuple[ReplicaReport, EngineReport | None]]) -> str:
    """Replicas that can use an engine that this one cannot, or the reverse, or do not list it."""
    by_state: dict[str, list[str]] = {}
    for report, found in theirs:
        if found is None:
            by_state.setdefault("not listed", []).append(_who(report))
        elif (found.state in _USABLE) is not (document.state in _USABLE):
            by_state.setdefault(found.state, []).append(_who(report))
    return "; ".join(f"{state} at {_named(replicas)}" for state, replicas in sorted(by_state.items()))


def _of(name: str, report: ReplicaReport) -> EngineReport | None:
    """The latest incarnation of an engine in a report."""
    return next((found for found in reversed(report.engines or []) if found.name == name), None)


def _who(report: ReplicaReport) -> str:
    return f"{report.host} {report.replica[:8]}"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"


def _amount(amount: EngineAmount) -> Amount:
    return Amount(amount.tokens, amount.requests)


class EngineLists:
    """The names of the engines that each other replica lists, and since when they differ from this process's.

    Times are seconds on one calendar, `at_s` is now.
    """

    def __init__(self) -> None:
        self._differs: Mapping[str, tuple[str, float]] = {}  # replica -> the sentence, and since when

    def hear(self, reports: Iterable[ReplicaReport], own: ReplicaReport, at_s: float) -> None:
        """The other replicas that are there, as they are now."""
        differs: dict[str, tuple[str, float]] = {}
        mine = _names(own)
        for report in reports:
            theirs = _names(report)
            if mine is not None and theirs is not None and mine != theirs:
                sentence, before = _difference(report, mine, theirs), self._differs.get(report.replica)
                is_as_before = before is not None and before[0] == sentence
                differs[report.replica] = before if before and is_as_before else (sentence, at_s)
        self._differs = differs

    def notices(self, at_s: float) -> list[str]:
        """Differences that last, in a sentence for each replica."""
        lasting = [(sentence, at_s - since_s) for sentence, since_s in self._differs.values()]
        return [f"{sentence}, for {for_s:.0f} s" for sentence, for_s in lasting if for_s >= LASTING_S]


def _names(report: ReplicaReport) -> frozenset[str] | None:
    if report.engines is None or any(engine.mounted for engine in report.engines):
        return None  # each process has an engine of its own
    return frozenset(engine.name for engine in report.engines if engine.state != "gone")


def _difference(report: ReplicaReport, mine: frozenset[str], theirs: frozenset[str]) -> str:
    parts = [
        f"{verb} {_named(sorted(names))}"
        for verb, names in (("lacks", mine - theirs), ("has also", theirs - mine))
        if names
    ]
    return f"the engine list of replica {report.replica[:8]} on {report.host} {' and '.join(parts)}"
