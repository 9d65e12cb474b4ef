"""Use of the tenants on the admin port: `GET /usage`, what all replicas have counted, by day, tenant, tier and model.

`from` and `to` are dates in UTC (default: today), at most `MOST_DAYS` of them; `tenant` is one tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from sidecar.admin.answers import RefusedByPage, json_answer, page
from sidecar.middleware.tenant_usage import TenantUsage
from sidecar.pools.stored_records import StoreSilent

MOST_DAYS = 31
NO_USAGE = (
    "the use of tenants is counted where the pool is in a store, and this one is not, or its policy says usage_days: 0"
)


class UsageRow(msgspec.Struct, frozen=True):
    """What one tenant used of one model in one tier, in a day by UTC. `model` is empty where requests named none."""

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
        return [page("/usage", GET=self._show)]

    async def _show(self, request: Request) -> Response:
        usage = self._usage
        if usage is None:
            raise RefusedByPage(404, "no_usage", NO_USAGE)
        last = _date(request, "to", usage.today())
        first = _date(request, "from", min(last, usage.today()))
        days = [(date.fromisoformat(first) + timedelta(days=at)).isoformat() for at in range(_length(first, last))]
        try:
            found = await usage.of_days(days)
        except StoreSilent as silent:
            raise RefusedByPage(503, "store_unavailable", f"the store does not answer: {silent}") from None
        tenant = request.query_params.get("tenant")
        rows = [UsageRow(*key, *figures) for key, figures in found if tenant in (None, key.tenant)]
        return json_answer(Usage(rows, usage.today()))


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
