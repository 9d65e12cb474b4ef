"""What the policy says of identities that are not API keys: signed tokens (JWTs) of an issuer."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sidecar.extras import how_to_install

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
"""Signature algorithms with a private and a public key. `none` and HS256 are not among them: whoever can read the
issuer's public keys could sign such a token."""
MOST_KEY_SET_BYTES = 1 << 20
LONGEST_SKEW_S = 300
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class JwtPolicy:
    """Which tokens are believed, and which of their claims count. `key_set` is an address, or a file's path."""

    issuer: str
    audience: str
    key_set: str
    tenant_claim: str
    tier_claim: str | None
    clock_skew_s: float
    algorithms: tuple[str, ...]

    def __str__(self) -> str:
        return f"tokens of {self.issuer}"


def check_installed() -> None:
    """Raises ValueError where the package that checks signatures is missing."""
    if importlib.util.find_spec("joserfc") is None:
        raise ValueError(
            f"tokens are checked with the package joserfc, which is not installed; {how_to_install('jwt')}"
        )


def is_address(key_set: str) -> bool:
    """Whether a key set is fetched, and not read from a file."""
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
