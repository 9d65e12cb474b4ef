"""Keys of an endpoint whose requests have a shape of their own (`api: generic`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema, model_validator

from sidecar.policy import fields as of
from sidecar.policy.file_model import FileModel, key


class SizeBody(FileModel):
    """An estimate of the tokens that a request holds, by the size of its body."""

    base: of.Count = key(0, "Tokens of every request.", 100)
    per_kilobyte: of.Count = key(0, "Tokens for each begun 1,024 bytes of the body.", 250)


class CostBody(FileModel):
    """Where an answer says its cost in tokens: one of the two."""

    header: of.HeaderName | None = key(None, "A header of the answer.", "x-cost-tokens")
    member: of.MemberName | None = key(None, "A member of the answer's JSON, wherever it stands.", "total_tokens")

    @model_validator(mode="after")
    def _is_in_one_place(self) -> CostBody:
        if (self.header is None) == (self.member is None):
            raise ValueError("write one of header and member, such as {header: x-cost-tokens}")
        return self


def _as_size(written: object) -> object:
    """A number alone is `base`."""
    return written if isinstance(written, dict | SizeBody) else {"base": written}


Size = Annotated[
    SizeBody,
    BeforeValidator(_as_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": ["integer", "string"]},
                {
                    "type": "object",
                    "properties": {name: {"type": ["integer", "string"]} for name in ("base", "per_kilobyte")},
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
