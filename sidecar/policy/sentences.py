"""Validation errors in an operator's words. Nothing of the validator's own wording reaches a user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sidecar.policy.problems import Path, suggestion
from sidecar.policy.units import Ambiguous

_KEY = "[key]"  # what pydantic puts at the end of the path when a mapping's key, not its value, is wrong


def sentence(model: type[BaseModel], error: ErrorDetails) -> tuple[Path, str]:
    """The path and the message, *what is wrong; what would be right*, of one error in validating `model`."""
    path: Path = error["loc"]
    if path and path[-1] == _KEY:
        path = path[:-1]
    return path, _message(model, path, error)


def _message(model: type[BaseModel], path: Path, error: ErrorDetails) -> str:
    kind = error["type"]
    if kind in {"value_error", "assertion_error"}:
        return str(error.get("ctx", {})["error"])
    around = _model_at(model, path[:-1])
    name = str(path[-1]) if path else ""
    if kind == "extra_forbidden":
        return f"no such key; {suggestion(name, list(_keys(around)), 'the keys here are')}"
    if kind == "missing":
        return f"missing; write {_example(around, name)}"
    found = error.get("input")
    what = "nothing" if found is None else "a list" if isinstance(found, list) else "a single value"
    needed = _example(_model_at(model, path), "")
    if isinstance(found, (dict, Ambiguous)):
        return f"cannot be understood here; write {needed}"
    return f"{what} where a mapping belongs; write {needed}"


def _example(model: type[BaseModel], name: str) -> str:
    """How the key `name` is written; without a name, or for one that has no example, the keys there are."""
    field = _keys(model).get(name)
    if field is None or not field.examples:
        return "a mapping with " + ", ".join(_keys(model))
    return f"{name}: {_flow(field.examples[0])}"


def _keys(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The keys of a mapping as an operator writes them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _flow(value: object) -> str:
    """A value as an operator writes it on one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return f'"{value}"' if ":" in str(value) else str(value)


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel]:
    """The model that describes the mapping at `path`; the nearest around it where there is none."""
    for part in path:
        field = _keys(model).get(str(part))
        model = (_nested(field.annotation) if field else None) or model
    return model


def _nested(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Aging | None` or `dict[str, Annotated[TierBody, ...]]`."""
    if inner := get_args(annotation):  # asked first: on Python 3.10 `dict[...]` passes for a class
        return next((found for part in inner if (found := _nested(part))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
