"""Guarded paths of the policy, and which pages of other origins may use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, model_validator

from sidecar.apis import Api, infer_api
from sidecar.policy import fields as of
from sidecar.policy.declared import ReadAs, declared, key, values


@dataclass(frozen=True, slots=True)
@declared
class Cors:
    """Browsers that may use the API from pages of other origins. Cookies are never allowed: keys are headers."""

    origins: of.Origins = key(..., 'The origins of the pages, or `["*"]` for every page.', ["https://app.example"])
    headers: of.AskedHeaders | None = key(
        None,
        "The headers that their requests may have, `authorization` and `content-type` among them. "
        "Default: every one that is asked for.",
        ["authorization", "content-type", "x-priority"],
    )

    def __str__(self) -> str:
        return ", ".join(self.origins)


@dataclass(frozen=True, slots=True)
@declared
class RequestSize:
    """An estimate of the tokens that a request holds, by the size of its body."""

    base: of.Count = key(0, "Tokens of every request.", 100)
    per_kilobyte: of.Count = key(0, "Tokens for each begun 1,024 bytes of the body.", 250)

    def of(self, size_bytes: int) -> int:
        """The tokens of a body of so many bytes, at least 1."""
        return max(1, self.base + self.per_kilobyte * -(-size_bytes // 1024))


@dataclass(frozen=True, slots=True)
@declared
class CostPlace:
    """Where an answer says its cost in tokens. One of the two is written."""

    header: of.HeaderName | None = key(None, "A header of the answer.", "x-cost-tokens")
    member: of.MemberName | None = key(None, "A member of the answer's JSON, wherever it stands.", "total_tokens")

    @model_validator(mode="after")
    def _is_in_one_place(self) -> CostPlace:
        if (self.header is None) == (self.member is None):
            raise ValueError("write one of header and member, such as {header: x-cost-tokens}")
        return self


def _as_size(written: object) -> object:
    """A number alone is `base`."""
    return written if isinstance(written, dict | RequestSize) else {"base": written}


_Size = Annotated[RequestSize, BeforeValidator(_as_size), of.OrSchema({"type": ["integer", "string"]})]


@dataclass(frozen=True, slots=True)
@declared
class EndpointBody:
    """Treatment of requests on one path."""

    level: of.Level | None = key(None, "The tier of requests on this path.", "batch", name="tier")
    forward_to: of.UrlPath | None = key(None, "The path the engine knows. Default: the same path.", "/v1/completions")
    api: Annotated[Api, ReadAs(Annotated[Api, of.Choice(Api, "API")] | None)] = key(
        None, "The shape of its requests. Default: from the path."
    )
    size: _Size | None = key(
        None,
        "`api: generic` only: the tokens that one request holds, or how they are estimated.",
        {"per_kilobyte": 250},
        name="tokens",
    )
    cost: Annotated[CostPlace, of.mapped("{header: x-cost-tokens}")] | None = key(
        None,
        "`api: generic` only: where an answer says its cost. Default: in OpenAI's `usage`, else the estimate counts.",
        {"member": "total_tokens"},
    )


@dataclass(frozen=True, slots=True)
class Endpoint(EndpointBody):
    """A guarded path."""

    path: str = ""


def new_endpoints(bodies: dict[str, EndpointBody]) -> Mapping[str, Endpoint]:
    """The guarded paths. One whose API is not known is a mistake that `validate` reports."""
    return MappingProxyType(
        {
            path: Endpoint(**{**values(body), "api": body.api or infer_api(body.forward_to or path)}, path=path)
            for path, body in bodies.items()
        }
    )
