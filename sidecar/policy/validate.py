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

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from sidecar.apis import STANDARD_APIS, STANDARD_PATHS, Api, infer_api
from sidecar.policy import fields as of
from sidecar.policy.declared import Context, written_name
from sidecar.policy.fleet_validate import alias_mistakes, capacity_mistakes, fleet_mistakes
from sidecar.policy.problems import Found, Path, Problem, quoted, suggestion
from sidecar.policy.schema import keys_at
from sidecar.policy.source import Document
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_keys import read_hash
from sidecar.policy.units import Ambiguous, count, share

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
