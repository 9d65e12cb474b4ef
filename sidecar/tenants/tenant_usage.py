"""Use of the tenants: counted in this process, added to the store once a second, and compared with their budgets.

A request is counted when it ends, in the budgets of all of its accounts. The sums of all replicas come back with the
same call, so a budget may be exceeded by what runs when it is used up, and by what the other replicas count within a
second. The sums of an account that comes after a minute without requests are read at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from calendar import monthrange
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from typing import TYPE_CHECKING

import msgspec

from sidecar.durations import short_duration
from sidecar.errors import RemainingLimits, TenantLimit
from sidecar.policy.model import Policy
from sidecar.policy.tenant import Account, Tenant, account_text
from sidecar.pools import Ask, Pool
from sidecar.pools.base import StoreError
from sidecar.tasks import end, is_set_within
from sidecar.tenants.usage_records import MOST_AT_ONCE, Sums, UsageCharge, UsageFigures, UsageKey

if TYPE_CHECKING:
    from sidecar.tenants.usage import RedisUsage

EVERY_S = 1.0
GATHERED_S = 0.05
"""Tenants that come within so long are read together: at most 20 calls a second beside those for what was counted."""
START_WITHIN_S = 1.0
"""The longest that a start waits for the sums. Until they are known, budgets count from zero."""
STALE_S = 10.0
"""After so long without an answer the operator is notified."""
MOST_MODELS = 50
"""Models of one tenant that are counted apart: clients may write any name."""
MOST_PENDING = 50_000
"""Entries that are kept while the store is away. Beyond, models are not counted apart."""
OTHER = "(other)"
_LONGEST_NAME = 200
_WATCHED_S = 60.0
_DAY_S = 86_400
_NO_SUMS = Sums(0, 0)

_Part = tuple[list[tuple[UsageKey, UsageFigures]], list[UsageCharge]]

_log = logging.getLogger("sidecar.usage")


class BudgetView(msgspec.Struct, frozen=True):
    """A tenant's budget of tokens: what it is, what is used of it, and when it begins anew."""

    tokens: int
    used: int
    ends_in_s: float


class TenantUsage:
    """One per process. `clock` is the wall clock, in seconds; the store's corrects it.

    `policy` is the one in force.
    """

    def __init__(self, records: RedisUsage, policy: Policy, clock: Callable[[], float] = time.time) -> None:
        self._records = records
        self._policy = policy
        self._clock = clock
        self._ahead_s = 0.0  # of the store's clock
        self._pending: dict[tuple[str, str, str, str], list[int]] = {}  # by day, tenant, tier and model
        self._charges: dict[tuple[str, str], int] = {}  # by day and account
        self._part: _Part = [], []  # sent, and not answered yet
        self._fresh: dict[str, int] = {}  # charges of watched accounts since the last synchronization began
        self._unread: dict[str, int] = {}  # and those before, until the sums come back
        self._part_number = 0
        self._models: dict[str, set[str]] = {}
        self._sums: dict[str, Sums] = {}
        self._day = ""
        self._day_ends_s = 0.0
        self._watched: dict[str, float] = {}
        self._newcomers: set[str] = set()  # those whose sums have not been read since they came
        self._has_newcomers = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._read_at_s: float | None = None
        self._problem: str | None = None
        self._failing_since_s = 0.0

    def change_policy(self, policy: Policy) -> None:
        """Another policy is in force."""
        self._policy = policy

    # -- what requests do

    def add(  # noqa: PLR0917  # each request is counted
        self,
        tenant: str,
        tier: str,
        model: str | None,
        input_tokens: int,
        output_tokens: int,
        charged: int | None = None,
        beside: Sequence[Account] = (),
    ) -> None:
        """Counts one request of today.

        `charged` is what counts in the budgets of its tenant and of the accounts `beside` it; None for its tokens.
        """
        key = (self.today(), tenant, tier, self._model(tenant, model or ""))
        figures = self._pending.get(key)
        if figures is None:
            if len(self._pending) >= MOST_PENDING:
                key = (*key[:3], OTHER)
            figures = self._pending.setdefault(key, [0, 0, 0])
        figures[0] += 1
        figures[1] += input_tokens
        figures[2] += output_tokens
        charged = input_tokens + output_tokens if charged is None else charged
        self._charge(key[0], tenant, charged)
        for account in beside:
            if account.limits.budgets:
                self._charge(key[0], account.name, charged)

    def _charge(self, day: str, account: str, tokens: int) -> None:
        self._charges[day, account] = self._charges.get((day, account), 0) + tokens
        if account in self._watched:
            self._fresh[account] = self._fresh.get(account, 0) + tokens

    def within(self, ask: Ask, tenant: Tenant, pool: Pool, beside: Sequence[Account] = ()) -> Ask:
        """The request that may enter the pool: `ask`, or the same at a lower tier. Raises TenantLimit.

        A request counts in the budgets of its tenant, and of the accounts `beside` it, whatever its tier.
        """
        over = self._first_over(tenant, beside)
        if over is None:
            return ask
        if tenant.downgrade_level is not None:
            level = max(ask.tier, tenant.downgrade_level)
            if ask.charged_tokens <= pool.most_tokens(level):
                # Its figures are those of a tier that it does not have.
                return msgspec.structs.replace(ask, tier=level, accounts=(), downgrade=None, gain=None)
        raise over

    def used_up(self, tenant: Tenant, beside: Sequence[Account] = ()) -> TenantLimit | None:
        """The refusal of a request that has waited while a budget was used up. None where it may run.

        A tenant with a lower tier keeps the place for which the request has waited.
        """
        return None if tenant.downgrade_level is not None else self._first_over(tenant, beside)

    def _first_over(self, tenant: Tenant, beside: Sequence[Account]) -> TenantLimit | None:
        """The refusal for the first of the accounts whose budget is used up."""
        for account in (tenant.account, *beside):
            if account.limits.budgets and (over := self._over(account)) is not None:
                return self._refusal(account, over)
        return None

    def _refusal(self, account: Account, over: str) -> TenantLimit:
        budget = self.budgets(account)[over]
        tokens = "weighted tokens" if self._policy.has_costs else "tokens"
        return TenantLimit(
            f"{account_text(account.name)} has used {budget.used:,} {tokens} of its {budget.tokens:,} per {over}; the "
            f"next {over} (UTC) begins in {short_duration(budget.ends_in_s)}",
            retry_after_s=budget.ends_in_s,
            allowance=RemainingLimits(),
        )

    def budgets(self, account: Account) -> Mapping[str, BudgetView]:
        """The account's budgets, by `day` and `month`, as far as this replica knows what was used."""
        self.today()
        used = self._used(account.name)
        return {
            period: BudgetView(tokens, used.month if period == "month" else used.day, self._ends_in_s(period))
            for period, tokens in account.limits.budgets.items()
        }

    def _over(self, account: Account) -> str | None:
        """The budget that is used up: `month` before `day`, None where there is none."""
        if account.name not in self._watched:
            self._newcomers.add(account.name)
            self._has_newcomers.set()
        self._watched[account.name] = self._clock()
        over = [period for period, budget in self.budgets(account).items() if budget.used >= budget.tokens]
        return over[-1] if over else None

    def _used(self, account: str) -> Sums:
        known, here = self._sums.get(account, _NO_SUMS), self._fresh.get(account, 0) + self._unread.get(account, 0)
        return Sums(known.day + here, known.month + here)

    def _model(self, tenant: str, model: str) -> str:
        known = self._models.setdefault(tenant, set())
        if model in known:
            return model
        named = self._policy.called_models.get(model, model)
        if len(named) > _LONGEST_NAME or not named.isprintable():
            return OTHER
        if named not in known:
            if len(known) >= MOST_MODELS:
                return OTHER
            known.add(named)
        return named

    # -- time

    def _now_s(self) -> float:
        return self._clock() + self._ahead_s

    def today(self) -> str:
        """The date by the store's clock, in UTC."""
        now_s = self._now_s()
        if not self._day_ends_s - _DAY_S <= now_s < self._day_ends_s:
            self._begin_day(datetime.fromtimestamp(now_s, timezone.utc))
        return self._day

    def _begin_day(self, now: datetime) -> None:
        before, self._day = self._day, now.strftime("%Y-%m-%d")
        midnight = datetime(now.year, now.month, now.day, tzinfo=timezone.utc) + timedelta(days=1)
        self._day_ends_s = midnight.timestamp()
        known = {*self._sums, *self._fresh, *self._unread} if before[:7] == self._day[:7] else set()
        self._sums = {one: Sums(0, self._used(one).month) for one in known}
        self._fresh, self._unread = {}, {}
        self._models.clear()

    def _ends_in_s(self, period: str) -> float:
        left_s = self._day_ends_s - self._now_s()
        if period == "month":
            today = date.fromisoformat(self._day)
            left_s += _DAY_S * (monthrange(today.year, today.month)[1] - today.day)
        return max(1.0, left_s)

    # -- the store

    async def start(self) -> None:
        """Reads the sums of all tenants with budgets, and begins to add. It takes `START_WITHIN_S` at most."""
        now_s = self._clock()
        self._watched = dict.fromkeys(
            (it.name for tenant in self._policy.named.values() for it in tenant.accounts if it.limits.budgets),
            now_s,
        )
        tried = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._follow(tried), name="sidecar use of tenants")
        await is_set_within(tried, START_WITHIN_S)

    async def stop(self) -> None:
        """Adds the rest, where the store answers."""
        task, self._task = self._task, None
        if task is not None:
            await end(task)
        try:
            await self.flush()
        except StoreError as silent:
            if left := len(self._pending) + len(self._part[0]):
                message = "%d entries of the tenants' use are lost: the store does not answer: %s"
                _log.error(message, left, silent, extra={"event": "usage_lost"})
        await self._records.close()

    def notices(self) -> Sequence[str]:
        """A problem for the operator: use that cannot be added."""
        if self._problem is None or self._clock() - self._failing_since_s < STALE_S:
            return ()
        return [f"the tenants' use is counted here, and cannot be added to the store: {self._problem}"]

    async def flush(self) -> None:
        """Adds all that was counted, and then reads the sums of the tenants with budgets. Raises StoreError."""
        async with self._turn:
            for account, tokens in self._fresh.items():
                self._unread[account] = self._unread.get(account, 0) + tokens
            self._fresh = {}
            left, charges = list(self._pending), list(self._charges)
            while any(self._part) or left or charges:
                if not any(self._part):
                    keys, left = left[:MOST_AT_ONCE], left[MOST_AT_ONCE:]
                    entries = [(UsageKey(*key), UsageFigures(*self._pending.pop(key))) for key in keys]
                    charged, charges = charges[:MOST_AT_ONCE], charges[MOST_AT_ONCE:]
                    self._part = entries, [(*key, self._charges.pop(key)) for key in charged]
                    self._part_number += 1
                await self._send(())
            self._newcomers.clear()
            await self._read_sums(self._list_asked())
            if self._read_at_s is None:  # the store's clock
                await self._send(())
            self._unread, self._problem = {}, None

    async def _read_sums(self, accounts: Sequence[str]) -> None:
        for first in range(0, len(accounts), MOST_AT_ONCE):
            await self._send(accounts[first : first + MOST_AT_ONCE])

    async def _send(self, accounts: Sequence[str]) -> None:
        day = self.today()
        number = self._part_number if any(self._part) else 0
        recorded = await self._records.add(number, *self._part, day, accounts)
        self._part = [], []
        self._read_at_s = self._clock()
        self._ahead_s = recorded.time_s - self._read_at_s
        if day == self.today():
            self._sums.update(recorded.sums)

    async def use_on(self, day: str) -> Mapping[UsageKey, UsageFigures]:
        """Use of a day, as all replicas have added it up. Raises StoreError."""
        return await self._records.use_on(day)

    def _list_asked(self) -> list[str]:
        """The tenants whose sums are read: those with budgets that had requests lately."""
        now_s = self._clock()
        self._watched = {one: at_s for one, at_s in self._watched.items() if now_s - at_s < _WATCHED_S}
        return list(self._watched)

    async def _follow(self, tried: asyncio.Event) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            await self._try(self.flush)
            tried.set()
            ends_s = now_s() + EVERY_S
            while await self._newcomer(ends_s - now_s()):
                await self._try(self._read_newcomers)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        """Tries the work, and again later what the store does not answer."""
        try:
            await work()
        except StoreError as silent:
            if self._problem is None:
                message = "the tenants' use is counted here, and cannot be added to the store: %s"
                _log.warning(message, silent, extra={"event": "usage_kept"})
            self._failed(str(silent))
        except Exception as defect:  # counting goes on
            if self._problem is None:
                _log.exception("a defect in the sidecar: the use of tenants", extra={"event": "defect"})
            self._failed(f"a defect in the sidecar, see the log: {type(defect).__name__}")

    async def _newcomer(self, within_s: float) -> bool:
        """Returns True shortly after a tenant has come, with others that come meanwhile; else False."""
        if not await is_set_within(self._has_newcomers, within_s):
            return False
        await asyncio.sleep(GATHERED_S)
        return True

    async def _read_newcomers(self) -> None:
        async with self._turn:
            self._has_newcomers.clear()
            newcomers, self._newcomers = self._newcomers, set()
            await self._read_sums(list(newcomers))

    def _failed(self, problem: str) -> None:
        if self._problem is None:
            self._failing_since_s = self._clock()
        self._problem = problem
