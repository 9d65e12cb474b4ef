"""JSON Schemas of the two files, for editors. `python -m sidecar.policy.schema` writes them into `policies/`.

An editor that speaks the YAML language server completes keys and underlines mistakes with them; what only `sidecar
check` can know (the names of tiers, sums, other files) is left to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path as FilePath
from typing import Any

from sidecar.policy.models import FileModel, PoolFile, TenantFile

SCHEMAS: dict[str, type[FileModel]] = {"policy.schema.json": PoolFile, "tenant.schema.json": TenantFile}

NAMED = {"tiers": "TierBody", "endpoints": "EndpointBody"}
"""The mappings whose keys are the operator's own names, and what each name may hold. Nothing at all is allowed too."""


def schema_text(model: type[FileModel]) -> str:
    """One file's schema as it is written to disk."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_tidied(model.model_json_schema())}
    for name, body in NAMED.items():
        if name in schema["properties"]:
            schema["properties"][name] |= _named(body)
            schema["properties"][name].pop("patternProperties", None)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _named(body: str) -> dict[str, Any]:
    return {"additionalProperties": {"anyOf": [{"$ref": f"#/$defs/{body}"}, {"type": "null"}]}}


_NOISE = frozenset({"title", "propertyNames"})  # made up from names; and not written by every version of pydantic


def _tidied(node: Any, *, names: bool = False, drop: frozenset[str] = _NOISE) -> Any:
    """Without what says nothing, so that every version of pydantic gives the same text.

    `names` is True where the keys are the file's own, so that a key called `title` would stay.
    """
    if isinstance(node, list):
        return [_tidied(item, drop=_NOISE | {"default"}) for item in node]  # an `anyOf`: the default stands outside
    if not isinstance(node, dict):
        return node
    return {
        key: _tidied(value, names=not names and key in {"properties", "$defs"})
        for key, value in node.items()
        if names or key not in drop
    }


def write(folder: FilePath) -> None:
    """Writes both schemas into `folder`."""
    for name, model in SCHEMAS.items():
        (folder / name).write_text(schema_text(model), encoding="utf-8")


if __name__ == "__main__":
    write(FilePath(sys.argv[1] if len(sys.argv) > 1 else "policies"))
