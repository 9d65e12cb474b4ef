"""How a key of the policy's files is declared: once, as a field of the record that the running process uses.

A record is a frozen dataclass. The type of a field says how its value is read (`fields`), `key` its default as an
operator writes it, its purpose and an example. pydantic reads files into the records; the JSON Schemas, the reference,
the messages and the differences between two policies come from the same fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationInfo

from sidecar.policy.rules import UNLIMITED

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic_core import CoreSchema

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    """Context of a value's reader: the pool's tiers (empty if unreadable), the file's folder."""

    tiers: tuple[str, ...]
    folder: Path


_NO_FILE = Context((), Path())


def context(info: ValidationInfo) -> Context:
    """The context that `compiler` passed to the validation."""
    assert isinstance(info.context, Context)
    return info.context


class ReadAs:
    """Marks a field that the file has as another type: it is read as `kind`, and `make` gives the record's own."""

    def __init__(self, kind: object, make: Callable[..., object] | None = None) -> None:
        self._kind = kind if make is None else Annotated[kind, AfterValidator(make)]

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self._kind)


class OrDefault(ReadAs):
    """Marks a mapping that may be left out: the record then has `default`, the mapping of which nothing is written."""

    def __init__(self, default: object) -> None:
        super().__init__(type(default) | None, lambda written: default if written is None else written)


@dataclass(frozen=True, slots=True)
class _Key:
    """A key before its record is made. `default` is in the operator's notation, `...` for a key that is required."""

    default: object
    metadata: dict[str, Any]
    options: Mapping[str, Any]

    def made(self, name: str, hint: Any) -> Any:
        """The dataclass's field `name`, whose default is read as one that an operator writes."""
        self.metadata.setdefault("alias", _without_unit(name))
        if self.default is ...:
            return field(metadata=self.metadata, **self.options)
        is_none = self.default is None and get_origin(hint) is not Annotated
        default = None if is_none else TypeAdapter[Any](hint).validate_python(self.default, context=_NO_FILE)
        metadata = {**self.metadata, "json_schema_extra": {"default": self.default}}
        if type(default).__hash__ is None:
            return field(default_factory=lambda: default, metadata=metadata, **self.options)
        return field(default=default, metadata=metadata, **self.options)


def key(
    default: object,
    description: str,
    example: object = None,
    *,
    name: str | None = None,
    is_always_read: bool = False,
    is_fixed: bool = False,
    **options: Any,
) -> Any:
    """A key of a file. `name` is its own where it is not that of the field without a unit; `options` are `field`'s.

    `is_always_read`: its validator sees the default, too, which depends on the rest of the file. `is_fixed`: a process
    cannot change it while it runs.
    """
    metadata: dict[str, Any] = {"description": description, "is_fixed": is_fixed}
    if example is not None:
        metadata["examples"] = [example]
    if name is not None:
        metadata["alias"] = name
    if is_always_read:
        metadata["validate_default"] = True
    return _Key(default, metadata, options)


def declared(cls: type[T]) -> type[T]:
    """Makes fields of the keys of a record. Stands below `@dataclass`. `SCHEMA` of a record adds to its JSON Schema."""
    hints = get_type_hints(cls, include_extras=True)
    for name in cls.__annotations__:
        found, hint = cls.__dict__.get(name), hints[name]
        cls.__annotations__[name] = hint
        if isinstance(found, _Key):
            setattr(cls, name, found.made(name, hint))
    # Its purpose is written here, because pydantic 2.9 leaves out that of a dataclass.
    extra = {"description": cleandoc(cls.__doc__ or ""), **getattr(cls, "SCHEMA", {})}
    cls.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
        extra="forbid", hide_input_in_errors=True, json_schema_extra=extra
    )
    return cls


def written_name(one: Field[Any]) -> str:
    """The name of a record's field as a key of its file."""
    return str(one.metadata.get("alias") or _without_unit(one.name))


def _without_unit(name: str) -> str:
    return re.sub("_(s|us|bytes|percent|thousandths)$", "", name)


def values(record: DataclassInstance) -> dict[str, Any]:
    """The fields of a record by their names: what a record that has more of them is made of."""
    return {one.name: getattr(record, one.name) for one in fields(record)}


def given(record: DataclassInstance) -> dict[str, Any]:
    """The fields of a record that are not None: what is written where nothing is the default of each."""
    return {name: value for name, value in values(record).items() if value is not None}


_PARTS = {"_us": 1_000_000, "_percent": 100, "_thousandths": 1000, "speed": 1000}
"""Endings of fields that count in parts of one, with the number of the parts."""


def figures(value: Any, name: str = "") -> Any:
    """A record as JSON types, under the keys of its file; durations are in seconds, None is no bound.

    Mappings with nothing in them are left out.
    """
    parts = next((parts for ending, parts in _PARTS.items() if name.endswith(ending)), None)
    if is_dataclass(value) and not isinstance(value, type):
        found = {one: getattr(value, one.name) for one in fields(value)}
        return {written_name(one): figures(it, one.name) for one, it in found.items() if it != {}}
    if name == "hours":
        return {hours: figures(given(entry)) for hours, entry in value.items()}
    if isinstance(value, tuple):
        return [figures(one) for one in value]
    if isinstance(value, dict):
        return {name: figures(one) for name, one in value.items()}
    if value is None or value == UNLIMITED:
        return None
    if parts is not None:
        return value / parts
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Enum):
        return value.value
    return float(value) if isinstance(value, Fraction) else value
