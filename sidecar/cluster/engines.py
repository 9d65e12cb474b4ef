"""Engines of a pool of several: their rows, and the replicas that see or list them otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sidecar.cluster.document import EngineRow
from sidecar.cluster.report import EngineReport, ReplicaReport
from sidecar.engines.view import Amount, EngineDocument

LASTING_S = 10.0
"""Replicas look discovery up at different moments, and report every two seconds."""
MOST_NAMED = 3
_USABLE = frozenset(("ready", "starting", "capped", "draining"))


def engine_reports(documents: Sequence[EngineDocument] | None) -> list[EngineReport] | None:
    """The engines that this process lists, as it reports them."""
    if documents is None:
        return None
    return [msgspec.convert(it, EngineReport, from_attributes=True) for it in documents if it.for_s is not None]


def engine_rows(documents: Sequence[EngineDocument], others: Iterable[ReplicaReport]) -> list[EngineRow]:
    """A row for each engine that this process knows, with the replicas that see it otherwise."""
    reports = [report for report in others if report.engines is not None]
    return [_row(document, reports) for document in documents]


def _row(document: EngineDocument, reports: Sequence[ReplicaReport]) -> EngineRow:
    theirs = [(report, _latest(document.name, report)) for report in reports]
    same = [seen for _, seen in theirs if seen is not None and seen.id == document.id]
    shown = msgspec.structs.replace(
        document,
        state=same[0].state if document.mounted and same else document.state,
        reason=document.reason or "",
        capacity=document.capacity or Amount(),
        in_flight=document.in_flight + sum(seen.in_flight for seen in same),
    )
    elsewhere = "" if document.url is None else _elsewhere(document, theirs)
    return msgspec.structs.replace(msgspec.convert(shown, EngineRow, from_attributes=True), elsewhere=elsewhere)


def _elsewhere(document: EngineDocument, theirs: Sequence[tuple[ReplicaReport, EngineReport | None]]) -> str:
    """Replicas that can use an engine that this one cannot, or the reverse, or do not list it."""
    by_state: dict[str, list[str]] = {}
    for report, found in theirs:
        if found is None:
            by_state.setdefault("not listed", []).append(_who(report))
        elif (found.state in _USABLE) is not (document.state in _USABLE):
            by_state.setdefault(found.state, []).append(_who(report))
    return "; ".join(f"{state} at {_named(replicas)}" for state, replicas in sorted(by_state.items()))


def _latest(name: str, report: ReplicaReport) -> EngineReport | None:
    """The latest incarnation of an engine in a report."""
    return next((found for found in reversed(report.engines or []) if found.name == name), None)


def _who(report: ReplicaReport) -> str:
    return f"{report.host} {report.replica[:8]}"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"


class EngineLists:
    """The names of the engines that each other replica lists, and since when they differ from this process's.

    Times are seconds on one calendar, `at_s` is now.
    """

    def __init__(self) -> None:
        self._differs: Mapping[str, tuple[str, float]] = {}  # replica -> the sentence, and since when

    def compare(self, reports: Iterable[ReplicaReport], own: ReplicaReport, at_s: float) -> None:
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
