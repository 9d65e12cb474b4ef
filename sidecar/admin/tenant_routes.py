"""Routes of the admin port for stored tenants, and for what each has used.

`GET /tenants` and `GET /tenants/{name}` list them, `POST /tenants` writes one to the store (with `?replace=true` also
over another), `DELETE /tenants/{name}` removes one; below `/tenants/{name}/keys` its keys are added and revoked. A
change is in force on this replica when it is answered, and on the others within a second. No page and no answer has a
key, or the whole hash of one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import date, timedelta
from itertools import islice
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute

from sidecar.admin.answers import FRESH, RefusedByPage, flag, json_answer
from sidecar.admin.operations import MOST_DAYS, routes_for
from sidecar.policy.stored_tenants import MOST_RECORD_BYTES, InvalidTenant
from sidecar.policy.tenant_keys import UnknownKey
from sidecar.pools.base import StoreError
from sidecar.tenants.records import ChangeRefused, RefusedChange
from sidecar.tenants.registry import InFiles, StoredTenantsRegistry, TenantRow
from sidecar.tenants.tenant_usage import TenantUsage
from sidecar.tenants.usage_records import UsageFigures, UsageKey

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


# -- Use of the tenants on the admin port: `GET /usage`, what all replicas have counted, by day, tenant, tier and model.
#
# `from` and `to` are dates in UTC (default: today), at most `MOST_DAYS` of them; `tenant` is one tenant.

_AT_ONCE = 2_000
"""Rows that are sorted, or written, in one go: milliseconds, in which no request is admitted."""
NO_USAGE = (
    "the use of tenants is counted where the pool is in a store, and this one is not, or its policy says usage_days: 0"
)


class UsageRow(msgspec.Struct, frozen=True):
    """Use by one tenant of one model in one tier, in a day by UTC. `model` is empty where requests named none."""

    day: str
    tenant: str
    tier: str
    model: str
    requests: int
    input_tokens: int
    output_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """The answer of `GET /usage`. `today` is the date by the store's clock."""

    rows: Sequence[UsageRow]
    today: str


class UsageRoutes:
    """Routes for the admin port. `usage` is None where it is not counted."""

    def __init__(self, usage: TenantUsage | None) -> None:
        self._usage = usage

    def routes(self) -> Sequence[BaseRoute]:
        """See the module."""
        return routes_for({"usage": self._show})

    async def _show(self, request: Request) -> Response:
        usage = self._usage
        if usage is None:
            raise RefusedByPage(404, "no_usage", NO_USAGE)
        last = _date(request, "to", usage.today())
        first = _date(request, "from", min(last, usage.today()))
        days = [(date.fromisoformat(first) + timedelta(days=at)).isoformat() for at in range(_length(first, last))]
        parts: list[bytes] = []
        try:
            await usage.flush()
            for day in days:
                parts += [part async for part in _rows(await usage.use_on(day), request.query_params.get("tenant"))]
        except StoreError as silent:
            raise RefusedByPage(503, "store_unavailable", f"the store does not answer: {silent}") from None
        return StreamingResponse(_document(parts, usage.today()), 200, FRESH, "application/json")


async def _rows(found: Mapping[UsageKey, UsageFigures], tenant: str | None) -> AsyncIterator[bytes]:
    """The rows of a day, of one tenant or of all, by their names: in parts, each a JSON list without its brackets."""
    keys = [key for key in found if tenant in (None, key.tenant)]
    sorted_parts = []
    for first in range(0, len(keys), _AT_ONCE):
        sorted_parts.append(sorted(keys[first : first + _AT_ONCE]))
        await asyncio.sleep(0)
    following = heapq.merge(*sorted_parts)
    while some := list(islice(following, _AT_ONCE)):
        yield msgspec.json.encode([UsageRow(*key, *found[key]) for key in some])[1:-1]
        await asyncio.sleep(0)


async def _document(parts: Sequence[bytes], today: str) -> AsyncIterator[bytes]:
    """A `Usage` as JSON: there may be more rows than one answer should be made of."""
    yield b'{"rows":['
    for number, part in enumerate(parts):
        yield b"," + part if number else part
    yield b'],"today":' + msgspec.json.encode(today) + b"}"


def _date(request: Request, name: str, default: str) -> str:
    written = request.query_params.get(name, default)
    try:
        return date.fromisoformat(written).isoformat()
    except ValueError:
        raise RefusedByPage(400, "bad_parameter", f"{name}: {written!r} is no date; write one like {default}") from None


def _length(first: str, last: str) -> int:
    """The number of days. Raises RefusedByPage."""
    days = (date.fromisoformat(last) - date.fromisoformat(first)).days + 1
    if days < 1:
        raise RefusedByPage(400, "bad_parameter", f"from: {first} is after {last}")
    if days > MOST_DAYS:
        raise RefusedByPage(400, "bad_parameter", f"from: {days} days are more than {MOST_DAYS}; ask for them in parts")
    return days
