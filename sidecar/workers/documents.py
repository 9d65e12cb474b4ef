"""The workers' admin documents, merged: what is the pool's is shown once, and what is a process's own is added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]

_COUNTS = ("under_way", "shadows", "aborting", "background")
_OF_A_PROCESS = ("lease_sizes", "gain")
"""They describe one process's leases and requests, so each worker's are shown with it."""
_ENGINE_COUNTS = ("in_flight", "ejections", "replays", "prompt_tokens", "predicted_tokens", "measured_tokens")


def merged_state(found: Sequence[tuple[Document, Document]]) -> Document:
    """`GET /state`. `found` has a row about each worker, and its own answer, which is empty where it gave none."""
    rows = [{**row, **_own(own)} for row, own in found]
    answers = [own for _, own in found if own]
    if not answers:
        return {"workers": rows}
    merged = {**_without_process(_best(answers)), **{key: _sum([one[key] for one in answers]) for key in _COUNTS}}
    merged["draining"] = any(one["draining"] for one in answers)
    if "pool" in merged:
        merged["pool"] = merged_pool([one["pool"] for one in answers])
    if "models" in merged:
        merged["models"] = {name: _merged_model(name, model, answers) for name, model in merged["models"].items()}
    return {**merged, "workers": rows}


def merged_pool(pools: Sequence[Document]) -> Document:
    """A pool in a store: as one that the store decides for shows it. While it is lost for all, the sum of their parts.

    What tiers have waiting and the store's `own` counts are those of all workers. Without a store (`mode: pass`) it is
    the sum of their pools.
    """
    if "store" not in pools[0]:
        return dict(_sum(pools))
    best = max(pools, key=_is_shared)
    summed = _sum([_without(pool, "store") for pool in pools])
    merged = {**best, "tiers": _with_queues(best, summed)} if _is_shared(best) else {**summed}
    return {**merged, "store": {**best["store"], "own": _sum([pool["store"]["own"] for pool in pools])}}


def _with_queues(pool: Document, summed: Document) -> list[Document]:
    """Its tiers, with what all workers have waiting."""
    return [{**tier, "queued": of_all["queued"]} for tier, of_all in zip(pool["tiers"], summed["tiers"], strict=True)]


def merged_engines(answers: Sequence[Document]) -> Document:
    """`GET /engines`: the pool's figures once, those that a process counts added up."""
    by_id: dict[tuple[str, str], list[Document]] = {}
    for row in (row for answer in answers for row in answer["engines"]):
        by_id.setdefault((row["name"], row["id"]), []).append(row)
    return {"engines": [_merged_engine(rows) for rows in by_id.values()]}


def _merged_engine(rows: Sequence[Document]) -> Document:
    return {**rows[0], **{key: _sum([row[key] for row in rows]) for key in _ENGINE_COUNTS}}


def _merged_model(name: str, model: Document, answers: Sequence[Document]) -> Document:
    return {**_without(model, *_OF_A_PROCESS), "pool": merged_pool([one["models"][name]["pool"] for one in answers])}


def _best(answers: Sequence[Document]) -> Document:
    """An answer of a worker whose store decides, if there is one."""
    return max(answers, key=lambda one: "pool" in one and _is_shared(one["pool"]))


def _is_shared(pool: Document) -> bool:
    return bool(pool.get("store", {}).get("state") == "shared")


def _own(answer: Document) -> Document:
    """What a worker's row has of its own answer."""
    names = ("under_way", "draining", *_OF_A_PROCESS)
    own = {name: answer[name] for name in names if name in answer}
    if "store" in answer.get("pool", ()):
        own["store"] = answer["pool"]["store"]
    if "models" in answer:
        models = answer["models"].items()
        own["models"] = {name: {key: model[key] for key in _OF_A_PROCESS if key in model} for name, model in models}
    return own


def _without_process(document: Document) -> dict[str, Any]:
    return _without(document, *_OF_A_PROCESS)


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
