"""JSON Schemas of the policy's files: for editors, for the messages of mistakes, and for the reference."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from sidecar.policy import fields as of
from sidecar.policy.fleet import EngineListFile
from sidecar.policy.pool_file import PoolFile
from sidecar.policy.problems import Path
from sidecar.policy.tenant import Tenant

SCHEMAS: dict[str, type[Any]] = {
    "policy.schema.json": PoolFile,
    "tenant.schema.json": Tenant,
    "engines.schema.json": EngineListFile,
}

NAMED = {"tiers": "TierBody", "endpoints": "EndpointBody", "models": "ModelPolicy"}
"""The mappings whose keys are the operator's own names, and what each name may hold. Nothing at all is allowed too."""


class _Schemas(GenerateJsonSchema):
    """Defaults stand in the schema as an operator writes them (`declared`), and not as a record has them."""

    ignored_warning_kinds: set[Any] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # as in the base class


class _Unsorted(_Schemas):
    """Examples keep the order in which they are written."""

    def sort(self, value: Any, parent_key: str | None = None) -> Any:  # noqa: ARG002  # as in the base class
        return value


@cache
def schema_document(kind: Any) -> dict[str, Any]:
    """One file's schema as JSON types. Do not change it."""
    schema = _document(kind, _Schemas, _NOISE | {of.KIND})
    for name, body in NAMED.items():
        if name in schema["properties"] and body in schema["$defs"]:
            entry = {"anyOf": [{"$ref": f"#/$defs/{body}"}, {"type": "null"}]}
            schema["properties"][name] |= {"additionalProperties": entry}
            schema["properties"][name].pop("patternProperties", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@cache
def described(kind: Any) -> dict[str, Any]:
    """As `schema_document`, for people: with the kind of each value in words."""
    return _document(kind, _Unsorted, _NOISE)


def _document(kind: Any, generator: type[GenerateJsonSchema], noise: frozenset[str]) -> dict[str, Any]:
    found = _tidy(TypeAdapter(kind).json_schema(schema_generator=generator), noise)
    return dict(found)


def keys_at(kind: Any, path: Path) -> dict[str, Any]:
    """The keys of the mapping at a path of a file, each with its schema; of the nearest mapping around it."""
    document = described(kind)
    keys = document["properties"]
    for part in path:
        inner = mapping_in(keys.get(str(part), {}))
        keys = keys if inner is None else document["$defs"][inner]["properties"]
    return dict(keys)


def mapping_in(key: dict[str, Any]) -> str | None:
    """The name in `$defs` of the mapping that a key has, also as a choice, or in a list or a mapping; None for none."""
    if "$ref" in key:
        return str(key["$ref"].rpartition("/")[2])
    named = (*key.get("patternProperties", {}).values(), key.get("additionalProperties"))
    below = [*key.get("anyOf", ()), key.get("items"), *named]
    found = (mapping_in(one) for one in below if isinstance(one, dict))
    return next((one for one in found if one is not None), None)


_NOISE = frozenset({"title", "propertyNames"})  # made up from names; and not written by every version of pydantic


def _tidy(node: Any, noise: frozenset[str], *, names: bool = False) -> Any:
    """Without what says nothing, so that every version of pydantic gives the same text.

    `names` is True where the keys are the file's own, so that a key called `title` would stay.
    """
    if isinstance(node, list):
        return [_tidy(item, noise | {"default"}) for item in node]  # an `anyOf`: the default stands outside
    if not isinstance(node, dict):
        return node
    return {
        key: _tidy(value, noise - {"default"}, names=not names and key in {"properties", "$defs"})
        for key, value in node.items()
        if names or key not in noise
    }
