"""Tenants that are kept in the store: each has the keys of a tenant's file, as JSON.

They come beside the tenants of the policy's files. Where both have one name, or one API key, the files count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from sidecar.policy.choices import StoredTenants
from sidecar.policy.declared import Context
from sidecar.policy.model import Policy
from sidecar.policy.problems import dotted, quoted
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_keys import PREFIX
from sidecar.policy.validate import read_record as of_data

MOST_RECORD_BYTES = 64 * 1024
"""A tenant with 800 keys. A larger one belongs into a file."""


class InvalidTenant(ValueError):
    """A record that is no tenant. The message has one line for each mistake."""


@dataclass(frozen=True, slots=True)
class StoredTenant:
    """One tenant of the store. `document` is the record as it is stored; `digests` are those of its API keys."""

    tenant: Tenant
    document: Mapping[str, Any]
    digests: tuple[str, ...]

    @property
    def keys(self) -> Sequence[str]:
        """The hashes of its API keys, as a file has them."""
        return [PREFIX + digest for digest in self.digests]

    def text(self) -> bytes:
        """The record as it is stored."""
        return msgspec.json.encode(self.document)


def read_json(text: bytes) -> dict[str, Any]:
    """The mapping in a JSON text. Raises InvalidTenant."""
    if len(text) > MOST_RECORD_BYTES:
        raise InvalidTenant(f"larger than {MOST_RECORD_BYTES} bytes; write a file for it")
    try:
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidTenant(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidTenant('not an object; write one such as {"tenant": "acme", "tier": "normal"}')
    return document


def read_tenant(document: Mapping[str, Any], policy: Policy) -> Tenant:
    """The tenant of a record, or of a file that has been read. Raises InvalidTenant, with every mistake."""
    tenant, mistakes = of_data(Tenant, document, Context(tuple(tier.name for tier in policy.tiers), Path()))
    if tenant is None:
        raise InvalidTenant("\n".join(f"{dotted(path)}: {message}" for path, message in mistakes))
    return tenant


def read_record(text: bytes, policy: Policy) -> StoredTenant:
    """The tenant that a JSON text describes. Raises InvalidTenant, with every mistake."""
    document = read_json(text)
    tenant = read_tenant(document, policy)
    if tenant.keys is None and policy.jwt is None and policy.gateway is None:
        raise InvalidTenant(
            'keys: missing; write "keys": ["sha256:..."], as `sidecar keys new` prints it, or [] where the app names it'
        )
    entries = _entries(tenant, document)
    return StoredTenant(tenant, {**document, "keys": [*entries.values()]} if entries else document, tuple(entries))


def _entries(tenant: Tenant, document: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a record by their digests, each with its hash as the store compares it. Raises InvalidTenant."""
    keys = tenant.keys or ()
    if len({one.digest for one in keys}) < len({*keys}):
        raise InvalidTenant("keys: one key stands there twice, and not the same about it; keep one of them")
    pairs = zip(keys, document.get("keys", ()), strict=True)
    return {
        one.digest: {**written, "hash": PREFIX + one.digest} if isinstance(written, dict) else PREFIX + one.digest
        for one, written in pairs
    }


def with_stored(policy: Policy, stored: Mapping[str, StoredTenant]) -> tuple[Policy, Mapping[str, str]]:
    """The policy of the files with the tenants of the store, and those that it cannot have: why, by their names."""
    named, owners = dict(policy.named), {digest: tenant.name for digest, tenant in policy.tenants.items()}
    unused: dict[str, str] = {}
    for name in sorted(stored):
        one = stored[name]
        if name in policy.named:
            unused[name] = "the policy's files have a tenant of this name, which counts"
            continue
        if taken := [owners[digest] for digest in one.digests if digest in owners]:
            unused[name] = f"one of its keys is already a key of {quoted(taken[0])}"
            continue
        owners.update(dict.fromkeys(one.digests, name))
        named[name] = one.tenant
    return replace(policy, named=MappingProxyType(named), stored_tenants=StoredTenants.READ), unused
