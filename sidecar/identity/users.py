"""The end user of a request, inside its tenant: where the tenant's policy says that its clients name it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from sidecar.policy.choices import ShownUsers
from sidecar.policy.tenant import Tenant

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MOST_SHOWN = 100


class RequestUser(NamedTuple):
    """A user. `key` stands for the name: of a fixed length, another one in each tenant, empty for an unknown user.

    `shown` is what explain and the log show: the key, or the name where the policy wants that.
    """

    key: str
    shown: str


UNKNOWN_USER = RequestUser("", "")
"""All requests of a tenant that name no user."""


def find_user(tenant: Tenant, headers: Mapping[bytes, bytes], body: bytes) -> RequestUser | None:
    """The user that the first of the tenant's sources names; None where the tenant has no `users`.

    A name is a text that is not blank, or a number, as it is written. What else stands in its place names no user.
    """
    users = tenant.users
    if users is None:
        return None
    name = next((name for source in users.sources if (name := _named(source, headers, body))), None)
    if name is None:
        return UNKNOWN_USER
    key = hashlib.sha256(f"{tenant.name} {name}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if users.shown is ShownUsers.HASHED:
        return RequestUser(key, key)
    return RequestUser(key, "".join(each if each.isprintable() else "?" for each in name[:_MOST_SHOWN]))


def _named(source: str, headers: Mapping[bytes, bytes], body: bytes) -> str:
    """The name in one place; empty where it names none."""
    kind, _, path = source.partition(" ")
    if kind == "header":
        return headers.get(path.encode(), b"").decode("utf-8", "replace").strip()
    raw = body
    try:
        for part in path.split("."):
            raw = bytes(_MEMBERS.decode(raw).get(part, b"null"))
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):  # no object, or a text or number that is beyond what is read
        return ""
    if isinstance(value, str):
        return value.strip()
    return raw.decode() if isinstance(value, int | float) and not isinstance(value, bool) else ""
