"""Validation across values: in one file, and between the tenants' files.

These look at the raw data and skip what cannot be read, so that they are made, and reported, even when another part of
the same file is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from sidecar.apis import STANDARD_APIS, STANDARD_PATHS, Api, infer_api
from sidecar.engines import NoPriorityEngine
from sidecar.policy import fields as of
from sidecar.policy.declared import Context, written_name
from sidecar.policy.fleet import MOST_ENGINES
from sidecar.policy.problems import Found, Path, Problem, printable, quoted, suggestion, unknown
from sidecar.policy.schema import keys_at
from sidecar.policy.source import Document
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_keys import read_hash
from sidecar.policy.units import Ambiguous, count, share

# -- Validation across the values of `engines` and `models`, and of the engine list.
#
# As in `validate`, these look at the raw data and skip what cannot be read.


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


N = TypeVar("N", int, Fraction)
T = TypeVar("T")


def entries(data: object, *names: str) -> dict[str, object]:
    """The mapping at `names` inside `data`; empty where there is none."""
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def pool_problems(document: Document) -> list[Problem]:
    """The mistakes of a pool's file that only show when several of its values are seen together."""
    tiers = entries(document.data, "tiers")
    found = [
        *_ladder(tiers),
        *_empty_limits(tiers, entries(document.data, "capacity")),
        *_endpoints(entries(document.data, "endpoints")),
        *_two_meanings(document.data or {}),
        *_public(document.data or {}),
        *capacity_mistakes(document.data or {}),
        *fleet_mistakes(document.data or {}),
        *alias_mistakes(document.data or {}),
    ]
    return [document.problem(path, message) for path, message in found]


def reserve_mistake(shares: Iterable[Fraction | None]) -> str | None:
    """The sentence for tiers that reserve more than the pool."""
    promised = sum((reserved for reserved in shares if reserved is not None), start=Fraction(0))
    return f"the reserves add up to {of.percent(promised)} of the pool; promise 100% at most" if promised > 1 else None


def _ladder(tiers: dict[str, object]) -> Found:
    if mistake := reserve_mistake(_read(share, entries(tiers, name).get("reserve")) for name in tiers):
        yield ("tiers",), mistake
    for place, name in enumerate(tiers):
        if place and entries(tiers, name).get("always_first") is True:
            first = next(iter(tiers))
            yield (
                ("tiers", name, "always_first"),
                f"only the first tier, {first}, may be always first; remove this line",
            )
    last = next(reversed(tiers), "")
    if entries(tiers, last, "slo").get("hold") is not None:
        yield (
            ("tiers", last, "slo", "hold"),
            f"no tier is less important than {last}, so nothing can make room for it; remove this line",
        )


def _two_meanings(pool: dict[str, object]) -> Found:
    """A header of the gateway that is also the one in which clients name a tier."""
    of_clients = pool.get("tier_header", "x-priority")
    for name, header in entries(pool, "gateway").items():
        if isinstance(header, str) and isinstance(of_clients, str) and header.lower() == of_clients.lower():
            yield ("gateway", name), f"{quoted(header)} is also the pool's tier_header; write another name"


def _public(pool: dict[str, object]) -> Found:
    """Guarded paths that are also public: a guarded path always needs a key."""
    guarded, public = pool.get("endpoints", STANDARD_PATHS), pool.get("public")
    if isinstance(public, list) and isinstance(guarded, dict | tuple):
        for index, path in enumerate(public):
            if isinstance(path, str) and path in guarded:
                yield ("public", index), f"{quoted(path)} is guarded, and no page; remove it here"


def _empty_limits(tiers: dict[str, object], capacity: dict[str, object]) -> Found:
    """Limits that are above 0% as they are written, and less than one token or one request of this pool."""
    for name in tiers:
        limit = _read(share, entries(tiers, name).get("limit"))
        for kind in ("tokens", "requests"):
            size = _read(count, capacity.get(kind))
            if limit and size and limit * size < 1:
                message = f"{of.percent(limit)} of {size} {kind} is less than one, and admits nothing, ever"
                yield ("tiers", name, "limit"), f"{message}; write a larger share"


def _read(reader: Callable[[object], N], value: object) -> N | None:
    """The value; None where it is absent, or wrong, which is reported where it stands."""
    try:
        return reader(value)
    except ValueError:
        return None


def _endpoints(endpoints: dict[str, object]) -> Found:
    for path in endpoints:
        body = entries(endpoints, path)
        forward_to = body.get("forward_to")
        if body.get("api") is None and infer_api(forward_to if isinstance(forward_to, str) else path) is None:
            known = ", ".join(dict.fromkeys(api.value for api in STANDARD_APIS.values()))
            yield (
                ("endpoints", path),
                f"the path does not say the shape of its requests; write api: with one of {known}, or generic",
            )
        is_generic = body.get("api") == Api.GENERIC.value
        if is_generic and body.get("tokens") is None:
            yield (
                ("endpoints", path),
                "does not say what its requests hold; write tokens: with a number, or {base: 100, per_kilobyte: 250}",
            )
        for name in ("tokens", "cost"):
            if name in body and not is_generic:
                yield (("endpoints", path, name), "is for api: generic alone; write api: generic, or remove this line")


def tenant_problems(pool: Document, documents: Sequence[Document]) -> list[Problem]:
    """Tenants of one name, those without keys that nothing else could name, keys that two tenants, or lines, share."""
    problems: list[Problem] = []
    names: dict[str, str] = {}
    keys: dict[str, Problem] = {}
    for document in documents:
        name = (document.data or {}).get("tenant")
        if isinstance(name, str) and names.setdefault(name, document.file) != document.file:
            other = document.problem(("tenant",), "").place
            problems.append(
                Problem("tenant", f"{quoted(name)} is also the tenant of {names[name]}; write another name", other)
            )
        is_named_otherwise = bool({"jwt", "gateway"} & (pool.data or {}).keys())
        if document.data is not None and "keys" not in document.data and not is_named_otherwise:
            problems.append(
                document.problem(
                    ("keys",), f"missing; write {_example(Tenant, ('keys',))}, or [] where the app names the tenant"
                )
            )
        problems += _repeated_keys(document, keys)
    return problems


def _repeated_keys(document: Document, seen: dict[str, Problem]) -> Iterator[Problem]:
    listed = (document.data or {}).get("keys")
    for place, entry in enumerate(listed if isinstance(listed, list) else []):
        try:
            digest = read_hash(entry.get("hash") if isinstance(entry, dict) else entry)
        except ValueError:
            continue
        here = document.problem(("keys", place), "")
        first = seen.setdefault(digest, here)
        if first is not here:
            message = f"this key is also at {first.place}; give every tenant keys of its own"
            yield document.problem(("keys", place), message)


_KEY = "[key]"  # what pydantic puts at the end of the path when a mapping's key, not its value, is wrong


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter[Any](kind)


def read_record(kind: type[T], data: Mapping[str, object], around: Context) -> tuple[T | None, list[tuple[Path, str]]]:
    """The record of a kind in a file's data, or None and every mistake: *what is wrong; what would be right*."""
    try:
        reader: Any = _reader
        return reader(kind).validate_python(data, context=around), []
    except ValidationError as refused:
        return None, [_sentence(kind, data, error) for error in refused.errors(include_url=False)]


def _sentence(kind: Any, data: Mapping[str, object], error: ErrorDetails) -> tuple[Path, str]:
    path: Path = error["loc"]
    if path and path[-1] == _KEY:
        path = path[:-1]
    if path and path[0] not in data:  # a default that does not fit is reported under the field's name
        path = ({one.name: written_name(one) for one in fields(kind)}.get(str(path[0]), path[0]), *path[1:])
    return path, _message(kind, path, error)


def _message(kind: Any, path: Path, error: ErrorDetails) -> str:
    what = error["type"]
    if what == "value_error":
        return str(error.get("ctx", {})["error"])
    name = str(path[-1]) if path else ""
    if what == "unexpected_keyword_argument":
        return f"no such key; {suggestion(name, list(keys_at(kind, path[:-1])), 'the keys here are')}"
    if what == "missing":
        return f"missing; write {_example(kind, path)}"
    found = error.get("input")
    needed = "a mapping with " + ", ".join(keys_at(kind, path))
    if isinstance(found, (dict, Ambiguous)):
        return f"cannot be understood here; write {needed}"
    stands = "nothing" if found is None else "a list" if isinstance(found, list) else "a single value"
    return f"{stands} where a mapping belongs; write {needed}"


def _example(kind: Any, path: Path) -> str:
    """How a key is written; for one that has no example, the keys in it."""
    name, keys = str(path[-1]), keys_at(kind, path[:-1])
    examples = keys.get(name, {}).get("examples")
    return f"{name}: {flow(examples[0])}" if examples else "a mapping with " + ", ".join(keys)


def flow(value: object) -> str:
    """A value as an operator writes it on one line of YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    return f'"{value}"' if {":", "*"} & set(str(value)) else str(value)
