"""The workers' admin documents, merged: what is the pool's is shown once, and what is a process's own is added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]

_COUNTS = ("under_way", "shadows", "aborting", "background")
_OF_A_PROCESS = ("lease_sizes", "gain")
"""They describe one process's leases and requests, so each worker's are shown with it."""
_ENGINE_COUNTS = ("in_flight", "ejections", "replays", "prompt_tokens", "predicted_tokens", "measured_tokens")


def merged_state(rows: Sequence[Document], found: Sequence[Document | None]) -> Document:
    """`GET /state`. There is a row about each worker, and its own answer where it gave one."""
    rows = [row if own is None else {**row, **_own(own)} for row, own in zip(rows, found, strict=True)]
    answers = [own for own in found if own is not None]
    if not answers:
        return {"workers": rows}
    best = max(answers, key=lambda one: _rank(one.get("pool", {})))
    merged = {**_without(best, *_OF_A_PROCESS), **{key: _sum([one[key] for one in answers]) for key in _COUNTS}}
    merged["draining"] = any(one["draining"] for one in answers)
    if "pool" in best:
        merged["pool"] = merged_pool([one["pool"] for one in answers if "pool" in one])
    if "models" in best:
        merged["models"] = {name: _merged_model(name, answers) for name in best["models"]}
    return {**merged, "workers": rows}


def merged_pool(pools: Sequence[Document]) -> Document:
    """A pool in a store: as one that the store decides for shows it. While it is lost for all, the sum of their parts.

    What tiers have waiting and the store's `own` counts are those of all workers. Without a store (`mode: pass`) it is
    the sum of their pools. A worker that was started again may run by another policy than the others, and have other
    tiers: it is left out.
    """
    best = max(pools, key=_rank)
    alike = [pool for pool in pools if _tiers(pool) == _tiers(best) and ("store" in pool) == ("store" in best)]
    summed = _sum([_without(pool, "store") for pool in alike])
    if "store" not in best:
        return dict(summed)
    shown = {**best} if _is_shared(best) else {**summed}
    waiting = [tier["queued"] for tier in summed["tiers"]]
    shown["tiers"] = [{**tier, "queued": queued} for tier, queued in zip(shown["tiers"], waiting, strict=True)]
    return {**shown, "store": {**best["store"], "own": _sum([pool["store"]["own"] for pool in alike])}}


def _merged_model(name: str, answers: Sequence[Document]) -> Document:
    models = [one["models"][name] for one in answers if name in one.get("models", ())]
    return {**_without(models[0], *_OF_A_PROCESS), "pool": merged_pool([model["pool"] for model in models])}


def merged_engines(answers: Sequence[Document]) -> Document:
    """`GET /engines`: the pool's figures once, those that a process counts added up."""
    by_id: dict[tuple[str, str], list[Document]] = {}
    for row in (row for answer in answers for row in answer["engines"]):
        by_id.setdefault((row["name"], row["id"]), []).append(row)
    sums = [{key: _sum([row[key] for row in rows]) for key in _ENGINE_COUNTS} for rows in by_id.values()]
    return {"engines": [{**rows[0], **summed} for rows, summed in zip(by_id.values(), sums, strict=True)]}


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


def _sum(values: Sequence[Any]) -> Any:
    """Numbers are added, objects and rows member by member; of anything else the first."""
    first, numbers = values[0], [value for value in values if isinstance(value, int | float)]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, list) and all(len(value) == len(first) for value in values):
        return [_sum(list(members)) for members in zip(*values, strict=True)]
    return sum(numbers) if numbers and not isinstance(first, bool | str) else first
