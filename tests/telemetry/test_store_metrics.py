import asyncio
import time

import pytest
from opentelemetry import metrics

from sidecar.events import StoreChanged, StoreState
from sidecar.policy.compiler import load, shipped_policies
from sidecar.pools import Ask
from sidecar.telemetry.metrics.instruments import StoreMetrics
from tests.support.shared_pools import begun_store, shared_pool
from tests.telemetry import measuring as measuring_sdk


def changed(state):
    return StoreChanged(1, state, "because")


class Measuring(measuring_sdk.Measuring):
    def store(self, pool="default"):
        return StoreMetrics(pool, self.provider)

    def changes(self):
        return self.values("admission.store.changes")


@pytest.fixture
def measuring():
    return Measuring()


def test_the_changes_of_two_pools_in_one_process_are_distinguished_and_nothing_is_warned_of(measuring, caplog):
    chat, batch = measuring.store("chat"), measuring.store("batch")
    assert measuring.changes() == {}

    for store, state in ((chat, "SHARED"), (batch, "DIVIDED"), (chat, "CLOSED"), (chat, "SHARED")):
        store(changed(StoreState[state]))

    assert measuring.changes() == {("chat", "shared"): 2, ("chat", "closed"): 1, ("batch", "divided"): 1}
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
    assert record.name == "sidecar.telemetry.metrics.instruments"
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
