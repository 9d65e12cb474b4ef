"""API keys of a tenant, as its file lists them: the hash of each, or a mapping with more about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from sidecar.policy import fields as of
from sidecar.policy.declared import declared, key
from sidecar.policy.keys import PREFIX, read_hash
from sidecar.policy.problems import quoted

_DAY_S = 24 * 3600
_LEAST_DIGITS = 8
"""Of a hash that stands for its key: the keys of a tenant hardly share so many."""


@dataclass(frozen=True, slots=True)
@declared
class TenantKey:
    """One API key of a tenant. Its hash alone may be written in place of the mapping."""

    digest: of.KeyHash = key(..., "Its hash, from `sidecar keys new`.", "sha256:...", name="hash")
    name: of.KeyName | None = key(None, "Its name in the log, in spans and in `sidecar keys list`.", "ci")
    expires_s: of.Expiry | None = key(
        None,
        "Its last day, which ends at midnight in UTC, or the time of its end, with a zone. Default: it has no end.",
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
    named = [one for one in keys if one.name == called]
    found = named or [one for one in keys if len(digits) >= _LEAST_DIGITS and one.digest.startswith(digits)]
    if len({one.digest for one in found}) == 1:
        return found[0]
    if found:
        raise UnknownKey(f"the hashes of {len(found)} keys begin with {quoted(called)}; write more of it")
    raise UnknownKey(f"no key is called {quoted(called)}, and no hash begins so; `sidecar keys list` has them")


class _HashToo:
    """Marks a key in whose place its hash may stand."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [dict(of.KEY_HASH), handler(core)]}


def _as_key(written: object) -> object:
    return written if isinstance(written, dict | TenantKey) else TenantKey(read_hash(written))


def _named_once(keys: tuple[TenantKey, ...]) -> tuple[TenantKey, ...]:
    names: set[str] = set()
    for one in dict.fromkeys(keys):  # one that stands there twice is another mistake
        if one.name in names:
            raise ValueError(f"two keys are called {quoted(one.name)}; give each a name of its own")
        names |= {one.name} if one.name else set()
    return keys


TenantKeys = Annotated[
    tuple[Annotated[TenantKey, BeforeValidator(_as_key), _HashToo()], ...],
    of.listed('keys: ["sha256:..."] as `sidecar keys new` prints it', or_empty=True),
    AfterValidator(_named_once),
]
