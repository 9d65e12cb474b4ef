"""The workers' admin documents, merged: what is the pool's is shown once, and what is a process's own is added up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sidecar.engines.view import EngineDocument
from sidecar.figures import Over, readings

Document = Mapping[str, Any]

_COUNTS = ("under_way", "shadows", "aborting", "background")
_OF_A_PROCESS = ("lease_sizes", "gain")
"""They describe one process's leases and requests, so each worker's are shown with it."""
_ENGINE_COUNTS = [it.path[0] for it in readings(EngineDocument) if it.figure.over is Over.SUM]


def merged_state(rows: Sequence[Document], found: Sequence[Document | None]) -> Document:
    """`GET /state`. There is a row about each worker, and its own answer where it gave one."""
    rows = [row if own is None else {**row, **_own(own)} for row, own in zip(rows, found, strict=True)]
    answers = [own for own in found if own is not None]
    if not answers:
        return {"workers": rows}
    draining = any(one["draining"] for one in answers)
    return {**_merged_pools(answers), **_added_up(_COUNTS, answers), "draining": draining, "workers": rows}


def merged_engines(answers: Sequence[Document]) -> Document:
    """`GET /engines`: the pool's figures once, those that a process counts added up."""
    by_id: dict[tuple[str, str], list[Document]] = {}
    for row in (row for answer in answers for row in answer["engines"]):
        by_id.setdefault((row["name"], row["id"]), []).append(row)
    return {"engines": [{**rows[0], **_added_up(_ENGINE_COUNTS, rows)} for rows in by_id.values()]}


def _merged_pools(states: Sequence[Document]) -> dict[str, Any]:
    """States of processes, or of one model in each, by the one that says most; their pools are merged."""
    best = max(states, key=lambda one: _rank(one.get("pool", {})))
    merged = _without(best, *_OF_A_PROCESS)
    if "pool" in best:
        merged["pool"] = merged_pool([one["pool"] for one in states if "pool" in one])
    if "models" in best:
        by_name = [one.get("models", {}) for one in states]
        merged["models"] = {name: _merged_pools([it[name] for it in by_name if name in it]) for name in best["models"]}
    return merged


def merged_pool(pools: Sequence[Document]) -> Document:
    """A pool in a store: as one that the store decides for shows it. While it is lost for all, the sum of their parts.

    What tiers have waiting and the store's `own` counts are those of all workers. Without a store (`mode: pass`) it is
    the sum of their pools. A worker that was started again may run by another policy than the others, and have other
    tiers: it is left out.
    """
    best = max(pools, key=_rank)
    alike = [pool for pool in pools if _tiers(pool) == _tiers(best) and ("store" in pool) == ("store" in best)]
    summed: Document = _sum([_without(pool, "store") for pool in alike])
    for tier, tiers_alike in zip(summed["tiers"], zip(*(pool["tiers"] for pool in alike), strict=True), strict=True):
        if "guard" in tier:
            tier["guard"] = _merged_guard([one["guard"] for one in tiers_alike if "guard" in one])
    if "store" not in best:
        return summed
    shown = best if _is_shared(best) else summed
    tiers = [{**tier, **_of_all(of_all)} for tier, of_all in zip(shown["tiers"], summed["tiers"], strict=True)]
    own = _sum([pool["store"]["own"] for pool in alike])
    return {**shown, "tiers": tiers, "store": {**best["store"], "own": own}}


def _of_all(tier: Document) -> Document:
    return {name: tier[name] for name in ("queued", "guard") if name in tier}


def _merged_guard(guards: Sequence[Document]) -> Document:
    """All workers report the same shares; each counts its own requests, and notices what it decides itself."""
    is_in_vain = any(guard["is_in_vain"] for guard in guards)
    return {**guards[0], "requests": _sum([guard["requests"] for guard in guards]), "is_in_vain": is_in_vain}


def _rank(pool: Document) -> tuple[bool, bool]:
    """How much a pool's document says of what all workers share."""
    return _is_shared(pool), "store" in pool


def _is_shared(pool: Document) -> bool:
    return bool(pool.get("store", {}).get("state") == "shared")


def _tiers(pool: Document) -> Sequence[str]:
    return [tier["tier"] for tier in pool["tiers"]]


def _own(answer: Document) -> Document:
    """Fields of a worker's own answer that its row has."""
    own = {name: answer[name] for name in ("under_way", "draining", *_OF_A_PROCESS) if name in answer}
    if "store" in answer.get("pool", ()):
        own["store"] = answer["pool"]["store"]
    if "models" in answer:
        models = answer["models"].items()
        own["models"] = {name: {key: model[key] for key in _OF_A_PROCESS if key in model} for name, model in models}
    return own


def _without(document: Document, *names: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in names}


def _added_up(names: Collection[str], documents: Sequence[Document]) -> Document:
    return {name: _sum([document[name] for document in documents]) for name in names}


def _sum(values: Sequence[Any]) -> Any:
    """Numbers are added, objects and rows member by member; of anything else the first."""
    first, numbers = values[0], [value for value in values if isinstance(value, int | float)]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, list) and all(len(value) == len(first) for value in values):
        return [_sum(list(members)) for members in zip(*values, strict=True)]
    return sum(numbers) if numbers and not isinstance(first, bool | str) else first
