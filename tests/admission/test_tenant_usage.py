"""Use of tenants: a literal ledger beside the real store, faults on purpose, and budgets through real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from sidecar import AdmissionMiddleware
from sidecar.admin import tenant_routes
from sidecar.cli import main
from sidecar.errors import TenantLimit
from sidecar.policy.model import Policy
from sidecar.policy.store import store_address
from sidecar.policy.tenant import Account, AccountLimits, Limits, Tenant
from sidecar.pools import Ask, Pool
from sidecar.pools.base import StoreError
from sidecar.pools.redis.connection import StoreConnection
from sidecar.tenants import tenant_usage
from sidecar.tenants.tenant_usage import MOST_MODELS, OTHER, TenantUsage
from sidecar.tenants.usage import RedisUsage, usage_connector
from sidecar.tenants.usage_records import Recorded, Sums, UsageCharge, UsageFigures, UsageKey
from tests.support.examples import examples
from tests.support.middleware import CHAT, App, answer, chat, key, policy, whole_body, write_policy
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.stored_sidecar import Sidecar, sidecar
from tests.support.wire import post

pytestmark = pytest.mark.anyio
NOON = datetime(2026, 11, 30, 12, tzinfo=timezone.utc).timestamp()
DAY_S = 86_400


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(first_binary(), tmp_path_factory.mktemp("store")) as server:
        yield server


class Clock:
    """Wall clocks that only the test moves: the store's, and those of replicas."""

    def __init__(self) -> None:
        self.now_s = NOON

    def skewed(self, by_s: float) -> Any:
        return lambda: self.now_s + by_s


class Ledger:
    """What a store keeps, written as plainly as can be. A test takes it away, or loses its answers."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.entries: dict[UsageKey, UsageFigures] = {}
        self.charges: list[UsageCharge] = []
        self.parts: dict[object, int] = {}
        self.is_away = self.loses_answers = False

    def add(  # noqa: PLR0917
        self,
        replica: object,
        part: int,
        entries: Sequence[tuple[UsageKey, UsageFigures]],
        charges: Sequence[UsageCharge],
        day: str,
        accounts: Sequence[str],
    ) -> Recorded:
        if self.is_away:
            raise StoreError("away")
        if part > self.parts.get(replica, 0):
            self.parts[replica] = part
            for name, figures in entries:
                self.entries[name] = total((self.entries.get(name), figures))
            self.charges += charges
        if self.loses_answers:
            raise StoreError("lost")
        return Recorded(self.clock.now_s, {account: self.sums(account, day) for account in accounts})

    def sums(self, account: str, day: str) -> Sums:
        mine = [(at, tokens) for at, one, tokens in self.charges if one == account]
        return Sums(sum(t for at, t in mine if at == day), sum(t for at, t in mine if at[:7] == day[:7]))


class OfLedger:
    """One replica's records in the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def add(self, part: int, entries: Any, charges: Any, day: str, accounts: Sequence[str]) -> Recorded:
        return self._ledger.add(self, part, list(entries), list(charges), day, accounts)

    async def use_on(self, day: str) -> Mapping[UsageKey, UsageFigures]:
        if self._ledger.is_away:
            raise StoreError("away")
        return {name: figures for name, figures in self._ledger.entries.items() if name.day == day}

    async def close(self) -> None:
        pass


def total(figures: Iterable[UsageFigures | None]) -> UsageFigures:
    """Sum of figures."""
    return UsageFigures(*map(sum, zip(*filter(None, figures), strict=True)))


def usage_of(ledger: Ledger, skew_s: float = 0.0) -> TenantUsage:
    with_models = policy()
    return TenantUsage(OfLedger(ledger), with_models, ledger.clock.skewed(skew_s))


def budgeted(day: int | None = None, month: int | None = None, downgrade: int | None = None) -> Tenant:
    return Tenant(
        name="acme",
        level=2,
        max_level=1,
        limits=Limits(tokens_per_day=day, tokens_per_month=month),
        downgrade_level=downgrade,
    )


def refused(usage: TenantUsage, tenant: Tenant) -> TenantLimit | None:
    """The refusal of a small request; None where it may enter."""
    try:
        usage.within(Ask(2, tenant.name, 1, 10, 1), tenant, Pool(policy()))
    except TenantLimit as over:
        return over
    return None


STEPS = some.lists(
    some.one_of(
        some.tuples(some.just("count"), some.integers(0, 1), some.sampled_from("ab"), some.integers(0, 50)),
        some.tuples(some.just("flush"), some.integers(0, 1), some.just(""), some.just(0)),
        some.tuples(some.sampled_from(["away", "lost", "back"]), some.just(0), some.just(""), some.just(0)),
        some.tuples(some.just("later"), some.just(0), some.just(""), some.integers(1, DAY_S)),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=examples(20))
def test_nothing_is_lost_and_nothing_counted_twice(steps: list[tuple[str, int, str, int]]) -> None:
    """Whatever the store does, as long as it comes back: all that was counted is there, on the day it was counted."""
    asyncio.run(count_and_compare(steps))


async def count_and_compare(steps: list[tuple[str, int, str, int]]) -> None:
    clock = Clock()
    ledger = Ledger(clock)
    replicas = [usage_of(ledger, skew_s) for skew_s in (0.0, -5_000.0)]
    for one in replicas:
        await one.flush()  # so that they know the store's clock
    expected: dict[UsageKey, UsageFigures] = {}
    for kind, at, tenant, number in steps:
        if kind == "count":
            replicas[at].add(tenant, "normal", "m", number, number // 2)
            day = datetime.fromtimestamp(clock.now_s, timezone.utc).strftime("%Y-%m-%d")
            name = UsageKey(day, tenant, "normal", "m")
            one_more = UsageFigures(1, number, number // 2)
            expected[name] = total((expected.get(name), one_more))
        elif kind == "flush":
            try:
                await replicas[at].flush()
            except StoreError:
                assert ledger.is_away or ledger.loses_answers
        elif kind == "later":
            clock.now_s += number
        else:
            ledger.is_away, ledger.loses_answers = kind == "away", kind == "lost"
    ledger.is_away = ledger.loses_answers = False
    for one in replicas:
        await one.flush()
        await one.flush()
    assert ledger.entries == expected
    today = replicas[0].today()
    for tenant in "ab":
        named = Tenant(name=tenant, level=2, max_level=2, limits=Limits(tokens_per_day=10**9, tokens_per_month=10**9))
        for one in replicas:
            assert refused(one, named) is None
            await one.flush()
            budgets = one.budgets(named.account)
            assert (budgets["day"].used, budgets["month"].used) == ledger.sums(tenant, today)


PARTS = some.lists(
    some.tuples(
        some.integers(0, 1),  # the replica
        some.integers(0, 3),  # the part
        some.lists(
            some.tuples(
                some.sampled_from(["2026-11-29", "2026-11-30", "2026-12-01"]),
                some.sampled_from(["acme", "bulk"]),
                some.sampled_from(["", "m", "a model, of many words", "=1+2"]),
                some.integers(0, 2**40),
            ),
            max_size=3,
        ),
        some.lists(some.integers(0, 2**50), max_size=3),  # what counts in budgets
    ),
    max_size=8,
)


@given(PARTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_store_keeps_what_the_ledger_keeps(shared_store: RedisServer, parts: list[Any]) -> None:
    """The same parts, some of them sent again, to the real store and to the literal ledger."""
    asyncio.run(compare(shared_store, parts))


async def compare(server: RedisServer, parts: list[Any]) -> None:
    server.command("FLUSHALL")
    ledger = Ledger(Clock())
    connect = usage_connector(store_address(server.url), "p")
    replicas = [RedisUsage(connect, 62) for _ in range(2)]
    for at, part, listed, charged in parts:
        entries = [(UsageKey(day, who, "normal", model), UsageFigures(1, n, n // 3)) for day, who, model, n in listed]
        entries = list(dict(entries).items()) if part else []
        accounts = [key.tenant + " model a b" * (place % 2) for place, (key, _) in enumerate(entries)]
        charges = [
            (key.day, account, tokens) for (key, _), account, tokens in zip(entries, accounts, charged, strict=False)
        ]
        asked = "2026-11-30", ["acme", "bulk", "other", "bulk model a b"]
        expected = ledger.add(at, part, entries, charges, *asked)
        found = await replicas[at].add(part, entries, charges, *asked)
        assert found.sums == expected.sums
    for day in ("2026-11-29", "2026-11-30", "2026-12-01"):
        assert await replicas[0].use_on(day) == {name: one for name, one in ledger.entries.items() if name.day == day}
    for one in replicas:
        await one.close()


@pytest.fixture
async def records(store: RedisServer) -> AsyncIterator[RedisUsage]:
    found = RedisUsage(usage_connector(store_address(store.url), "p"), 62)
    yield found
    await found.close()


async def test_a_day_of_many_entries_is_read_in_pages(store: RedisServer, records: RedisUsage) -> None:
    entries = [(UsageKey("2026-11-30", f"t{n}", "normal", "m"), UsageFigures(1, n, 0)) for n in range(3_000)]
    for part in range(30):
        await records.add(part + 1, entries[100 * part : 100 * part + 100], [], "2026-11-30", [])
    assert await records.use_on("2026-11-30") == dict(entries)
    store.command("HSET", "admission:usage:{p}:2026-11-30", "another program's", "1", "a\tb\tc", "x y z")
    assert await records.use_on("2026-11-30") == dict(entries)
    kept_s = store.command("TTL", "admission:usage:{p}:2026-11-30")
    assert 62 * DAY_S < kept_s <= 63 * DAY_S


@pytest.mark.parametrize("period", ["day:2026-11-30", "month:2026-11"])
async def test_a_sum_that_someone_spoiled_makes_no_other_tenant_pay_twice(
    store: RedisServer, records: RedisUsage, period: str
) -> None:
    key = f"admission:usage:{{p}}:{period}"
    entries = [(UsageKey("2026-11-30", tenant, "normal", "m"), UsageFigures(1, 5, 2)) for tenant in ("acme", "bulk")]
    charges = [("2026-11-30", tenant, 7) for tenant in ("acme", "bulk")]
    store.command("HSET", key, "bulk", "a few")
    for _ in range(3):
        await records.add(1, entries, charges, "2026-11-30", [])
    assert await records.use_on("2026-11-30") == dict(entries)
    assert (await records.add(0, [], [], "2026-11-30", ["acme", "bulk"])).sums == {"acme": (7, 7), "bulk": (7, 7)}
    store.command("SET", key, "of another type")
    for _ in range(3):
        with pytest.raises(StoreError):
            await records.add(2, entries, charges, "2026-11-30", ["bulk"])
    store.command("DEL", key)
    await records.add(2, entries, charges, "2026-11-30", [])
    assert (await records.use_on("2026-11-30"))[entries[0][0]] in (UsageFigures(1, 5, 2), UsageFigures(2, 10, 4))


async def test_an_answer_that_is_lost_on_the_way_from_the_real_store(
    records: RedisUsage, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, lost = StoreConnection.run, []

    async def run(self: StoreConnection, script: Any, arguments: Any) -> list[Any]:
        found = await original(self, script, arguments)
        if len(lost) < 3:
            lost.append(arguments)
            raise StoreError("lost")
        return found

    usage = TenantUsage(records, policy())
    usage.add("acme", "normal", "m", 7, 5)
    monkeypatch.setattr(StoreConnection, "run", run)
    for _ in range(3):
        with contextlib.suppress(StoreError):
            await usage.flush()
        usage.add("acme", "normal", "m", 1, 0)
    assert len(lost) == 3
    await usage.flush()
    (found,) = (await usage.use_on(usage.today())).items()
    assert found[1].input_tokens - found[1].requests == 7 - 1
    assert found[1].output_tokens == 5


async def test_a_budget_ends_at_midnight_by_the_stores_clock() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    usage, tenant = usage_of(ledger, skew_s=11 * 3600.0 + 1800), budgeted(day=100)  # this machine is 11.5 h ahead
    await usage.flush()
    assert refused(usage, tenant) is None
    usage.add("acme", "normal", "m", 60, 39)
    assert refused(usage, tenant) is None
    usage.add("acme", "normal", "m", 1, 0)
    over = refused(usage, tenant)
    assert over is not None
    assert "has used 100 tokens of its 100 per day; the next day (UTC) begins in 12 h 00 m" in over.message
    assert (over.status, over.retry_after_s) == (429, 12 * 3600)
    await usage.flush()
    assert refused(usage, tenant) is not None
    clock.now_s += 12 * 3600 - 1
    assert refused(usage, tenant) is not None
    clock.now_s += 1
    assert refused(usage, tenant) is None
    assert usage.today() == "2026-12-01"
    await usage.flush()
    assert [name.day for name in ledger.entries] == ["2026-11-30"]


async def test_a_budget_of_a_month_outlasts_the_day() -> None:
    clock = Clock()
    clock.now_s -= 2 * DAY_S  # November 28th
    ledger = Ledger(clock)
    usage, tenant = usage_of(ledger), budgeted(day=10, month=15)
    await usage.flush()
    usage.add("acme", "normal", "m", 10, 0)
    assert refused(usage, tenant) is None  # it has not been looked at before: the sum comes with the next flush
    await usage.flush()
    over = refused(usage, tenant)
    assert over is not None
    assert "of its 10 per day" in over.message
    clock.now_s += DAY_S
    assert refused(usage, tenant) is None
    usage.add("acme", "normal", "m", 5, 0)
    over = refused(usage, tenant)
    assert over is not None
    assert "has used 15 tokens of its 15 per month; the next month (UTC) begins in 36 h" in over.message
    clock.now_s += 1.5 * DAY_S
    assert refused(usage, tenant) is None


async def test_a_budget_of_a_month_outlasts_a_midnight_without_the_store() -> None:
    clock = Clock()
    clock.now_s -= 2 * DAY_S
    ledger = Ledger(clock)
    usage, tenant = usage_of(ledger), budgeted(month=15)
    await usage.flush()
    assert refused(usage, tenant) is None
    ledger.is_away = True
    for sent in (8, 4):
        usage.add("acme", "normal", "m", sent, 0)
        with pytest.raises(StoreError):
            await usage.flush()
    clock.now_s += DAY_S
    assert usage.budgets(tenant.account)["month"].used == 12
    usage.add("acme", "normal", "m", 3, 0)
    assert refused(usage, tenant) is not None
    ledger.is_away = False
    await usage.flush()
    assert usage.budgets(tenant.account)["month"].used == 15
    clock.now_s += 2 * DAY_S  # another month
    assert refused(usage, tenant) is None


async def test_a_replica_that_has_not_seen_a_tenant_lately_reads_its_sums_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_usage, "EVERY_S", 3600.0)
    monkeypatch.setattr(tenant_usage, "GATHERED_S", 0.01)
    ledger = Ledger(Clock())
    one, other, tenant = usage_of(ledger), usage_of(ledger), budgeted(day=100)
    one.add("acme", "normal", "m", 50, 50)
    await one.flush()
    await other.start()
    for _ in range(3):  # of a moment
        assert refused(other, tenant) is None
    await asyncio.sleep(0.1)
    assert refused(other, tenant) is not None
    ledger.clock.now_s += DAY_S  # the next day, which is another month
    one.add("acme", "normal", "m", 50, 50)
    await one.flush()
    await other.flush()  # it has not been asked for for a minute
    ledger.is_away = True
    assert refused(other, tenant) is None
    await asyncio.sleep(0.1)
    ledger.is_away = False
    assert refused(other, tenant) is None  # the store did not answer
    await other.flush()
    assert refused(other, tenant) is not None
    await other.stop()


async def test_a_tenant_over_its_budget_falls_to_the_lower_tier_where_it_has_one() -> None:
    usage, pool = usage_of(Ledger(Clock())), Pool(policy())
    tenant = budgeted(day=1, downgrade=3)
    assert refused(usage, tenant) is None
    usage.add("acme", "normal", "m", 1, 0)
    ask = Ask(2, "acme", 1, 10, 1, accounts=(Account("acme", tenant.limits),), downgrade=3)
    lower = usage.within(ask, tenant, pool)
    assert (lower.tier, lower.accounts, lower.downgrade) == (3, (), None)
    with pytest.raises(TenantLimit):  # where the lower tier could never hold it, it is over its limit
        usage.within(Ask(2, "acme", 1, 10**9, 1), tenant, pool)


async def test_a_budget_at_a_model_counts_beside_the_tenants_own_on_every_replica() -> None:
    ledger = Ledger(Clock())
    one, other = usage_of(ledger), usage_of(ledger)
    limits = Limits(tokens_per_day=100, models={"m": AccountLimits(tokens_per_day=30, tokens_per_month=1000)})
    tenant = Tenant(name="acme", level=2, max_level=1, limits=limits)
    at_model = tenant.account_at("m")
    assert at_model is not None
    assert (tenant.account_at("other"), one.used_up(tenant, [at_model])) == (None, None)
    assert other.used_up(tenant, [at_model]) is None
    one.add("acme", "normal", "m", 5, 5, 40, [at_model])  # by its weights
    for usage in (one, other):
        await usage.flush()
        over = usage.used_up(tenant, [at_model])
        assert over is not None
        assert "tenant acme (model m) has used 40 tokens of its 30 per day" in over.message
        assert (usage.used_up(tenant), usage.budgets(tenant.account)["day"].used) == (None, 40)
        assert usage.budgets(at_model)["month"].used == 40
    other.add("acme", "normal", "other", 30, 30)
    await other.flush()
    await one.flush()
    over = one.used_up(tenant, [at_model])
    assert over is not None
    assert "tenant acme has used 100 tokens of its 100 per day" in over.message
    assert list(ledger.entries.values()) == [UsageFigures(1, 5, 5), UsageFigures(1, 30, 30)]


async def test_names_that_clients_make_up_are_counted_together() -> None:
    ledger = Ledger(Clock())
    usage = usage_of(ledger)
    for number in range(MOST_MODELS + 20):
        usage.add("acme", "normal", f"m{number}", 1, 0)
    for name in ("m\n1", "m\t1", "m" * 1_000, "\x1b[2J"):
        usage.add("acme", "normal", name, 1, 0)
    usage.add("bulk", "normal", "m60", 1, 0)  # another tenant's names are its own
    usage.add("bulk", "normal", None, 1, 0)
    await usage.flush()
    found = {(name.tenant, name.model): figures.requests for name, figures in ledger.entries.items()}
    assert len(found) == MOST_MODELS + 1 + 2
    assert found["acme", OTHER] == 24
    assert (found["bulk", "m60"], found["bulk", ""]) == (1, 1)


async def test_while_the_store_is_away_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_usage, "MOST_PENDING", 10)
    ledger = Ledger(Clock())
    usage = usage_of(ledger)
    ledger.is_away = True
    for number in range(40):
        usage.add("acme", "normal", f"m{number}", 1, 0)
    assert len(usage._pending) <= 11
    ledger.is_away = False
    await usage.flush()
    assert sum(figures.requests for figures in ledger.entries.values()) == 40


async def test_a_store_that_stays_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_usage, "EVERY_S", 0.01)
    monkeypatch.setattr(tenant_usage, "STALE_S", 0.0)
    ledger = Ledger(Clock())
    ledger.is_away = True
    usage = usage_of(ledger)
    await usage.start()
    assert usage.notices() == ["the tenants' use is counted here, and cannot be added to the store: away"]
    ledger.is_away = False
    await asyncio.sleep(0.1)
    assert usage.notices() == ()
    usage.add("acme", "normal", "m", 1, 2)
    await usage.stop()  # adds what is left
    assert list(ledger.entries.values()) == [UsageFigures(1, 1, 2)]


class CountingApp(App):
    """Answers with a usage of 30 and 12 tokens."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        await whole_body(receive)
        usage = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
        await answer(send, json.dumps({"choices": [], "usage": usage}).encode())


async def shown(one: Sidecar, query: str = "") -> list[Any]:
    """The rows of `GET /usage`, without the day."""
    status, found = await one.call("GET", f"/usage{query}")
    assert status == 200, found
    return [[value for name, value in row.items() if name != "day"] for row in found["rows"]]


async def test_requests_are_counted_and_the_budget_holds_on_every_replica_and_after_a_restart(
    tmp_path: Path, store: RedisServer
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    budget = {"acme": "limits: {tokens_per_day: 100, tokens_per_month: 10k}\n"}
    async with (
        sidecar(tmp_path / "a", store.url, app=CountingApp(), **budget) as one,
        sidecar(tmp_path / "b", store.url, app=CountingApp(), **budget) as other,
    ):
        assert [await one.status("sk-acme"), await other.status("sk-acme"), await one.status("sk-nightly")] == [200] * 3
        assert await one.status("sk-acme") == 200  # 126 now
        refusal = await one.ask(key("acme"))
        assert refusal.status in (200, 429)

        async def is_refused() -> bool:
            return await other.status("sk-acme") == 429

        await other.until(is_refused, 2.5)
        refusal = await other.ask(key("acme"))
        assert refusal.is_error(429, "tenant_limit")
        assert 0 < int(refusal.headers["retry-after"]) <= DAY_S
        assert await one.status("sk-nightly") == 200
        rows = await shown(one)
        of_acme = next(row for row in rows if row[0] == "acme")
        assert of_acme[1:3] == ["normal", "m"]
        assert (of_acme[4], of_acme[5]) == (30 * of_acme[3], 12 * of_acme[3])
        assert ["nightly", "batch", "m", 1, 30, 12] in rows or ["nightly", "batch", "m", 2, 60, 24] in rows
        assert await shown(other, "?tenant=nightly") == [["nightly", "batch", "m", 2, 60, 24]]
        own = await one.get("/v1/admission/self", key("acme"))
        limits = json.loads(own.body)["limits"]
        assert limits["tokens_per_day"]["tokens"] == 100
        assert limits["tokens_per_day"]["used"] == limits["tokens_per_month"]["used"] >= 126
        assert round(limits["tokens_per_day"]["ends_in_s"], 1) == limits["tokens_per_day"]["ends_in_s"] <= DAY_S
    async with sidecar(tmp_path / "a", store.url, app=CountingApp(), **budget) as anew:
        assert await anew.status("sk-acme") == 429  # the first request knows
        assert await anew.status("sk-nightly") == 200


class Gated(CountingApp):
    """Answers once `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.open.wait()
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize(("over", "waited"), [("reject", 429), ("{downgrade: batch}", 200)])
async def test_what_waits_while_a_budget_is_used_up_is_refused_when_its_turn_comes(
    tmp_path: Path, store: RedisServer, over: str, waited: int
) -> None:
    budget = {"acme": f"limits: {{tokens_per_day: 100}}\nover_limit: {over}\n"}
    app = Gated()
    async with sidecar(tmp_path, store.url, app=app, **budget) as one:  # four may run at once
        asked = [asyncio.ensure_future(one.ask(key("acme"))) for _ in range(7)]

        async def wait() -> bool:
            tiers = one.middleware.controller.pool.state()["tiers"]
            return sum(tier["queued"]["requests"] for tier in tiers) == 3  # type: ignore[attr-defined]

        await one.until(wait, 10.0)
        lease = one.middleware.admission.lease(tokens=1, tenant="acme")
        leased = asyncio.ensure_future(lease.__aenter__())
        await asyncio.sleep(0.2)
        app.open.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers].count(200) == (4 if waited == 429 else 7)
        refused = [answer for answer in answers if answer.status == 429]
        assert all(answer.is_error(429, "tenant_limit") for answer in refused)
        assert all(float(answer.headers["x-admission-wait-ms"]) > 100 for answer in refused)
        if waited == 429:
            with pytest.raises(TenantLimit):
                await leased
        else:
            await leased
            await lease.__aexit__(None, None, None)

        async def is_free() -> bool:
            state = one.middleware.controller.pool.state()
            return (state["leases"], state["waiting"]) == (0, 0)

        await one.until(is_free, 60.0)


class Rude(App):
    """Answers as the request's `model` says: a status, or a body; `hang` never does."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        model = json.loads(await whole_body(receive))["model"]
        if model.isdecimal():
            await answer(send, b'{"error": {}}', status=int(model))
        elif model == "hang":
            self.hangs.set()
            while (await receive())["type"] != "http.disconnect":
                pass
        elif model == "slow":  # a whole answer that is slow to pass, in parts
            start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
            await send(start)
            for _ in range(100):
                await send({"type": "http.response.body", "body": b"word " * 100, "more_body": True})
                await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await answer(send, model.encode())


@pytest.mark.parametrize("mode", ["enforce", "observe"])
@pytest.mark.parametrize(
    ("model", "output"),
    [
        ('{"usage": {"prompt_tokens": 2, "completion_tokens": 7}}', 7),
        ('{"usage": {"prompt_tokens": -2, "completion_tokens": 1e99}}', 100),
        ('{"choices": [{"message": {"content": "no usage"}}]}', 100),
        ("slow", 100),
        ("hang", 0),
    ],
)
async def test_no_rude_engine_or_client_hides_what_was_used(
    tmp_path: Path, store: RedisServer, model: str, output: int, mode: str
) -> None:
    app = Rude()
    async with sidecar(tmp_path, store.url, f"mode: {mode}\n", app=app) as one:
        for failing in ("500", "503", "429", "400"):  # none of these is counted
            await leave(one, app, failing)
        await leave(one, app, model)

        async def is_counted() -> bool:
            return bool(await shown(one))

        await one.until(is_counted, 60.0)
        (row,) = await shown(one)
        assert (row[3], row[5]) == (1, output)


async def leave(one: Sidecar, app: Rude, model: str) -> None:
    """A request whose client leaves at the end of the answer, or before it where there is none."""
    raw = json.dumps({**chat(), "model": model, "max_tokens": 100}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    writer.write(post(CHAT, raw, key("acme")))
    if model == "hang":
        await asyncio.wait_for(app.hangs.wait(), 60)
    else:
        await asyncio.wait_for(reader.read(100 if model == "slow" else -1), 60)
    writer.close()


async def test_in_the_dry_run_use_is_counted_and_no_budget_refuses(tmp_path: Path, store: RedisServer) -> None:
    budget = {"acme": "limits: {tokens_per_day: 1}\n"}
    async with sidecar(tmp_path, store.url, "mode: observe\n", app=CountingApp(), **budget) as one:
        assert [await one.status("sk-acme") for _ in range(3)] == [200] * 3
        assert await shown(one) == [["acme", "normal", "m", 3, 90, 36]]
        _, report = await one.call("GET", "/observed")
        assert report["total"]["refused"]["tenant_limit"] >= 2  # the first one's shadow may look when it has ended


async def test_leases_from_python_count_and_are_refused_over_a_budget(tmp_path: Path, store: RedisServer) -> None:
    budget = {"acme": "limits: {tokens_per_day: 50}\n"}
    async with sidecar(tmp_path, store.url, **budget) as one:
        admission = one.middleware.admission
        async with admission.lease(tokens=80, tenant="acme", prompt_tokens=20) as lease:
            lease.used(60)
        assert await shown(one) == [["acme", "normal", "", 1, 20, 40]]
        with pytest.raises(TenantLimit, match="has used 60 tokens of its 50 per day"):
            async with admission.lease(tokens=1, tenant="acme"):
                pass


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?from=yesterday", "from: 'yesterday' is no date"),
        ("?from=2026-11-02&to=2026-11-01", "from: 2026-11-02 is after 2026-11-01"),
        ("?from=2026-01-01&to=2026-11-01", "305 days are more than 31"),
        ("?to=2026-02-30", "to: '2026-02-30' is no date"),
    ],
)
async def test_bad_dates_say_what_would_be_right(tmp_path: Path, store: RedisServer, query: str, said: str) -> None:
    async with sidecar(tmp_path, store.url) as one:
        status, found = await one.call("GET", f"/usage{query}")
        assert (status, found["error"]["code"]) == (400, "bad_parameter")
        assert said in found["error"]["message"]


async def test_the_command_and_a_name_that_a_spreadsheet_would_run(
    tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sidecar(tmp_path, store.url) as one:
        usage = one.middleware.controller.usage
        assert usage is not None
        assert await one.command("usage") == 0
        assert capsys.readouterr().out == "nothing was used\n"
        usage.add("acme", "normal", "=cmd|' /C calc'!A0", 1_000, 234)
        usage.add("acme", "batch", 'a "model", of words', 1, 1)
        assert await one.command("usage", "--days", "3", "--csv") == 0
        rows = list(csv.reader(capsys.readouterr().out.splitlines()))
        today = usage.today()
        assert rows == [
            ["day", "tenant", "tier", "model", "requests", "input_tokens", "output_tokens"],
            [today, "acme", "batch", 'a "model", of words', "1", "1", "1"],
            [today, "acme", "normal", "'=cmd|' /C calc'!A0", "1", "1000", "234"],
        ]
        assert await one.command("usage", "--by", "tenant", "--from", today) == 0
        assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
            "TENANT REQUESTS INPUT OUTPUT TOKENS",
            "acme 2 1,001 235 1,236",
            "",
            "all: 2 requests, 1,001 + 235 = 1,236 tokens",
        ]
        assert await one.command("usage", "--days", "62", "--tenant", "nightly", "--json", "-") == 0
        assert json.loads(capsys.readouterr().out) == {"rows": [], "today": today}


async def test_days_at_the_ends_of_all_calendars(
    tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sidecar(tmp_path, store.url) as one:
        for words, status, said in (
            (["--to", "0001-01-01", "--days", "5"], 0, "nothing was used"),
            (["--from", "9999-12-30", "--to", "9999-12-31"], 0, "nothing was used"),
            (["--from", "9999-12-31"], 1, "--from 9999-12-31 is after today"),
            (["--from", "0001-01-01"], 1, "days ago; use is kept for 400 days at most"),
        ):
            assert await one.command("usage", *words) == status
            printed = capsys.readouterr()
            assert said in printed.out + printed.err


async def test_the_use_of_thousands_is_written_in_parts(
    tmp_path: Path, store: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_routes, "_AT_ONCE", 700)
    async with sidecar(tmp_path, store.url) as one:
        usage = one.middleware.controller.usage
        assert usage is not None
        names = [f"t{number}" for number in range(3_000)]
        for name in names:
            usage.add(name, "normal", "m", 1, 2)
        status, found = await one.call("GET", "/usage")
        assert (status, [row["tenant"] for row in found["rows"]]) == (200, sorted(names))
        assert found["today"] == usage.today()
        assert await one.command("usage", "--csv") == 0
        assert len(capsys.readouterr().out.splitlines()) == 3_001
        store.kill()
        assert (await one.call("GET", "/usage"))[1]["error"]["code"] == "store_unavailable"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--days", "0"], "'0' is no number of days"),
        (["--by", "day,day"], "or one twice"),
        (["--by", "price"], "names other than day,tenant,tier,model"),
        (["--from", "2026-11-02", "--to", "2026-11-01"], "is after"),
    ],
)
def test_a_wrong_command_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["usage", *words])
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    assert said in capsys.readouterr().err


def test_budgets_without_a_store_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_policy(tmp_path, acme="limits: {tokens_per_month: 1M}\n")
    with pytest.raises(ValueError, match="tenant acme has tokens_per_day or tokens_per_month, which is counted in a"):
        AdmissionMiddleware(App(), path)
    write_policy(tmp_path, "store: redis://127.0.0.1:1/0\nusage_days: 0\n", acme="limits: {tokens_per_day: 1M}\n")
    with pytest.raises(ValueError, match="usage_days is 0: write 1 or more"):
        AdmissionMiddleware(App(), path)
    monkeypatch.setenv("SIDECAR_STORE", "redis://127.0.0.1:1/0")
    write_policy(tmp_path, acme="limits: {tokens_per_month: 1M}\n")
    assert AdmissionMiddleware(App(), path).controller.usage is not None


async def test_a_budget_that_comes_later_where_nothing_is_counted_is_reported(
    tmp_path: Path, store: RedisServer
) -> None:
    async with sidecar(tmp_path, store.url, "usage_days: 0\n") as one:
        assert one.middleware.controller.usage is None
        assert (await one.call("GET", "/usage"))[1]["error"]["code"] == "no_usage"
        write_policy(tmp_path, f"store: {store.url}\nusage_days: 0\n", acme="limits: {tokens_per_day: 1}\n")

        async def is_reported() -> bool:
            return "tokens_per_day and tokens_per_month do nothing here" in one.notices()

        await one.until(is_reported, 10.0)


def test_a_policy_of_one_process_counts_nothing() -> None:
    given_policy: Policy = policy()
    assert given_policy.usage_days == 62
    assert AdmissionMiddleware(App(), given_policy).controller.usage is None
