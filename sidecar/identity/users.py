"""The end user of a request, inside its tenant: where the tenant's policy says that its clients name it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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
    name = _name(users.sources, headers, body)
    if not name:
        return UNKNOWN_USER
    key = hashlib.sha256(f"{tenant.name} {name}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if users.shown is ShownUsers.HASHED:
        return RequestUser(key, key)
    return RequestUser(key, "".join(each if each.isprintable() else "?" for each in name[:_MOST_SHOWN]))


def _name(sources: Sequence[str], headers: Mapping[bytes, bytes], body: bytes) -> str:
    """The name in the first place that names one; empty where none does. The body is read once, and only if it must."""
    members: Mapping[str, msgspec.Raw] | None = None
    for source in sources:
        kind, _, path = source.partition(" ")
        if kind == "header":
            name = headers.get(path.encode(), b"").decode("utf-8", "replace").strip()
        else:
            members = _read_members(body) if members is None else members
            name = _name_in_body(members, path)
        if name:
            return name
    return ""


def _read_members(raw: bytes) -> Mapping[str, msgspec.Raw]:
    """The members of an object, undecoded; none of what is no object."""
    try:
        return _MEMBERS.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _name_in_body(members: Mapping[str, msgspec.Raw], path: str) -> str:
    *outer, last = path.split(".")
    for part in outer:
        members = _read_members(bytes(members.get(part, b"null")))
    raw = bytes(members.get(last, b"null"))
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):  # a text or number that is beyond what is read
        return ""
    if isinstance(value, str):
        return value.strip()
    return raw.decode() if isinstance(value, int | float) and not isinstance(value, bool) else ""
