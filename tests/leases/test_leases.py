"""Leases from Python: in a middleware's own pool, and in a pool that a store keeps for many processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import sidecar
from sidecar import AdmissionMiddleware, LeasePreempted
from sidecar.errors import (
    DeadlinePassed,
    Draining,
    QueueFull,
    QueueTimeout,
    RequestTooLarge,
    StoreUnavailable,
    TenantLimit,
)
from sidecar.events import Settled
from sidecar.leases import Admission, HeldLease
from sidecar.leases.threads import ThreadLeaseBlock
from sidecar.policy.choices import Mode, StoreLoss
from sidecar.policy.compiler import load
from sidecar.pools import Ask
from sidecar.telemetry.dispatch import EventDispatcher
from sidecar.telemetry.spans.tracer import RequestTracer
from tests.support.middleware import monitor, recorded
from tests.support.redis_servers import RedisServer, first_binary
from tests.support.serving import serving
from tests.support.shared_pools import begun
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
POLICY = f"""\
engine: vllm
capacity: {{tokens: 1000, requests: 4}}
tiers:
  high: {{reserve: 30%, preempt_after: 10ms}}
  low: {{preemptible: true, queue: {{max_requests: 3, max_deadline: 1h}}}}
default_tier: low
anonymous: low
endpoints:
  {CHAT}: {{}}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


async def nothing(scope: object, receive: object, send: object) -> None:
    """An app that no request reaches."""


@pytest.fixture
def admission(policy: Path) -> Admission:
    return AdmissionMiddleware(nothing, policy).admission


@pytest.fixture
def observing(policy: Path) -> Admission:
    policy.write_text("mode: observe\n" + POLICY)
    return AdmissionMiddleware(nothing, policy).admission


@pytest.fixture
def hurried(policy: Path) -> Admission:
    policy.write_text(POLICY.replace("max_requests: 3", "max_requests: 3, max_wait: 100ms"))
    return AdmissionMiddleware(nothing, policy).admission


def with_tenant(policy: Path, key: str) -> Admission:
    acme = f'tenant: acme\nkeys: ["sha256:{"0" * 64}"]\ntier: high\n{key}\n'
    (policy.parent / "acme.yaml").write_text(acme)
    policy.write_text(POLICY + "tenants: acme.yaml\n")
    return AdmissionMiddleware(nothing, policy).admission


@pytest.fixture
def limited(policy: Path) -> Admission:
    return with_tenant(policy, "limits: {tokens_per_minute: 100}")


@pytest.fixture
def bounded(policy: Path) -> Admission:
    return with_tenant(policy, "models: [small, llama-*]")


def held(admission: Admission) -> tuple[int, int]:
    """Tokens and requests that the pool's leases hold."""
    tiers = admission.controller.pool.state()["tiers"]
    return sum(tier["held"]["tokens"] for tier in tiers), sum(tier["held"]["requests"] for tier in tiers)


class TestOnePool:
    async def test_a_block_holds_what_it_asked_for_and_gives_it_back(self, admission: Admission) -> None:
        async with admission.lease(tier="high", tokens=300, requests=2) as lease:
            assert held(admission) == (300, 2)
            assert (lease.tier, lease.tenant, lease.level, lease.tokens) == ("high", "internal", 0, 300)
            assert lease.priority == 0  # vLLM's most important
            assert lease.queue_wait_s == lease.starvation_s == 0
            lease.resize(500)
            assert held(admission) == (500, 2)
            lease.used(450)
        assert held(admission) == (0, 0)

    async def test_a_lease_waits_its_turn_and_is_given_back_whatever_ends_its_block(self, admission: Admission) -> None:
        order: list[str] = []

        async def work(name: str, tier: str) -> None:
            async with admission.lease(tier=tier, tokens=1000, is_preemptible=False):
                order.append(name)
                await anyio.sleep(0.01)
                if name == "second low":
                    raise ZeroDivisionError

        first = asyncio.ensure_future(work("first low", "low"))
        await anyio.lowlevel.checkpoint()
        others = [asyncio.ensure_future(work(name, name.split()[-1])) for name in ("second low", "third low", "high")]
        await asyncio.gather(first, *others, return_exceptions=True)
        assert order == ["first low", "high", "second low", "third low"]
        assert isinstance(others[0].exception(), ZeroDivisionError)
        assert held(admission) == (0, 0)

    async def test_it_is_refused_as_a_request_is(self, admission: Admission) -> None:
        with pytest.raises(RequestTooLarge, match="1001"):
            async with admission.lease(tokens=1001):
                pytest.fail("admitted")
        async with admission.lease(tier="high", tokens=1000):
            with pytest.raises(QueueTimeout, match=r"no room came free for tier low within 0\.05 s"):
                async with admission.lease(tokens=1, max_wait_s=0.05):
                    pytest.fail("admitted")
            waiting = [asyncio.ensure_future(_hold(admission, 1)) for _ in range(3)]
            await anyio.lowlevel.checkpoint()
            with pytest.raises(QueueFull):
                await _hold(admission, 1)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert held(admission) == (0, 0)
        assert admission.controller.pool.state()["waiting"] == 0

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"tokens": 0}, "tokens: 0 is no whole number of at least 1"),
            ({"tokens": True}, "tokens: True is no whole"),
            ({"tokens": 1.5}, "tokens: 1.5 is no whole"),
            ({"tokens": 2**70}, "tokens: "),
            ({"tokens": 2**31}, "tokens: 2147483648 is no whole number of at least 1 and of at most 2147483647"),
            ({"tokens": 1, "requests": 0}, "requests: 0 is no"),
            ({"tokens": 1, "prompt_tokens": -1}, "prompt_tokens: -1 is no"),
            ({"tokens": 1, "max_wait_s": float("nan")}, "max_wait_s: nan is no number of seconds"),
            ({"tokens": 1, "max_wait_s": -1}, "max_wait_s: -1 is no"),
            ({"tokens": 1, "max_wait_s": "5"}, "max_wait_s: '5' is no number of seconds"),
            ({"tokens": 1, "max_wait_s": 10**400}, "max_wait_s: 10+ is no number of seconds"),
            ({"tokens": 1, "deadline": 60}, "deadline: 60 is no timedelta, and no datetime with a zone"),
            ({"tokens": 1, "deadline": datetime(2027, 1, 31)}, "deadline: .* is no timedelta, and no datetime with a"),
            (
                {"tokens": 1, "tier": "high", "deadline": timedelta(hours=1)},
                "deadline: tier high takes no request with a deadline; those with `queue: {max_deadline: ...}` do: low",
            ),
            ({"tokens": 1, "model": 5}, "model: 5 is no name"),
            ({"tokens": 1, "tenant": ["acme"]}, r"tenant: the policy has no \['acme'\]"),
            ({"tokens": 1, "tier": "hihg"}, "tier: the policy has no 'hihg'; write one of high, low"),
            (
                {"tokens": 1, "tier": "high", "tenant": "anonymous"},
                "tier: tenant anonymous may not ask for 'high', as its `max_tier` says",
            ),
            ({"tokens": 1, "tenant": "acme"}, "tenant: the policy has no 'acme'"),
        ],
    )
    async def test_what_the_policy_does_not_have_is_an_error_at_once(
        self, admission: Admission, asked: dict[str, object], said: str
    ) -> None:
        with pytest.raises(ValueError, match=said):
            admission.lease(**asked)

    async def test_a_tenant_with_models_has_leases_for_those_alone(self, bounded: Admission) -> None:
        for model in (None, "large"):
            with pytest.raises(ValueError, match=f"model: tenant acme may not use {model!r}; write one of small, lla"):
                bounded.lease(tokens=1, tenant="acme", model=model)
        async with bounded.lease(tokens=1, tenant="acme", model="llama-3"):
            assert held(bounded) == (1, 1)

    async def test_a_lease_can_be_used_for_one_block(self, admission: Admission) -> None:
        block = admission.lease(tokens=1)
        async with block:
            pass
        with pytest.raises(RuntimeError, match="make one for each block"):
            async with block:
                pytest.fail("admitted twice")
        assert held(admission) == (0, 0)

    @pytest.mark.parametrize("tokens", [-1, 2**31, 2**70, True, 1.0, float("nan"), "5"])
    async def test_figures_that_no_store_can_count_are_refused(self, admission: Admission, tokens: Any) -> None:
        async with admission.lease(tokens=10) as lease:
            for say in (lease.used, lease.resize):
                with pytest.raises(ValueError, match="is no whole number of at least"):
                    say(tokens)
            assert held(admission) == (10, 1)

    async def test_what_was_used_is_said_before_the_end(self, limited: Admission) -> None:
        async with limited.lease(tokens=100, tenant="acme") as lease:
            lease.used(60)
            lease.used(40)  # the last one counts
        with pytest.raises(RuntimeError, match="inside of its block"):
            lease.used(10)
        lease.resize(500)
        lease.keep()
        assert held(limited) == (0, 0)
        async with limited.lease(tokens=60, tenant="acme"):
            pass

    async def test_its_holder_may_be_in_another_thread(self, admission: Admission) -> None:
        async with admission.lease(tier="low", tokens=10) as lease:
            for say in (lambda: lease.resize(500), lease.keep, lambda: lease.used(450)):
                await anyio.to_thread.run_sync(say)
            await anyio.lowlevel.checkpoint()
            assert held(admission) == (lease.tokens, 1) == (500, 1)
        assert held(admission) == (0, 0)

    async def test_another_event_loop_is_refused(self, policy: Path) -> None:
        """A pool is of one loop: a coroutine in another one would wait for ever, and damage the connections."""

        async def answer(request: Request) -> PlainTextResponse:
            with pytest.raises(RuntimeError, match="the admission belongs to another event loop"):
                await anyio.to_thread.run_sync(lambda: asyncio.run(_hold(request.state.admission, 1)))
            async with request.state.admission.lease(tokens=1000):
                return PlainTextResponse("held")

        app = Starlette(routes=[Route("/own", answer, methods=["POST"])])
        async with serving(AdmissionMiddleware(app, policy)) as server, httpx2.AsyncClient() as client:
            assert (await client.post(f"{server.url}/own")).text == "held"

    async def test_a_defect_in_the_wait_leaves_nothing(
        self, admission: Admission, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(ask: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(admission.controller.pool, "obstacle", fail)
        async with admission.lease(tier="high", tokens=1000):
            with pytest.raises(ZeroDivisionError):
                await _hold(admission, 1)
            assert admission.controller.pool.state()["waiting"] == 0
        assert admission.controller.under_way == 0

    async def test_in_the_dry_run_it_passes_and_holds_nothing(self, observing: Admission) -> None:
        async with observing.lease(tier="high", tokens=1000), observing.lease(tier="high", tokens=1000) as second:
            assert second.queue_wait_s == 0
            assert second.priority == 0
            assert held(observing) == (0, 0)

    async def test_a_draining_process_takes_no_lease_and_refuses_those_that_wait(self, admission: Admission) -> None:
        async with admission.lease(tier="high", tokens=1000):
            waits = asyncio.ensure_future(_hold(admission, 1))
            await anyio.sleep(0.01)
            admission.controller.drain(within_s=0.1)
            with pytest.raises(Draining):
                await _hold(admission, 1)
            with pytest.raises(Draining):
                await waits


async def _hold(admission: Admission, tokens: int) -> None:
    async with admission.lease(tokens=tokens):
        pass


class TestPreemption:
    async def test_a_kept_lease_is_not(self, admission: Admission) -> None:
        async with admission.lease(tier="low", tokens=1000) as lease:
            lease.keep()
            high = asyncio.ensure_future(_high(admission))
            await anyio.sleep(0.05)
            assert not high.done()
            assert not lease.is_preempted
        await high

    async def test_one_that_is_preempted_before_its_holder_has_it_waits_again(self, admission: Admission) -> None:
        """Its task is canceled by no one: nothing was begun."""
        pool = admission.controller.pool

        async def low() -> tuple[bool, int]:
            async with admission.lease(tier="low", tokens=1000) as lease:
                return lease.is_preempted, _cancelling()

        first = await pool.enter(HIGH)
        task = asyncio.ensure_future(low())
        await anyio.sleep(0.01)
        first.settle()  # the room of `low`, which has not run since
        second = await pool.enter(HIGH)
        time.sleep(0.05)  # noqa: ASYNC251  # the time of `preempt_after` is over before `low` runs
        third = await pool.enter(HIGH)  # the pool decides now
        await anyio.sleep(0.05)
        assert second.grant is not None
        assert not task.done()
        second.settle()
        third.settle()
        assert await task == (False, 0)
        assert held(admission) == (0, 0)

    async def test_the_longest_wait_of_its_tier_refuses_no_preempted_work(self, hurried: Admission) -> None:
        """It was admitted in time once, as with requests. Only the holder's own limit counts from then on."""
        ends: list[str] = []
        for most_s in (None, 0.1):
            attempts: list[HeldLease] = []

            async def work(lease: HeldLease, attempts: list[HeldLease] = attempts) -> str:
                attempts.append(lease)
                await anyio.sleep(60 if len(attempts) == 1 else 0)
                return "done"

            task = asyncio.ensure_future(hurried.run(work, tier="low", tokens=1000, max_wait_s=most_s))
            await anyio.sleep(0.01)
            async with hurried.lease(tier="high", tokens=300):
                await anyio.sleep(0.3)
            (end,) = await asyncio.gather(task, return_exceptions=True)
            ends.append(end if isinstance(end, str) else type(end).__name__)
        assert ends == ["done", "QueueTimeout"]
        assert held(hurried) == (0, 0)

    async def test_to_keep_a_lease_after_it_was_preempted_is_too_late(self, admission: Admission) -> None:
        attempts = 0

        async def work(lease: HeldLease) -> str:
            nonlocal attempts
            attempts += 1
            try:
                await anyio.sleep(60 if attempts == 1 else 0)
            finally:
                lease.keep()
            return "done"

        task = asyncio.ensure_future(admission.run(work, tier="low", tokens=1000))
        await anyio.sleep(0.01)
        async with admission.lease(tier="high", tokens=300, max_wait_s=5):
            pass
        assert await task == "done"
        assert attempts == 2
        assert held(admission) == (0, 0)


HIGH = Ask(tier=0, tenant="internal", weight=1, tokens=1000, requests=1)


def _cancelling() -> int:
    task = asyncio.current_task()
    return task.cancelling() if sys.version_info >= (3, 11) else 0


async def _high(admission: Admission) -> None:
    async with admission.lease(tier="high", tokens=300):
        pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(first_binary(), tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def shared(policy: Path, store: RedisServer) -> Path:
    store.command("FLUSHALL")
    begun(store)
    policy.write_text(f"store: {store.url}\n" + POLICY)
    return policy


@pytest.fixture
def sized_by_engine(tmp_path: Path) -> Path:
    path = tmp_path / "sized.yaml"
    path.write_text(POLICY.replace("tokens: 1000, requests: 4", "from: engine"))
    return path


class TestSharedPool:
    async def test_leases_of_any_process_and_requests_share_one_pool(self, shared: Path) -> None:
        """The middleware of a server, another event loop and a plain thread: what one holds, the others cannot."""

        async def answer(request: Request) -> PlainTextResponse:
            async with request.state.admission.lease(tier="high", tokens=100) as lease:  # of the same pool
                return PlainTextResponse(f"{lease.tier} {held(request.state.admission)[1]}")

        app = Starlette(routes=[Route("/own", answer, methods=["POST"])])
        async with (
            serving(AdmissionMiddleware(app, shared)) as server,
            httpx2.AsyncClient(base_url=server.url) as client,
            sidecar.connect(policy=shared) as admission,
        ):
            with await anyio.to_thread.run_sync(lambda: sidecar.connect_threads(policy=shared)) as threads:
                got = await client.post("/own")
                assert got.text == "high 1"
                async with admission.lease(tier="low", tokens=600, is_preemptible=False):
                    times = await anyio.to_thread.run_sync(_in_a_thread, threads, 0.05)
                    assert times == "QueueTimeout"
                assert await anyio.to_thread.run_sync(_in_a_thread, threads, 5.0) == "low 600"

    async def test_a_queues_worker_gives_its_deadline_and_its_lease_rises_in_the_shared_pool(
        self, shared: Path
    ) -> None:
        async with sidecar.connect(policy=shared) as other, sidecar.connect(policy=shared) as admission:
            async with other.lease(tier="high", tokens=1000):
                with pytest.raises(DeadlinePassed, match="before the deadline of the request"):
                    async with admission.lease(tokens=1, tier="low", deadline=timedelta(milliseconds=50)):
                        pytest.fail("admitted")
                with pytest.raises(DeadlinePassed, match="had passed when the request came"):
                    async with admission.lease(tokens=1, deadline=datetime.now(timezone.utc)):
                        pytest.fail("admitted")
                at = datetime.now(timezone(timedelta(hours=-7))) + timedelta(seconds=6)
                waits = asyncio.ensure_future(_tier(admission, at))
                pool: Any = admission.controller.pool
                await until(lambda: [tier["queued"]["requests"] for tier in pool.state()["tiers"]] == [1, 0])
            assert await waits == "high"

    async def test_the_end_of_a_connection_gives_all_back_and_refuses_those_that_wait(self, shared: Path) -> None:
        async with sidecar.connect(policy=shared) as other:
            async with sidecar.connect(policy=shared) as admission:
                block = admission.lease(tokens=1000, is_preemptible=False)
                await block.__aenter__()
                waits = asyncio.ensure_future(_hold(admission, 1))
                await anyio.sleep(0.1)
            with pytest.raises(Draining):
                await waits
            async with other.lease(tokens=1000, max_wait_s=5):
                pass

    async def test_mistakes_are_raised(self, policy: Path, sized_by_engine: Path, store: RedisServer) -> None:
        with pytest.raises(ValueError, match="there is no pool to join, as the policy has no store"):
            async with sidecar.connect(policy=policy):
                pytest.fail("connected")
        with pytest.raises(ValueError, match="there is no pool to join"):
            sidecar.connect_threads(policy=policy)
        with pytest.raises(ValueError, match=r"policy\.yaml"):
            async with sidecar.connect(store.url, policy=policy.parent / "none" / "policy.yaml"):
                pytest.fail("connected")
        with pytest.raises(ValueError, match="give its address as `engine=`"):
            sidecar.connect_threads(store.url, policy=sized_by_engine)

    @pytest.mark.parametrize("after", range(12))
    async def test_a_canceled_connection_leaves_nothing_behind(self, shared: Path, after: int) -> None:
        async def connect() -> None:
            async with sidecar.connect(policy=shared) as admission:
                await _hold(admission, 1)

        before = asyncio.all_tasks()
        task = asyncio.ensure_future(connect())
        for _ in range(4**after if after < 6 else 0):
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.005 * after)
        task.cancel()
        await asyncio.wait((task,))
        await anyio.lowlevel.checkpoint()
        assert asyncio.all_tasks() == before

    async def test_a_connection_that_is_canceled_while_it_ends_ends(self, shared: Path) -> None:
        ending = anyio.Event()

        async def connect() -> None:
            async with sidecar.connect(policy=shared):
                ending.set()

        before = asyncio.all_tasks()
        task = asyncio.ensure_future(connect())
        await ending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await anyio.lowlevel.checkpoint()
        assert asyncio.all_tasks() == before

    async def test_a_store_that_was_never_reached_refuses_where_the_policy_is_closed(self, policy: Path) -> None:
        closed = replace(load(policy), on_store_loss=StoreLoss.CLOSED)
        with pytest.raises(StoreUnavailable, match="has not been reached yet"):
            async with (
                sidecar.connect("redis://127.0.0.1:9", policy=closed) as admission,
                admission.lease(tokens=10),
            ):
                pytest.fail("admitted")


async def _tier(admission: Admission, deadline: datetime) -> str:
    async with admission.lease(tokens=1000, tier="low", deadline=deadline) as lease:
        return lease.tier


def _in_a_thread(admission: sidecar.leases.ThreadAdmission, max_wait_s: float) -> str:
    try:
        with admission.lease(tier="low", tokens=600, max_wait_s=max_wait_s) as lease:
            lease.used(10)
            lease.keep()
            return f"{lease.tier} {lease.tokens}"
    except QueueTimeout as timeout:
        return type(timeout).__name__


class TestThreads:
    def test_many_threads_never_hold_more_than_the_pool(self, shared: Path) -> None:
        running, most, lock = 0, 0, threading.Lock()

        def work() -> None:
            nonlocal running, most
            for _ in range(5):
                with admission.lease(tier="high", tokens=250):
                    with lock:
                        running += 1
                        most = max(most, running)
                    time.sleep(0.005)
                    with lock:
                        running -= 1

        with sidecar.connect_threads(policy=shared) as admission:
            threads = [threading.Thread(target=work) for _ in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert most == 4
        assert running == 0

    def test_a_preempted_holder_is_told_and_gives_its_room(self, shared: Path) -> None:
        told = threading.Event()
        with sidecar.connect_threads(policy=shared) as admission:
            with admission.lease(tier="low", tokens=1000, when_preempted=told.set) as lease:
                high = threading.Thread(target=_take_high, args=(admission,))
                high.start()
                assert told.wait(10)
                assert lease.is_preempted
            high.join(10)
            assert not high.is_alive()

    def test_a_process_that_was_forked_is_told_to_connect_itself(self, shared: Path) -> None:
        with sidecar.connect_threads(policy=shared) as admission:
            child = os.fork()
            if not child:
                try:
                    with admission.lease(tokens=1):
                        os._exit(1)
                except RuntimeError as error:
                    os._exit(0 if "connect in each process, after the fork" in str(error) else 2)
                os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(RuntimeError, match="the admission was closed"):
            admission.lease(tokens=1).__enter__()

    def test_an_interrupted_wait_leaves_nothing(self, shared: Path) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
        try:
            with sidecar.connect_threads(policy=shared) as admission:
                with admission.lease(tier="high", tokens=1000):
                    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
                    timer.start()
                    with pytest.raises(KeyboardInterrupt):
                        admission.lease(tokens=1, max_wait_s=20).__enter__()
                    timer.join()
                _take_high(admission)  # nothing stands before it
        finally:
            signal.signal(signal.SIGINT, before)

    def test_one_block_is_not_for_two_threads(self, shared: Path) -> None:
        with sidecar.connect_threads(policy=shared) as admission:
            block = admission.lease(tier="high", tokens=1000)
            with ThreadPoolExecutor(8) as threads:
                done = list(threads.map(lambda _: _entered(block), range(8)))
            assert sorted(done) == [False] * 7 + [True]
            with pytest.raises(QueueTimeout):
                admission.lease(tier="high", tokens=1000, max_wait_s=0.1).__enter__()
            block.__exit__(None, None, None)
            _take_high(admission)

    def test_a_lease_that_outlives_the_connection_ends_without_an_error(self, shared: Path) -> None:
        """Another thread closes: what a thread has computed with its lease is not lost for that."""
        admission = sidecar.connect_threads(policy=shared)
        with admission.lease(tokens=1):
            admission.close()

    def test_no_thread_hangs_where_another_one_closes(self, shared: Path) -> None:
        admission, ended = sidecar.connect_threads(policy=shared), list[str]()

        def work() -> None:
            try:
                while True:
                    with admission.lease(tier="high", tokens=250, max_wait_s=60):
                        pass
            except (Draining, RuntimeError) as error:
                ended.append(str(error))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        admission.close()
        for thread in threads:
            thread.join(10)
        assert len(ended) == 16


def _entered(block: ThreadLeaseBlock) -> bool:
    try:
        block.__enter__()
    except RuntimeError:
        return False
    return True


def _take_high(admission: sidecar.leases.ThreadAdmission) -> None:
    with admission.lease(tier="high", tokens=300):
        pass


class TestWhatItShows:
    async def test_a_tenant_has_its_limits_and_its_top_tier(self, limited: Admission) -> None:
        async with limited.lease(tokens=100, tenant="acme") as lease:
            assert lease.tenant == "acme"
            assert lease.tier == "high"
        with pytest.raises(TenantLimit) as refused:
            async with limited.lease(tokens=100, tenant="acme"):
                pytest.fail("admitted")
        assert 1 < refused.value.retry_after_s <= 60
        async with limited.lease(tokens=100) as lease:
            assert lease.tenant == "internal"

    async def test_what_was_not_used_comes_back_to_its_limits(self, limited: Admission) -> None:
        async with limited.lease(tokens=100, tenant="acme") as lease:
            lease.used(10)
        async with limited.lease(tokens=90, tenant="acme"):
            pass

    async def test_a_preempted_block_counts_as_that_and_costs_its_tenant_nothing(self, limited: Admission) -> None:
        recorder = recorded(limited.controller)

        async def batch() -> None:
            async with limited.lease(tier="low", tokens=90, requests=4, tenant="acme"):
                await anyio.sleep_forever()

        task = asyncio.ensure_future(batch())
        await anyio.sleep(0.01)
        async with limited.lease(tier="high", tokens=10):
            pass
        with pytest.raises(LeasePreempted):
            await task
        recorder.check()
        story = recorder.stories[0]
        assert story.kinds == ["Classified", "Admitted", "Preempted", "Queued", "Settled"]
        assert (story.one(Settled).error, story.one(Settled).tokens_used) == ("preempted", 0)
        async with limited.lease(tokens=90, tenant="acme", max_wait_s=1):
            pass

    async def test_its_span_belongs_to_the_span_around_it(self, admission: Admission) -> None:
        spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(spans))
        monitor(admission.controller, EventDispatcher(RequestTracer(provider), []))
        with provider.get_tracer("worker").start_as_current_span("task") as task:
            async with admission.lease(tier="high", tokens=100) as lease:
                lease.used(70)
        (found,) = (span for span in spans.get_finished_spans() if span.name == "admission")
        assert found.parent.span_id == task.get_span_context().span_id
        assert found.attributes["admission.tier"] == "high"
        assert found.attributes["admission.tokens.used"] == 70


LEAVER = """
import sys
import sidecar

admission = sidecar.connect_threads(policy=sys.argv[1])
lease = admission.lease(tier="high", tokens=1000).__enter__()
print("held", flush=True)
"""


def test_a_process_that_ends_without_a_word_leaves_the_pool(shared: Path) -> None:
    """It neither ends its block nor closes: the pool hears of it at the end of the process, and not 10 s later."""
    with sidecar.connect_threads(policy=shared) as admission:
        done = subprocess.run(
            [sys.executable, "-c", LEAVER, str(shared)], capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr
        assert not done.stderr
        began = time.monotonic()
        with admission.lease(tier="high", tokens=1000, max_wait_s=20):
            assert time.monotonic() - began < 5


async def test_a_lease_that_waits_passes_where_every_request_passes_though_the_pool_is_too_small_then(
    policy: Path,
) -> None:
    middleware = AdmissionMiddleware(nothing, policy)
    admission, controller = middleware.admission, middleware.controller
    async with admission.lease(tokens=1000, tier="high"):

        async def work() -> int:
            async with admission.lease(tokens=600) as lease:
                return lease.tokens

        waiting = asyncio.create_task(work())
        while not controller.pool.state()["waiting"]:  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(0)
        smaller = policy.with_name("smaller.yaml")
        smaller.write_text(POLICY.replace("tokens: 1000", "tokens: 500"))
        controller.change_policy(replace(load(smaller), mode=Mode.PASS))
        assert await asyncio.wait_for(waiting, 60) == 600
