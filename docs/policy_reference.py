"""Writes the JSON Schemas of the policy's files, and docs/policy.md: `python docs/policy_reference.py`.

The reference is made of the schemas: the purpose of a key, the form of its value and its default are declared once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sidecar.policy import fields as of
from sidecar.policy.fleet import EngineListFile
from sidecar.policy.pool_file import PoolFile
from sidecar.policy.schema import SCHEMAS, described, mapping_in, schema_document
from sidecar.policy.tenant import Tenant
from sidecar.policy.validate import flow

PLACES: Mapping[Any, str] = {
    PoolFile: "The pool's file",
    Tenant: "A tenant's file",
    EngineListFile: "The engine list",
}

_HEAD = """\
# The policy's files, key by key

```yaml
engine: vllm
capacity: {from: engine}
tiers:                          # most important first
  high: {reserve: 20%}
  normal: {reserve: 10%}
  batch: {reserve: 5%, limit: 60%, queue: {max_wait: 30m}}
anonymous: normal
tenants: tenants/*.yaml
```

[policies/](../policies/) has commented examples, and JSON Schemas for editors. Shares are written `20%`, durations
`500ms`, `5m`, counts `160`, `10k`, `2M`, sizes `8MiB`. In brackets stands a key's default (of several values the bold
one), or how a value is written.
"""

_Schema = dict[str, Any]
_NOTHING = {"type": "null"}


def reference_text() -> str:
    """The whole page."""
    parts, paths, written = [_HEAD], dict[str, tuple[str, ...]](), dict[str, str]()
    documents = {title: described(kind) for kind, title in PLACES.items()}
    for document in documents.values():
        _find(document, document, (), paths)
    for title, document in documents.items():
        parts += _folded(_sections(document, document, title, (), paths), written)
    return "\n".join(parts)


_Paths = dict[str, tuple[str, ...]]
_NAME = re.compile(r"- (`\w+`)")
_EXAMPLE = " (e.g. "
_FORM = re.compile(r" \([^:]*\)(?=: )")


def _folded(lines: Iterable[str], written: dict[str, str]) -> Iterator[str]:
    """The lines, but for keys that an earlier section has in the same words: one line names them, and that section.

    A key that has only an example where the earlier one has a default is folded, too.
    """
    section, repeated = "", list[str]()
    for line in lines:
        if line.startswith("### "):
            section = line.strip("#`\n ")
        words = _FORM.sub("", line) if _EXAMPLE in line else line
        written.setdefault(_FORM.sub("", line), section)
        if written.setdefault(words, section) != section and _NAME.match(line):
            repeated.append(words)
            continue
        if repeated:
            names = ", ".join(_NAME.findall("\n".join(repeated)))
            yield f"- {names}: as in [`{written[repeated[0]]}`](#{written[repeated[0]].replace('.', '').lower()})"
            repeated = []
        yield line


def _find(document: _Schema, mapping: _Schema, path: tuple[str, ...], paths: _Paths) -> None:
    """Notes the path of each mapping's section: that of the first place where it stands."""
    for title, below in _inside(mapping, path):
        if title not in paths:
            paths[title] = below
            _find(document, document["$defs"][title], below, paths)


def _inside(mapping: _Schema, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The mappings inside a mapping, by their names in the schema, and their paths."""
    for name, key in mapping["properties"].items():
        inner = mapping_in(key)
        if inner is not None:
            yield inner, (*path, name, "NAME") if _is_named(key) else (*path, name)


def _is_named(key: _Schema) -> bool:
    """True if a mapping stands under names of the operator's own."""
    return any("additionalProperties" in one or "patternProperties" in one for one in (key, *key.get("anyOf", ())))


def _sections(document: _Schema, mapping: _Schema, title: str, path: tuple[str, ...], paths: _Paths) -> Iterator[str]:
    """A mapping's own section, then those of the mappings inside it."""
    yield f"## {title}\n" if not path else f"### `{'.'.join(path)}`\n"
    if description := mapping["description"] if not path else _beyond_its_row(mapping["description"]):
        yield f"{_paragraphs(description)}\n"
    yield from _keys(mapping, paths)
    yield ""
    for inner, below in _inside(mapping, path):
        if paths[inner] == below:
            yield from _sections(document, document["$defs"][inner], title, below, paths)


def _keys(mapping: _Schema, paths: _Paths) -> Iterator[str]:
    """A line for each key: its name, its default or how a value is written, and what it is for."""
    for name, key in mapping["properties"].items():
        inner = mapping_in(key)
        linked = f"`{name}`" if inner is None else f"[`{name}`](#{''.join(paths[inner]).lower()})"
        value = _value(key)
        if name in mapping.get("required", ()):
            form = f"{value}, required" if value else "required"
        else:
            form = _optional(value, key.get("default"))
        yield f"- {linked}{f' ({form})' if form else ''}: {_line(key['description'])}"


def _optional(value: str, default: object) -> str:
    """The form of a key that may be left out. Of several words the default one is in bold."""
    written = _default(default)
    if not value or not written:
        return value or written
    if written in value:
        return value.replace(written, f"**{written}**")
    is_all = isinstance(default, list) and len(default) == value.count("`") / 2
    return f"{value}, default {'all' if is_all else written}"


def _value(key: _Schema) -> str:
    """How a value is written, where its default does not show it. A mapping has a section of its own."""
    if mapping_in(key) is not None:
        return "a list" if any(one.get("type") == "array" for one in (key, *key.get("anyOf", ()))) else ""
    kind = _describe(key)
    if "`" in kind and not (key.get("type") == "boolean" and "default" in key):
        return kind
    if key.get("default") is not None:
        return ""
    return f"e.g. `{flow(key['examples'][0])}`" if "examples" in key else kind


_KINDS = {
    "boolean": "`true` or `false`",
    "integer": "a whole number",
    "number": "a number",
    "object": "a mapping",
    "string": "text",
}


def _describe(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"a list: {_describe(schema['items'])}"
    if "const" in schema:
        const = schema["const"]
        return f"`{const if isinstance(const, str) else json.dumps(const)}`"
    if "anyOf" in schema:
        return ", ".join(_describe(one) for one in schema["anyOf"] if one != _NOTHING)
    if "properties" in schema:
        return "`{" + ", ".join(f"{name}: {name.upper()}" for name in schema["properties"]) + "}`"
    return str(schema[of.KIND]) if of.KIND in schema else _KINDS[schema["type"]]


def _default(default: object) -> str:
    if default is None or default == {}:
        return ""
    if isinstance(default, dict) and all(value == {} for value in default.values()):
        return ", ".join(f"`{name}`" for name in default)
    return f"`{flow(default)}`"


def _beyond_its_row(doc: str) -> str:
    """A mapping's description without its first sentence: the row of its key says that."""
    return doc.partition(".")[2].strip()


def _paragraphs(doc: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in doc.split("\n\n"))


def _line(text: str) -> str:
    return " ".join(text.split())


def texts() -> Mapping[Path, str]:
    """The files that this script writes."""
    docs = Path(__file__).parent
    schemas = {name: json.dumps(schema_document(kind), indent=2, ensure_ascii=False) for name, kind in SCHEMAS.items()}
    found = {docs.parent / "policies" / name: f"{text}\n" for name, text in schemas.items()}
    return {**found, docs / "policy.md": reference_text()}


if __name__ == "__main__":
    for file, text in texts().items():
        file.write_text(text, encoding="utf-8")
