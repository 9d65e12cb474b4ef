import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import metrics

from sidecar.events import StoreChanged, StoreState
from sidecar.policy.compiler import load, shipped_policies
from sidecar.pools import Ask
from sidecar.telemetry.metrics.store import StoreMetrics
from tests.support.shared_pools import begun_store, shared_pool
from tests.telemetry import measuring as measuring_sdk


def changed(state):
    return StoreChanged(1, state, "because")


class Measuring(measuring_sdk.Measuring):
    def store(self, pool="default"):
        return StoreMetrics(pool, self.provider)

    def available(self):
        return {pool: value for (pool,), value in self.values("admission.store.available").items()}

    def changes(self):
        return self.values("admission.store.changes")


@pytest.fixture
def measuring():
    return Measuring()


def test_before_the_first_contact_a_store_is_not_available_and_has_not_changed(measuring):
    store = measuring.store()

    assert measuring.available() == {store.pool: 0}
    assert measuring.changes() == {}


@pytest.mark.parametrize("lost", [StoreState.DIVIDED, StoreState.CLOSED])
def test_a_store_is_available_while_it_decides(measuring, lost):
    store = measuring.store()
    reported = []
    for state in (StoreState.SHARED, lost, StoreState.SHARED):
        store(changed(state))
        reported.append(measuring.available()["default"])

    assert reported == [1, 0, 1]


def test_two_pools_in_one_process_are_distinguished_and_nothing_is_warned_of(measuring, caplog):
    chat, batch = measuring.store("chat"), measuring.store("batch")
    chat(changed(StoreState.SHARED))
    batch(changed(StoreState.DIVIDED))

    assert measuring.available() == {"chat": 1, "batch": 0}
    assert measuring.changes() == {("chat", "shared"): 1, ("batch", "divided"): 1}
    assert caplog.records == []


@pytest.mark.parametrize("first_lost", [True, False])
def test_of_two_middlewares_on_one_pool_the_one_that_is_worse_off_is_reported(measuring, first_lost):
    stores = [measuring.store(), measuring.store()]
    for store in stores:
        store(changed(StoreState.SHARED))
    assert measuring.available() == {"default": 1}

    stores[0 if first_lost else 1](changed(StoreState.CLOSED))

    assert measuring.available() == {"default": 0}
    assert measuring.changes() == {("default", "shared"): 2, ("default", "closed"): 1}


def test_a_pool_that_is_gone_is_not_reported_any_more(measuring):
    kept, gone = measuring.store("kept"), measuring.store("gone")
    assert measuring.available() == {"kept": 0, "gone": 0}

    del gone
    gc.collect()

    assert measuring.available() == {kept.pool: 0}
    assert len(measuring.store("new")._instruments._watched) == 2


def test_pools_may_be_made_while_the_gauge_is_read(measuring, caplog):
    stores, over = [], threading.Event()

    def make():
        while not over.is_set():
            stores.append(measuring.store(f"pool {len(stores) % 50}"))

    with ThreadPoolExecutor(1) as others:
        made = others.submit(make)
        try:
            for _ in range(40):
                measuring.available()
        finally:
            over.set()
        made.result()
    assert 0 < len(measuring.available()) <= 50
    assert caplog.records == []


class BrokenCounter(metrics.NoOpCounter):
    def add(self, *arguments, **named):
        raise RuntimeError("cannot count")


class BrokenMeter(metrics.NoOpMeter):
    def create_counter(self, *arguments, **named):
        return BrokenCounter("broken")


class ProviderOfBrokenMeters(metrics.NoOpMeterProvider):
    def get_meter(self, *arguments, **named):
        return BrokenMeter("broken")


@pytest.mark.parametrize("provider", [measuring_sdk.BrokenProvider(), ProviderOfBrokenMeters()])
def test_a_broken_sdk_never_raises_and_is_logged_once(caplog, provider):
    store = StoreMetrics("default", provider)
    for state in (StoreState.SHARED, StoreState.CLOSED, StoreState.SHARED):
        store(changed(state))

    (record,) = caplog.records
    assert record.name == "sidecar.telemetry.metrics.store"
    assert "store metrics failed" in record.message
    assert record.exc_info is not None


def test_what_is_no_change_never_raises(measuring, caplog):
    measuring.store()("not a change")

    assert len(caplog.records) == 1


def test_how_long_a_call_took_is_reported_in_buckets(measuring):
    for took_s in (0.0004, 0.003, 0.003):
        measuring.store().round_trip(took_s)

    (point,) = measuring.metrics()["admission.store.round_trip"].data.data_points
    assert (point.attributes, point.count, round(point.sum, 4)) == ({"admission.pool": "default"}, 3, 0.0064)
    assert point.bucket_counts[:4] == (1, 0, 0, 2)


@pytest.mark.anyio
async def test_every_call_to_a_store_is_timed_whether_it_is_answered_or_not(tmp_path):
    policy, took_s = load(shipped_policies()), []
    with begun_store(tmp_path) as redis:
        pool = shared_pool(policy, redis, took=took_s.append)
        await pool.open()
        lease = await pool.enter(Ask(0, "acme", 1, 10, 1))
        answered = len(took_s)
        assert answered == pool.state()["store"]["round_trips"] >= 2
        assert all(0 < call_s < 1 for call_s in took_s)

        redis.kill()
        lease.settle()
        end_s = time.monotonic() + 10
        while pool.status.state is StoreState.SHARED:  # no event says so
            assert time.monotonic() < end_s
            await asyncio.sleep(0.01)
        assert len(took_s) == pool.state()["store"]["round_trips"] > answered
        await pool.close()
