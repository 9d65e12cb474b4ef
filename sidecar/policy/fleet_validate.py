"""Validation across the values of `engines` and `models`, and of the engine list.

As in `validate`, these look at the raw data and skip what cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from sidecar.engines import NoPriorityEngine
from sidecar.policy import fields as of
from sidecar.policy.fleet import MOST_ENGINES
from sidecar.policy.problems import Found, Path, printable, quoted, unknown


def capacity_mistakes(data: Mapping[str, object]) -> Found:
    """The pool's capacity, in the one place where it belongs."""
    capacity, engines = data.get("capacity"), data.get("engines")
    if capacity is None and engines is None:
        yield ("capacity",), "missing; write capacity: {tokens: 400k, requests: 160}"
    elif capacity is not None and engines is not None:
        yield (
            ("capacity",),
            "the pool holds what its engines hold together; write this into engines, where it counts for each, "
            "and remove it here",
        )


def fleet_mistakes(data: Mapping[str, object]) -> Found:
    """The mistakes of a pool's `engines` and `models`."""
    engines, models = data.get("engines"), data.get("models")
    fleet = engines if isinstance(engines, dict) else {}
    listed = fleet.get("static")
    yield from engine_mistakes(listed, ("engines", "static"))
    capacities = [(("capacity",), data.get("capacity")), (("engines", "capacity"), _common_capacity(fleet))]
    yield from _read_of_none(data.get("engine"), [*capacities, *_capacities(listed, ("engines", "static"))])
    if fleet.get("mounted") is True:
        yield from _mounted_problems(fleet, models)
        return
    if not isinstance(models, dict):
        if isinstance(listed, list) and models is None:
            yield from _too_many(len(listed), ("engines", "static"))
        return
    if engines is None:
        yield ("models",), "each model has engines of its own, and the policy names none; write engines, or remove this"
        return
    yield from _check_engines(models, _names(listed), by_dns="dns" in fleet)
    yield from _check_names(models)


_NOT_MOUNTED = {
    "affinity": "chooses among engines, and a process sends its requests to its own engine; remove it",
    "health": "probes an engine by its port, and a mounted engine lives and ends with its process; remove it",
    "replay": "sends a request to another engine, and a process sends its requests to its own engine; remove it",
}
"""Keys of `engines` that say nothing of a mounted engine."""


def _mounted_problems(fleet: Mapping[str, object], models: object) -> Found:
    """Keys that only engines behind the proxy have."""
    for name, why in _NOT_MOUNTED.items():
        if name in fleet:
            yield ("engines", name), why
    if models is not None:
        yield (
            ("models",),
            "a mounted app serves all its models from one pool; remove this, or run `sidecar serve` with the engines "
            "listed under static",
        )


def engine_mistakes(listed: object, path: Path) -> Found:
    """Engines of one name or one address, and keys that no engine has of its own. `path` is where they are listed."""
    names: dict[object, int] = {}
    urls: dict[tuple[str, str | None, int, str], str] = {}
    for place, entry in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(entry, dict):
            continue
        name, url = entry.get("name"), _url(entry.get("url"))
        if isinstance(name, str) and names.setdefault(name, place) != place:
            yield (*path, place, "name"), f"{quoted(name)} is the name of another engine; write another name"
        if url is not None and urls.setdefault(url, str(name)) != str(name):
            other = printable(urls[url])
            shown = quoted(str(entry["url"]))
            yield (*path, place, "url"), f"{shown} is engine {other}, which would count twice; remove one of them"
        if isinstance(entry.get("capacity"), dict) and "learn" in entry["capacity"]:
            yield (
                (*path, place, "capacity", "learn"),
                "a pool learns in one way, whichever engine serves a request; write it into the policy's "
                "engines: {capacity: ...}, which counts for all, and remove it here",
            )


def list_mistakes(data: Mapping[str, object], engine: str, *, in_one_pool: bool) -> Found:
    """The mistakes of an engine list. `engine` is the name of the policy's engine."""
    listed, path = data.get("engines"), ("engines",)
    yield from engine_mistakes(listed, path)
    yield from _read_of_none(engine, _capacities(listed, path))
    if in_one_pool and isinstance(listed, list):
        yield from _too_many(len(listed), path)


_PORTS = {"http": 80, "https": 443}


def _url(value: object) -> tuple[str, str | None, int, str] | None:
    """An address as it is compared."""
    try:
        parts = urlsplit(of.engine_url(value))
    except ValueError:
        return None
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme], parts.path


def _common_capacity(fleet: Mapping[str, object]) -> object:
    """The capacity of the engines that have none of their own; None where each has one."""
    listed = fleet.get("static")
    is_needed = not isinstance(listed, list) or any(
        isinstance(entry, dict) and "capacity" not in entry for entry in listed
    )
    return fleet.get("capacity", {"from": "engine"}) if fleet and is_needed else None


def _capacities(listed: object, path: Path) -> Iterator[tuple[Path, object]]:
    for place, entry in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(entry, dict):
            yield (*path, place, "capacity"), entry.get("capacity")


def _read_of_none(engine: object, capacities: Iterable[tuple[Path, object]]) -> Found:
    """Capacities that are to be read from an engine that reports none."""
    for path, capacity in capacities if engine == NoPriorityEngine.name else ():
        if isinstance(capacity, dict) and "from" in capacity:
            yield path, "the engine none reports nothing; write tokens, requests or both"


def _too_many(engines: int, path: Path) -> Found:
    if engines > MOST_ENGINES:
        yield path, f"{engines} engines in one pool; list {MOST_ENGINES} at most"


def _names(listed: object) -> list[str] | None:
    """The names of the static engines; None where they are not listed here."""
    if not isinstance(listed, list):
        return None
    return [entry["name"] for entry in listed if isinstance(entry, dict) and isinstance(entry.get("name"), str)]


def _check_engines(models: Mapping[str, object], names: Sequence[str] | None, *, by_dns: bool) -> Found:
    """Every model has engines that there are, and no engine has two models."""
    used: dict[str, str] = {}
    for model, body in models.items():
        listed = body.get("engines") if isinstance(body, dict) else None
        path: Path = ("models", model, "engines")
        if listed is None:
            if len(models) > 1:
                yield (path, "missing: where there are several models, each names its engines; write engines: [a, b]")
            elif names is not None:
                yield from _too_many(len(names), path)
            continue
        if by_dns:
            yield path, "engines found by dns have no names; leave this out, or list them under static or in a file"
            continue
        yield from _too_many(len(listed) if isinstance(listed, list) else 0, path)
        for place, engine in enumerate(listed if isinstance(listed, list) else []):
            if not isinstance(engine, str):
                continue
            if names and engine not in names:
                yield (*path, place), unknown("engine", engine, names)
            elif used.setdefault(engine, model) != model:
                yield (
                    (*path, place),
                    f"engine {printable(engine)} serves {printable(used[engine])} already, and an engine has one pool; "
                    f"give each model engines of its own, or make {printable(model)} an alias",
                )


def alias_mistakes(data: Mapping[str, object]) -> Found:
    """Aliases of the pool that hide a model, or stand for no name that an engine knows."""
    aliases, models = data.get("aliases"), data.get("models")
    if not isinstance(aliases, dict):
        return
    known: dict[str, str] = {}
    for model, body in models.items() if isinstance(models, dict) else ():
        others = body.get("aliases") if isinstance(body, dict) else None
        known |= dict.fromkeys([model, *(one for one in others or () if isinstance(one, str))], model)
    for alias, body in aliases.items():
        name, path = body.get("as") if isinstance(body, dict) else None, ("aliases", alias)
        if alias in known:
            yield path, f"the engines of {printable(known[alias])} know this name itself; remove one of the two"
        if not isinstance(name, str):
            continue
        if name in aliases:
            yield (*path, "as"), f"{quoted(name)} is an alias itself; write the name that the engine knows"
        elif known and name not in known:
            yield (*path, "as"), unknown("model", name, list(known))


def _check_names(models: Mapping[str, object]) -> Found:
    """No name stands for two models."""
    seen = {name: name for name in models}
    for model, body in models.items():
        aliases = body.get("aliases") if isinstance(body, dict) else None
        for place, alias in enumerate(aliases if isinstance(aliases, list) else []):
            if not isinstance(alias, str):
                continue
            path: Path = ("models", model, "aliases", place)
            if alias in models:
                yield path, f"{quoted(alias)} is the name of a model itself; remove it"
            elif seen.setdefault(alias, model) != model:
                yield path, f"{quoted(alias)} is an alias of {printable(seen[alias])}, too; keep one of them"
