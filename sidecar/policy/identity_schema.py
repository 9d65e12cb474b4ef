"""Schema of the policy's sections on identity: see `schema`."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, PlainValidator, ValidationInfo, WithJsonSchema, field_validator, model_validator

from sidecar.policy import fields as of
from sidecar.policy import units
from sidecar.policy.file_model import FileModel, key
from sidecar.policy.gateway import Network, read_network
from sidecar.policy.identity import (
    ALGORITHMS,
    LONGEST_SKEW_S,
    check_address,
    check_installed,
    is_address,
    public_keys,
    read_key_set,
)
from sidecar.policy.problems import printable, quoted, unknown


def _said(value: object) -> str:
    return units.text(value, "a text", "https://id.example")


def _key_set(value: object, info: ValidationInfo) -> str:
    written = units.text(value, "an address or a file", "https://id.example/keys")
    if is_address(written):
        check_address(written)
        return written
    if "://" in written:
        raise ValueError(f"{quoted(written)} is neither https:// nor a file; write it like https://id.example/keys")
    file = of.context(info).folder / written
    try:
        public_keys(read_key_set(file))
    except OSError:
        raise ValueError(
            f"the file {quoted(written)} cannot be read; write where it is, relative to this file"
        ) from None
    except ValueError as error:
        raise ValueError(f"{quoted(written)} {error}") from None
    return str(file.absolute())


def _skew(value: object) -> Fraction:
    skew_s = units.duration_s(value)
    if skew_s > LONGEST_SKEW_S:
        raise ValueError('more than any clock is wrong; write "5m" or less')
    return skew_s


def _algorithm(value: object) -> str:
    name = units.text(value, "an algorithm", "RS256")
    if name.lower() == "none" or name.upper().startswith("HS"):
        raise ValueError(
            f"{quoted(name)} is not allowed: whoever knows the issuer's public keys could sign such a token; write one "
            "with a private key, such as RS256 or ES256"
        )
    if name not in ALGORITHMS:
        raise ValueError(unknown("algorithm", name, list(ALGORITHMS)))
    return name


def _network(value: object) -> Network:
    return read_network(printable(units.text(value, "an address or a network", "10.0.0.0/8")))


_Networks = Annotated[
    list[Annotated[Network, PlainValidator(_network), WithJsonSchema({"type": "string"})]],
    of.listed("[10.0.0.0/8]"),
    AfterValidator(of.distinct),
]
_Said = Annotated[str, PlainValidator(_said), WithJsonSchema({"type": "string"})]
_KeySet = Annotated[
    str,
    PlainValidator(_key_set),
    WithJsonSchema({"type": "string", "description": "An address (https://), or a file, relative to this one."}),
]
_DURATION = WithJsonSchema(
    {"type": "string", "description": 'A duration: "500ms", "30s".', "pattern": r"^[0-9.]+ ?(us|ms|s|m|h)$"}
)
_Algorithms = Annotated[
    list[Annotated[str, PlainValidator(_algorithm), WithJsonSchema({"type": "string", "enum": list(ALGORITHMS)})],],
    of.listed("[RS256, ES256]"),
    AfterValidator(of.distinct),
]


class JwtBody(FileModel):
    """Bearer tokens of one issuer, signed by it (JWTs), beside the API keys."""

    issuer: _Said = key(..., "The tokens' `iss`, exactly.", "https://id.example")
    audience: _Said = key(..., "What must be the tokens' `aud`, or in it: the name of this service.", "llm")
    jwks: _KeySet = key(..., "Where the issuer's public keys are (JSON Web Key Set).", "https://id.example/keys")
    tenant_claim: _Said = key(..., "The claim that names a tenant of this policy.", "tenant")
    tier_claim: _Said | None = key(
        None,
        "The claim that names the tier of requests which name none, up to the tenant's `max_tier`. Default: none, the "
        "tenant's tier counts.",
        "tier",
    )
    clock_skew: Annotated[Fraction, PlainValidator(_skew), _DURATION] = key(
        "30s",  # clocks that are set by NTP differ by less; more would let an expired token live on
        "How far the issuer's clock and this one may differ.",
        "10s",
    )
    algorithms: _Algorithms = key(list(ALGORITHMS), "The signature algorithms that are accepted.", ["RS256"])

    @field_validator("issuer")
    @classmethod
    def _can_be_checked(cls, issuer: str) -> str:
        check_installed()
        return issuer


class GatewayBody(FileModel):
    """A gateway before the sidecar that has found out who asks, and names the tenant in a header."""

    tenant_header: of.HeaderName = key(..., "The header that names a tenant of this policy.", "x-tenant")
    addresses: _Networks = key(
        ...,
        "The addresses and networks of the gateway's own connections. From others the headers do not count.",
        ["10.0.0.0/8"],
    )
    tier_header: of.HeaderName | None = key(
        None,
        "The header that names the tier of requests which name none, up to the tenant's `max_tier`. Default: none, the "
        "tenant's tier counts.",
        "x-tenant-tier",
    )

    @model_validator(mode="after")
    def _are_two(self) -> GatewayBody:
        if self.tier_header == self.tenant_header:
            raise ValueError("tier_header is also the tenant_header; write another name")
        return self
