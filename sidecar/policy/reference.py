"""Generated reference of the policy files. `python -m sidecar.policy.reference` writes docs/policy.md.

The purpose of a key, the form of its value and its default are written in `schema` and `fields` only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sidecar.policy.file_model import FileModel
from sidecar.policy.fleet_schema import EngineListFile
from sidecar.policy.schema import PoolFile, TenantFile
from sidecar.policy.validate import keys_of

PLACES: Mapping[type[FileModel], str] = {
    PoolFile: "The pool's file",
    TenantFile: "A tenant's file",
    EngineListFile: "The engine list",
}

_HEAD = """\
# The policy's files, key by key

Written by `python -m sidecar.policy.reference` from the models that read them; a test keeps it so. `policies/` has the
first two with comments, and JSON Schemas of all three for editors. `sidecar check` says what is wrong with a policy,
and what will surprise.

Shares are written `20%`, durations `500ms`, `2s`, `5m`, `1h`, counts `160`, `10k`, `2M`, sizes `8MiB`.
"""


_Path = tuple[str, ...]


def reference_text() -> str:
    """The whole page."""
    parts, paths = [_HEAD], dict[type[BaseModel], _Path]()
    for model in PLACES:
        _find(model, (), paths)
    for model, title in PLACES.items():
        parts += _sections(model, title, (), paths)
    return "\n".join(parts)


def write(file: FilePath) -> None:
    """Writes the page."""
    file.write_text(reference_text(), encoding="utf-8")


def _find(model: type[BaseModel], path: _Path, paths: dict[type[BaseModel], _Path]) -> None:
    """Notes the path of each model's section: that of the first place where it stands."""
    paths.setdefault(model, path)
    for inner, below in _inside(model, path):
        if inner not in paths:
            _find(inner, below, paths)


def _inside(model: type[BaseModel], path: _Path) -> Iterator[tuple[type[BaseModel], _Path]]:
    """The mappings inside a model, and their paths."""
    for name, field in keys_of(model).items():
        inner, is_named = _inner(field.annotation)
        if inner is not None:
            yield inner, (*path, name, "NAME") if is_named else (*path, name)


def _sections(model: type[BaseModel], title: str, path: _Path, paths: Mapping[type[BaseModel], _Path]) -> Iterator[str]:
    """The model's own section, then those of the mappings inside it."""
    yield f"## {title}\n" if not path else f"### `{'.'.join(path)}`\n"
    yield f"{_paragraphs(model.__doc__ or '')}\n"
    yield from _table(model, paths)
    yield ""
    for inner, below in _inside(model, path):
        if paths[inner] == below:
            yield from _sections(inner, title, below, paths)


def _table(model: type[BaseModel], paths: Mapping[type[BaseModel], _Path]) -> Iterator[str]:
    yield "| key | value | default | what it is for |"
    yield "|---|---|---|---|"
    for name, field in keys_of(model).items():
        yield f"| `{name}` | {_value(field, paths)} | {_default(field)} | {_cell(field.description or '')} |"


def _value(field: FieldInfo, paths: Mapping[type[BaseModel], _Path]) -> str:
    """How a value is written: its kind, and an example."""
    inner, _ = _inner(field.annotation)
    if inner is not None:
        mapping = "a list of mappings" if _is_list(field.annotation) else "a mapping"
        return f"{mapping}, [below](#{''.join(paths[inner]).lower()})"
    kind = _kind(field.annotation, field.metadata)
    example = field.examples[0] if field.examples else None
    return _cell(kind) if example is None or "`" in kind else f"{_cell(kind)}, e.g. `{_flow(example)}`"


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_is_list, get_args(annotation)))


def _kind(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A value's kind in words, from the JSON Schema that its type carries."""
    schema = next((mark.json_schema for mark in metadata if isinstance(mark, WithJsonSchema)), None)
    if schema is not None:
        return _said(schema)
    if get_origin(annotation) is list:
        return f"a list: {_kind(get_args(annotation)[0])}"
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0], annotation.__metadata__)
    return next(_kind(part) for part in get_args(annotation) if part is not type(None))


_KINDS = {
    "boolean": "`true` or `false`",
    "integer": "a whole number",
    "number": "a number",
    "object": "a mapping",
    "string": "text",
}


def _said(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        const = schema["const"]
        return f"`{const if isinstance(const, str) else json.dumps(const)}`"
    if "anyOf" in schema:
        return " or ".join(map(_said, schema["anyOf"]))
    if "properties" in schema:
        return "`{" + ", ".join(f"{name}: {name.upper()}" for name in schema["properties"]) + "}`"
    if "description" not in schema:
        return _KINDS[schema["type"]]
    text = str(schema["description"]).partition(":")[0].rstrip(".")
    return text[:1].lower() + text[1:]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None or field.default is PydanticUndefined:
        return ""
    if isinstance(field.default, dict) and all(value == {} for value in field.default.values()):
        return ", ".join(f"`{name}`" for name in field.default)
    return f"`{_flow(field.default)}`"


def _flow(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return str(value)


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model of a mapping inside, and whether it stands under names of the operator's own."""
    if get_origin(annotation) is dict:
        return _inner(get_args(annotation)[1])[0], True
    if get_origin(annotation) in (Annotated, Union) or get_args(annotation):
        found = (_inner(part) for part in get_args(annotation) if part is not type(None))
        return next(((model, named) for model, named in found if model is not None), (None, False))
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return (annotation if is_model else None), False


def _paragraphs(doc: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in doc.split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write(FilePath(sys.argv[1] if len(sys.argv) > 1 else "docs/policy.md"))
