"""The workers' admin documents as one: that of a worker which shares the pool, and a row about each worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sidecar.engines.view import EngineDocument
from sidecar.events import StoreState
from sidecar.figures import Over, readings

Document = Mapping[str, Any]

_COUNTS = ("under_way", "shadows", "aborting", "background")
_ENGINE_COUNTS = [it.path[0] for it in readings(EngineDocument) if it.figure.over is Over.SUM]


def merged_state(rows: Sequence[Document], found: Sequence[Document | None]) -> Document:
    """`GET /state`: the pool as the store has it, what processes count added up, and each worker's own answer.

    A worker that was started again may run by another policy than the others, or not share the pool yet.
    """
    rows = [row if own is None else {**own, **row} for row, own in zip(rows, found, strict=True)]
    answers = [own for own in found if own is not None]
    if not answers:
        return {"workers": rows}
    draining = any(one["draining"] for one in answers)
    best = max(answers, key=lambda one: one.get("pool", {}).get("store", {}).get("state") == StoreState.SHARED.value)
    return {**best, **_added_up(_COUNTS, answers), "draining": draining, "workers": rows}


def merged_engines(answers: Sequence[Document]) -> Document:
    """`GET /engines`: the pool's figures once, those that a process counts added up."""
    by_id: dict[tuple[str, str], list[Document]] = {}
    for row in (row for answer in answers for row in answer["engines"]):
        by_id.setdefault((row["name"], row["id"]), []).append(row)
    return {"engines": [{**rows[0], **_added_up(_ENGINE_COUNTS, rows)} for rows in by_id.values()]}


def _added_up(names: Collection[str], documents: Sequence[Document]) -> Document:
    return {name: _sum([document[name] for document in documents]) for name in names}


def _sum(values: Sequence[Any]) -> Any:
    """Numbers are added, objects member by member; of anything else the first that is there."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    numbers = [value for value in values if isinstance(value, int | float)]
    return sum(numbers) if numbers else values[0]
