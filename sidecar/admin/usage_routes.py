"""Use of the tenants on the admin port: `GET /usage`, what all replicas have counted, by day, tenant, tier and model.

`from` and `to` are dates in UTC (default: today), at most `MOST_DAYS` of them; `tenant` is one tenant.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import date, timedelta
from itertools import islice

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute

from sidecar.admin.answers import FRESH, RefusedByPage
from sidecar.admin.operations import MOST_DAYS, routes_for
from sidecar.pools.base import StoreError
from sidecar.tenants.tenant_usage import TenantUsage
from sidecar.tenants.usage_records import UsageFigures, UsageKey

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
