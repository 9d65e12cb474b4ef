"""How a key of the policy's files is declared: once, as a field of the record that the running process uses.

A record is a frozen dataclass. The type of a field says how its value is read (`fields`), `key` its default as an
operator writes it, its purpose and an example. pydantic reads files into the records; the JSON Schemas, the reference,
the messages and the differences between two policies come from the same fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationInfo

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


@dataclass(frozen=True, slots=True)
class _Key:
    """A key before its record is made. `default` is in the operator's notation, `...` for a key that is required."""

    default: object
    metadata: dict[str, Any]
    options: Mapping[str, Any]

    def made(self, hint: Any) -> Any:
        """The dataclass's field, whose default is read as one that an operator writes."""
        if self.default is ...:
            return field(metadata=self.metadata, **self.options)
        default: Any = TypeAdapter[Any](hint).validate_python(self.default, context=_NO_FILE)
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
    **options: Any,
) -> Any:
    """A key of a file. `name` is the key's own where the field has another; `options` are those of `field`.

    `is_always_read`: its validator sees the default, too, which depends on the rest of the file.
    """
    metadata: dict[str, Any] = {"description": description}
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
            setattr(cls, name, found.made(hint))
    extra = getattr(cls, "SCHEMA", None)
    cls.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
        extra="forbid", hide_input_in_errors=True, json_schema_extra=extra
    )
    return cls


def written_name(one: Field[Any]) -> str:
    """The name of a record's field as a key of its file. One that is not declared may have its unit after its name."""
    return str(one.metadata.get("alias") or one.name.removesuffix("_s"))


def values(record: DataclassInstance) -> dict[str, Any]:
    """The fields of a record by their names: what a record that has more of them is made of."""
    return {one.name: getattr(record, one.name) for one in fields(record)}
