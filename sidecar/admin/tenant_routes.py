"""Tenants on the admin port: those of the policy's files, and those of the store, which are changed here.

`GET /tenants` and `GET /tenants/{name}` list them, `POST /tenants` writes one to the store (with `?replace=true` also
over another), `DELETE /tenants/{name}` removes one; below `/tenants/{name}/keys` its keys are added and revoked. A
change is in force on this replica when it is answered, and on the others within a second. No page and no answer has a
key, or the whole hash of one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sidecar.admin.answers import RefusedByPage, flag, json_answer
from sidecar.admin.operations import routes_for
from sidecar.policy.stored_tenants import MOST_RECORD_BYTES, InvalidTenant
from sidecar.policy.tenant_keys import UnknownKey
from sidecar.pools.base import StoreError
from sidecar.tenants.records import ChangeRefused, RefusedChange
from sidecar.tenants.registry import InFiles, StoredTenantsRegistry, TenantRow

MOST_ROWS = 500
"""Of one answer; `next` leads to the rest."""
NO_STORED_TENANTS = (
    "this policy has no tenants in the store: write `stored_tenants: true` and a `store` into the pool's file, and "
    "start the sidecars anew. The tenants of the policy's files are changed there"
)


_NAMES = "`sidecar tenants list` names them"
_Answer = TypeVar("_Answer")


class Tenants(msgspec.Struct, frozen=True):
    """Tenants by name. `next` is the `after` of the next page, None at the end; `change` counts those of the store."""

    tenants: Sequence[TenantRow]
    next: str | None
    change: int


class Removed(msgspec.Struct, frozen=True):
    """The answer to a removal."""

    removed: str
    change: int


class TenantRoutes:
    """Routes for the admin port. `registry` is None where there are no tenants in the store."""

    def __init__(self, registry: StoredTenantsRegistry | None) -> None:
        self._registry = registry

    def routes(self) -> Sequence[BaseRoute]:
        """See the module."""
        of_all = {"tenants": self._list, "putTenant": self._put}
        of_keys = {"addKey": self._add_key, "revokeKey": self._revoke_key}
        return routes_for({**of_all, **of_keys, "tenant": self._show, "removeTenant": self._remove})

    async def _list(self, request: Request) -> Response:
        registry = self._require()
        rows = registry.rows(request.query_params.get("after", ""), MOST_ROWS + 1)
        names = list(dict.fromkeys(row.tenant for row in rows))
        following = names[MOST_ROWS - 1] if len(names) > MOST_ROWS else None
        shown = [row for row in rows if following is None or row.tenant <= following]
        return json_answer(Tenants(shown, following, registry.version))

    async def _show(self, request: Request, status: int = 200) -> Response:
        registry, name = self._require(), request.path_params["name"]
        rows = registry.rows_named(name)
        if not rows:
            raise RefusedByPage(404, "unknown_tenant", f"no tenant is called {name!r}; {_NAMES}")
        return json_answer(Tenants(rows, None, registry.version), status)

    async def _put(self, request: Request) -> Response:
        registry, replaces = self._require(), flag(request, "replace")
        text = await _body(request)
        row = await _change(lambda: registry.put(text, replaces=replaces))
        return json_answer(Tenants([row], None, registry.version), 200 if replaces else 201)

    async def _remove(self, request: Request) -> Response:
        registry, name = self._require(), request.path_params["name"]
        await _change(lambda: registry.remove(name))
        return json_answer(Removed(name, registry.version))

    async def _add_key(self, request: Request) -> Response:
        registry, name, text = self._require(), request.path_params["name"], await _body(request)
        await _change(lambda: registry.add_key(name, text))
        return await self._show(request, 201)

    async def _revoke_key(self, request: Request) -> Response:
        registry, name = self._require(), request.path_params["name"]
        await _change(lambda: registry.revoke_key(name, request.path_params["key"]))
        return await self._show(request)

    def _require(self) -> StoredTenantsRegistry:
        if self._registry is None:
            raise RefusedByPage(404, "no_stored_tenants", NO_STORED_TENANTS)
        return self._registry


async def _body(request: Request) -> bytes:
    """The whole body. Raises RefusedByPage for one that is larger than a tenant may be."""
    whole = bytearray()
    async for part in request.stream():
        whole += part
        if len(whole) > MOST_RECORD_BYTES:
            raise RefusedByPage(
                413, "body_too_large", f"a tenant of more than {MOST_RECORD_BYTES} bytes; write a file for it"
            )
    return bytes(whole)


async def _change(change: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """The result of a change. Raises RefusedByPage."""
    try:
        return await change()
    except InvalidTenant as invalid:
        raise RefusedByPage(400, "invalid_tenant", str(invalid)) from None
    except UnknownKey as unknown:
        raise RefusedByPage(404, "unknown_key", str(unknown)) from None
    except InFiles as files:
        raise RefusedByPage(409, "tenant_in_files", str(files)) from None
    except StoreError as silent:
        raise RefusedByPage(
            503, "store_unavailable", f"the store does not answer; it may have the change all the same: {silent}"
        ) from None
    except RefusedChange as refused:
        raise _refusal(refused) from None


def _refusal(refused: RefusedChange) -> RefusedByPage:
    if refused.reason is ChangeRefused.UNKNOWN:
        return RefusedByPage(404, "unknown_tenant", f"the store has no tenant of this name; {_NAMES}")
    if refused.reason is ChangeRefused.EXISTS:
        return RefusedByPage(
            409, "tenant_exists", "the store has a tenant of this name; --replace (replace=true) writes over it"
        )
    if refused.reason is ChangeRefused.KEY:
        return RefusedByPage(
            409, "key_in_use", f"one of the keys is a key of tenant {refused.owner}; `sidecar keys new` makes another"
        )
    return RefusedByPage(409, "too_many_tenants", "the store has as many tenants as it may; see docs/write-a-policy.md")
