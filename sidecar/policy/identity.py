"""The policy's keys for identities that are not API keys: signed tokens (JWTs) of an issuer."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ValidationInfo, field_validator

from sidecar.extras import how_to_install
from sidecar.policy import fields as of
from sidecar.policy import units
from sidecar.policy.declared import context, declared, key
from sidecar.policy.problems import quoted, unknown

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
"""Signature algorithms with a private and a public key. `none` and HS256 are not among them: anyone who
can read the issuer's public keys could sign such a token."""
MOST_KEY_SET_BYTES = 1 << 20
LONGEST_SKEW_S = 300
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def check_installed() -> None:
    """Raises ValueError where the package that checks signatures is missing."""
    if importlib.util.find_spec("joserfc") is None:
        raise ValueError(
            f"tokens are checked with the package joserfc, which is not installed; {how_to_install('jwt')}"
        )


def is_address(key_set: str) -> bool:
    """True if a key set is fetched, and not read from a file."""
    return key_set.startswith(("https://", "http://"))


def check_address(url: str) -> None:
    """Raises ValueError for an address that an issuer's keys must not be fetched from."""
    if "@" in url:  # never repeated: what is before it may be a password
        raise ValueError("has a user or a password; leave it out: an issuer's public keys need none")
    if not re.fullmatch(r"[!-~]+", url):
        raise ValueError("has a space or a character beyond ASCII; write it like https://id.example/keys")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"is no address: {error}; write it like https://id.example/keys") from None
    if not host or port == 0:
        raise ValueError("has no host; write it like https://id.example/keys")
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise ValueError(
            "is not encrypted, so that another host could give keys of its own; write https://, or fetch the keys "
            "into a file and name that"
        )


def public_keys(raw: bytes) -> list[Mapping[str, object]]:
    """The entries of a JSON Web Key Set (RFC 7517) that may be a public key. Raises ValueError where it is none."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON; name a JSON Web Key Set") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError('has no list "keys"; name a JSON Web Key Set')
    found: list[Mapping[str, object]] = [
        one for one in entries if isinstance(one, dict) and one.get("kty") in ("RSA", "EC", "OKP")
    ]
    if not found:
        raise ValueError("has no public key (kty RSA, EC or OKP); name the issuer's JSON Web Key Set")
    return found


def read_key_set(file: Path) -> bytes:
    """The content of a key set's file. Raises OSError, or ValueError where it is too large."""
    with file.open("rb") as opened:
        raw = opened.read(MOST_KEY_SET_BYTES + 1)
    if len(raw) > MOST_KEY_SET_BYTES:
        raise ValueError(f"is larger than {MOST_KEY_SET_BYTES} bytes")
    return raw


def _shown(value: object) -> str:
    return units.text(value, "a text", "https://id.example")


def _key_set(value: object, info: ValidationInfo) -> str:
    written = units.text(value, "an address or a file", "https://id.example/keys")
    if is_address(written):
        check_address(written)
        return written
    if "://" in written:
        raise ValueError(f"{quoted(written)} is neither https:// nor a file; write it like https://id.example/keys")
    file = context(info).folder / written
    try:
        public_keys(read_key_set(file))
    except OSError:
        raise ValueError(
            f"the file {quoted(written)} cannot be read; write where it is, relative to this file"
        ) from None
    except ValueError as error:
        raise ValueError(f"{quoted(written)} {error}") from None
    return str(file.absolute())


def _skew(value: object) -> float:
    skew_s = units.duration_s(value)
    if skew_s > LONGEST_SKEW_S:
        raise ValueError('more than any clock is wrong; write "5m" or less')
    return float(skew_s)


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


_Text = Annotated[str, of.Reads(_shown)]
_KEY_SET = of.schema("An address (https://), or a file, relative to this one.")
_DURATION = of.schema('A duration: "500ms", "30s".', pattern=r"^[0-9.]+ ?(us|ms|s|m|h)$")
_Algorithms = Annotated[
    tuple[Annotated[str, of.Reads(_algorithm, {"type": "string", "enum": list(ALGORITHMS)})], ...],
    of.listed("[RS256, ES256]"),
    AfterValidator(of.distinct),
]


@dataclass(frozen=True, slots=True)
@declared
class JwtPolicy:
    """Bearer tokens of one issuer, signed by it (JWTs), beside the API keys."""

    issuer: _Text = key(..., "The tokens' `iss`, exactly.", "https://id.example")
    audience: _Text = key(..., "The tokens' `aud`, or one of it: the name of this service.", "llm")
    key_set: Annotated[str, of.Reads(_key_set, _KEY_SET)] = key(
        ..., "Where the issuer's public keys are (JSON Web Key Set).", "https://id.example/keys", name="jwks"
    )
    tenant_claim: _Text = key(..., "The claim that names a tenant of this policy.", "tenant")
    tier_claim: _Text | None = key(
        None,
        "The claim that names the tier of requests which name none, up to the tenant's `max_tier`.",
        "tier",
    )
    clock_skew_s: Annotated[float, of.Reads(_skew, _DURATION)] = key(
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

    def __str__(self) -> str:
        return f"tokens of {self.issuer}"
