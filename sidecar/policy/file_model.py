"""Base class of the models that read the policy's files, and how a key of one is declared."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class FileModel(BaseModel):
    """Unknown keys are mistakes; defaults go through the same readers as what is written."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)


def key(default: object, description: str, example: object = None) -> Any:
    """A key of a file. The default is in the operator's notation, which the type checker does not compare."""
    return Field(default, description=description, examples=None if example is None else [example])


def nothing_means_defaults(value: object) -> object:
    """`batch:` with nothing after it is a mapping with every default."""
    return {} if value is None else value
