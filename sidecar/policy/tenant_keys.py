"""API keys: created once, shown once, and stored only as a hash, which a tenant's file may have in a mapping with more.

A key is 256 random bits, so one round of SHA-256 is enough: unlike a password, it cannot be guessed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from sidecar.policy import fields as of
from sidecar.policy import units
from sidecar.policy.declared import declared, key
from sidecar.policy.problems import masked, quoted

PREFIX = "sha256:"
_WELL_FORMED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_DAY_S = 24 * 3600
_LATEST_S = 253_402_214_400
"""The end of the year 9999, less a day: what a calendar can show."""
_LEAST_DIGITS = 8
"""Of a hash that stands for its key: the keys of a tenant hardly share so many."""


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


def _no_key(name: str) -> str:
    if masked(name) != name:
        raise ValueError("looks like a key, and logs show names; write one such as ci, and never the key itself")
    return name


def _expiry_s(value: object) -> int:
    """The Unix time from which a key no longer counts: after a day, in UTC, or at a time with its zone."""
    written = value.text if isinstance(value, units.Ambiguous) else units.text(value, "a day", "2027-01-31")
    with suppress(ValueError):
        is_day = _DAY.fullmatch(written) is not None
        begin_s = int(units.moment_s(f"{written}T00:00Z" if is_day else written))
        if _DAY_S <= (end_s := begin_s + is_day * _DAY_S) <= _LATEST_S:
            return end_s
    wanted = 'write its last day, such as 2027-01-31, or "2027-01-31T18:00:00+01:00"'
    raise ValueError(f"{quoted(written)} is no day, and no time with its zone; {wanted}")


_HASH = of.schema("A key's hash.", pattern="^sha256:[0-9a-fA-F]{64}$")
_KeyHash = Annotated[str, of.Reads(read_hash, _HASH)]
_KeyName = Annotated[of.KeyName, AfterValidator(_no_key)]
_Expiry = Annotated[int, of.Reads(_expiry_s, of.schema("A day, or a time with its zone."))]


@dataclass(frozen=True, slots=True)
@declared
class TenantKey:
    """One API key of a tenant. Its hash alone may be written in place of the mapping."""

    digest: _KeyHash = key(..., "Its hash, from `sidecar keys new`.", "sha256:...", name="hash")
    name: _KeyName | None = key(None, "Its name in the log, in spans and in `sidecar keys list`.", "ci")
    expires_s: _Expiry | None = key(
        None,
        "Its last day, in UTC, or the time of its end, with a zone. Default: never.",
        "2027-01-31",
    )
    level: of.Level | None = key(
        None,
        "The tier of its requests that name none, up to the tenant's `max_tier`. Default: the tenant's `tier`.",
        "batch",
        name="tier",
    )

    @property
    def title(self) -> str:
        """Its name, or the beginning of its hash."""
        return self.name or f"{PREFIX}{self.digest[:12]}"

    def is_expired(self, now_s: float) -> bool:
        """True if it has ended by then."""
        return self.expires_s is not None and self.expires_s <= now_s

    @property
    def last(self) -> str | None:
        """The last day on which it counts, in UTC, or the time from which it does not; None where it has no end."""
        if self.expires_s is None:
            return None
        if self.expires_s % _DAY_S == 0:
            return datetime.fromtimestamp(self.expires_s - _DAY_S, timezone.utc).date().isoformat()
        return datetime.fromtimestamp(self.expires_s, timezone.utc).isoformat().replace("+00:00", "Z")


class UnknownKey(LookupError):
    """A tenant has no such key, or several; the message says what would be right."""


def find_key(keys: Sequence[TenantKey], called: str) -> TenantKey:
    """The key of a name, or whose hash begins so. Raises UnknownKey."""
    digits = called.lower().removeprefix(PREFIX)
    found = [one for one in keys if one.name == called] or [
        one for one in keys if len(digits) >= _LEAST_DIGITS and one.digest.startswith(digits)
    ]
    if len({one.digest for one in found}) == 1:
        return found[0]
    if found:
        raise UnknownKey(f"the hashes of {len(found)} keys begin with {quoted(called)}; write more of it")
    raise UnknownKey(f"no key is called {quoted(called)}, and no hash begins so; `sidecar keys list` has them")


def _as_key(written: object) -> object:
    return written if isinstance(written, dict | TenantKey) else TenantKey(read_hash(written))


def _named_once(keys: tuple[TenantKey, ...]) -> tuple[TenantKey, ...]:
    names = Counter(one.name for one in {*keys} if one.name)  # one that stands there twice is another mistake
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two keys are called {quoted(twice[0])}; give each a name of its own")
    return keys


TenantKeys = Annotated[
    tuple[Annotated[TenantKey, BeforeValidator(_as_key), of.OrSchema(_HASH)], ...],
    of.listed('keys: ["sha256:..."] as `sidecar keys new` prints it', or_empty=True),
    AfterValidator(_named_once),
]
