"""API keys: created once, shown once, and stored only as a hash.

A key is 256 random bits, so one round of SHA-256 is enough: unlike a password, it cannot be guessed.
"""

from __future__ import annotations

import hashlib
import re
import secrets

PREFIX = "sha256:"
_WELL_FORMED = re.compile(r"sha256:([0-9a-fA-F]{64})")


def new_key() -> str:
    """A new key with 256 bits of randomness, in the form that clients of OpenAI-style APIs expect."""
    return f"sk-{secrets.token_urlsafe(32)}"


def digest(key: bytes) -> str:
    """The lower-case hexadecimal SHA-256 of a key: what `Policy.tenants` is looked up by."""
    return hashlib.sha256(key).hexdigest()


def hash_line(key: str) -> str:
    """The hash that a tenant's file holds in place of the key."""
    return PREFIX + digest(key.encode())


def read_hash(value: object) -> str:
    """The digest in an entry of a tenant's `keys`. A refusal never repeats the entry: it may be a key."""
    written = value if isinstance(value, str) else ""
    match = _WELL_FORMED.fullmatch(written)
    if match:
        return match[1].lower()
    if written.startswith(PREFIX):
        raise ValueError(
            "not a whole hash; write sha256: and 64 hexadecimal digits, as `sidecar keys hash` prints them"
        )
    raise ValueError(
        "not the hash of a key; run `sidecar keys hash` and write the line it prints, never the key itself"
    )
