"""The ends of a request that keep its room for the engine's abort latency, and those that free it at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import AdmissionMiddleware
from sidecar.engines import Sglang
from sidecar.events import Classified, Outcome, Settled
from sidecar.proxy.proxy import ReverseProxy
from sidecar.tools.emulator import Emulator, EmulatorConfig, StepModel
from tests.admission.test_preemption import CRITICAL, rules
from tests.support.engine import Connection, Script, answering, raw_engine
from tests.support.middleware import (
    CHAT,
    SMALL,
    App,
    Caller,
    Guarded,
    answer,
    chat,
    guarding,
    key,
    policy,
    tasks_of_ours,
    whole_body,
)
from tests.support.redis_servers import free_port
from tests.support.serving import serving
from tests.support.shared_pools import begun_store
from tests.support.waiting import until
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

LONG = "abort_latency: 30s"  # longer than any test: what it holds is held for it
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Proxied:
    """An admission proxy before an engine that a script plays."""

    def __init__(self, guarded: Guarded, has_begun: asyncio.Event) -> None:
        self.guarded = guarded
        self.has_begun = has_begun

    async def hang_up(self, *headers: str) -> None:
        """One client that hangs up as soon as the engine has its request."""
        self.has_begun.clear()
        async with connected(self.guarded.port) as (_, writer):
            writer.write(post(CHAT, SMALL, *headers))
            await asyncio.wait_for(self.has_begun.wait(), 60)
        await until(lambda: len(self.guarded.sidecar.watchdog) == 0)

    @property
    def held(self) -> int:
        return self.guarded.sidecar.pending_aborts.held().requests


@asynccontextmanager
async def proxied(script: Script | None = None, more: str = LONG, **settings: Any) -> AsyncIterator[Proxied]:
    """At the end of the block what is held is released, and nothing may be left. Without a script it computes."""
    has_begun = asyncio.Event()

    async def computing(connection: Connection) -> None:
        await connection.request()
        has_begun.set()
        await connection.hung_up()

    rules = settings.pop("rules", None) or policy(more, **settings.pop("policy", {}))
    async with raw_engine(script or computing) as engine:
        proxy = ReverseProxy(engine.url, **settings)
        async with guarding(proxy, rules, headers=[]) as guarded:
            try:
                yield Proxied(guarded, has_begun)
            finally:
                await guarded.sidecar.pending_aborts.close(waits=False)
                assert guarded.sidecar.pending_aborts.held() == (0, 0)
                await proxy.close()


async def broken(connection: Connection) -> None:
    await connection.request()
    connection.abort()


async def cut(connection: Connection) -> None:
    await connection.request()
    await connection.send(HEAD)
    await connection.send_chunk(b"data: 1\n\n")
    connection.abort()


async def silent(connection: Connection) -> None:
    await connection.request()
    await connection.hung_up()


@pytest.mark.parametrize(
    ("script", "status", "outcome"),
    [(broken, 502, Outcome.FAILED), (cut, 200, Outcome.FAILED)],
)
async def test_what_the_engine_did_not_answer_to_the_end_keeps_its_room(
    script: Script, status: int, outcome: Outcome
) -> None:
    async with proxied(script) as found:
        async with connected(found.guarded.port) as (reader, writer):
            writer.write(post(CHAT, SMALL))
            assert (await reader.read()).startswith(b"HTTP/1.1 %d" % status)
        await until(lambda: len(found.guarded.sidecar.watchdog) == 0)
        assert (found.guarded.leases, found.held) == (1, 1)
        end = found.guarded.recorder.stories[0].end
        assert isinstance(end, Settled)
        assert end.outcome is outcome
    assert found.guarded.leases == 0


@pytest.mark.parametrize("status", [b"200 OK", b"500 Internal Server Error", b"400 Bad Request"])
async def test_what_the_engine_answered_frees_its_room_at_once(status: bytes) -> None:
    async with proxied(answering(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\nok")) as found:
        await found.guarded.ask()
        assert (found.guarded.leases, found.held) == (0, 0)


async def test_what_never_reached_the_engine_frees_its_room_at_once() -> None:
    proxy = ReverseProxy(f"http://127.0.0.1:{free_port()}")
    async with guarding(proxy, policy(LONG)) as guarded:
        assert (await guarded.ask()).is_error(502, "engine_unreachable", "no connection")
        assert guarded.leases == 0
        await proxy.close()


async def test_an_answer_that_the_client_did_not_wait_for_frees_the_room_at_once() -> None:
    """The engine has ended by then: its whole answer is there."""

    class Gone(Caller):
        async def _send(self, message: Any) -> None:
            if message["type"] == "http.response.body":
                raise OSError("the client left")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        await answer(send, b"{}")

    guarded = Guarded(app, policy(LONG))
    with pytest.raises(OSError, match="left"):
        await Gone(guarded.sidecar, SMALL).run()
    assert guarded.leases == 0


async def test_the_request_ends_for_its_observers_when_it_ended() -> None:
    async with proxied() as found:
        await found.hang_up()
        (story,) = found.guarded.recorder.stories
        end = story.end
        assert isinstance(end, Settled)
        assert end.outcome is Outcome.CLIENT_LEFT
        tokens = story.one(Classified).tokens
        assert found.guarded.sidecar.state()["aborting"] == {"requests": 1, "tokens": tokens}
        assert len(found.guarded.recorder.stories[0].events) == 3


async def test_a_shadow_keeps_no_room() -> None:
    async with proxied(more=LONG + "\nmode: observe") as found:
        await found.hang_up()
        assert found.held == 0
        found.guarded.recorder.stories.clear()  # a shadow's order of events is another


async def test_a_tenants_count_ends_with_the_room() -> None:
    """A tenant whose clients disconnect has no more in the engine than its limit."""
    limited = {"acme": "limits: {concurrent_requests: 1}\n"}
    async with proxied(more="abort_latency: 700ms", policy=limited) as found:
        await found.hang_up(key("acme"))
        hung_up_s = time.monotonic()
        refused = await found.guarded.ask(None, key("acme"))
        assert refused.is_error(429, "tenant_limit")
        await until(lambda: found.held == 0)
        assert time.monotonic() - hung_up_s >= 0.6
        await found.hang_up(key("acme"))


async def test_whatever_waits_goes_in_when_the_latency_is_over() -> None:
    async with proxied(more="abort_latency: 500ms", policy={"requests": "1"}) as found:
        await found.hang_up()
        hung_up_s = time.monotonic()
        await found.hang_up()  # admitted, or it never begins
        assert time.monotonic() - hung_up_s >= 0.45


async def test_many_disconnects_make_no_task_and_one_timer() -> None:
    async with proxied(policy={"requests": "100"}) as found:
        await found.hang_up()
        tasks = len(asyncio.all_tasks())
        for _ in range(30):
            await found.hang_up()
        assert found.held == 31
        assert tasks_of_ours() == []
        assert len(asyncio.all_tasks()) <= tasks + 5  # those of the two servers


async def test_a_drain_does_not_wait_for_it() -> None:
    async with proxied() as found:
        await found.hang_up()
        found.guarded.sidecar.drain()
        await asyncio.wait_for(found.guarded.sidecar.drained(), 60)
        assert found.held == 1


async def test_a_request_keeps_the_latency_of_the_policy_that_it_came_under() -> None:
    async with proxied() as found:
        await found.hang_up()
        found.guarded.sidecar.change_policy(policy("abort_latency: 0s"))
        await found.hang_up()
        assert (found.held, found.guarded.leases) == (1, 1)
        found.guarded.sidecar.change_policy(policy("abort_latency: 300ms"))
        await found.hang_up()  # its time is over before that of the first
        assert found.held == 2
        await until(lambda: found.held == 1)


async def test_a_request_that_the_server_cancels_keeps_its_room() -> None:
    async with proxied() as found, connected(found.guarded.port) as (_, writer):
        writer.write(post(CHAT, SMALL))
        await asyncio.wait_for(found.has_begun.wait(), 60)
        assert found.guarded.served is not None
        for task in list(found.guarded.served.server.server_state.tasks):
            task.cancel()
        await until(lambda: len(found.guarded.sidecar.watchdog) == 0)
        assert (found.guarded.leases, found.held) == (1, 1)


async def test_an_app_that_does_not_listen_keeps_its_room_no_shorter_than_its_engine() -> None:
    """`disconnect_grace` is over, the engine's latency is not."""
    may_end = asyncio.Event()

    class Deaf(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await super().__call__(scope, receive, send)
                return
            await whole_body(receive)
            await may_end.wait()

    async with guarding(Deaf(), policy("abort_latency: 900ms", grace="100ms")) as guarded:
        async with connected(guarded.port) as (_, writer):
            writer.write(post(CHAT, SMALL))
            await guarded.until(leases=1)
        left_s = time.monotonic()
        await until(lambda: guarded.sidecar.pending_aborts.held().requests == 1)
        await guarded.until(leases=0)
        assert time.monotonic() - left_s >= 0.85
        may_end.set()


async def test_a_request_that_has_ended_is_not_preempted_but_gives_its_room_in_its_time(tmp_path: Path) -> None:
    async with proxied(rules=rules(tmp_path, requests=1, more="abort_latency: 800ms")) as found:
        await found.hang_up("x-priority: batch")
        hung_up_s = time.monotonic()
        async with connected(found.guarded.port) as (_, writer):
            found.has_begun.clear()
            writer.write(post(CHAT, SMALL, CRITICAL))
            await asyncio.wait_for(found.has_begun.wait(), 60)
        assert time.monotonic() - hung_up_s >= 0.7
        batch = found.guarded.recorder.stories[0]
        assert batch.kinds == ["Classified", "Admitted", "Settled"]


def test_what_an_event_loop_leaves_is_released_in_the_next_one() -> None:
    """Test clients run each request in a loop of its own."""

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        body = await whole_body(receive)
        if b"fail" in body:
            raise RuntimeError("the engine is gone")
        await answer(send, b"{}")

    guarded = Guarded(failing, policy("abort_latency: 300ms", requests="1"))

    async def fails() -> None:
        with pytest.raises(RuntimeError, match="gone"):
            await Caller(guarded.sidecar, json.dumps(chat(user="fail")).encode()).run()

    async def is_served() -> int:
        caller = Caller(guarded.sidecar, SMALL)
        await asyncio.wait_for(caller.run(), 60)
        return caller.status

    asyncio.run(fails())
    assert guarded.leases == 1
    assert asyncio.run(is_served()) == 200
    assert guarded.leases == 0


FROM_ENGINE = """\
engine: sglang
capacity: {from: engine}
tiers: {normal: {}}
anonymous: normal
abort_latency: 60s
"""


@pytest.mark.long
async def test_what_the_engine_is_seen_to_have_released_is_free(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(FROM_ENGINE)
    steps = StepModel(step_us=10_000, max_sequences=64, kv_tokens=1_000_000)
    emulator = Emulator(EmulatorConfig(engine=Sglang, steps=steps, abort_latency_s=2.0))
    body = json.dumps(chat(stream=True, max_tokens=10_000)).encode()
    async with serving(emulator.app) as upstream:
        middleware = AdmissionMiddleware(ReverseProxy(upstream.url), path)
        async with serving(middleware) as served:
            for _ in range(6):
                async with connected(served.port) as (reader, writer):
                    writer.write(post(CHAT, body))
                    await reader.readuntil(b"data:")
            held = middleware.controller.pending_aborts.held
            await until(lambda: held().requests == 6)
            assert emulator.engine.running == 6
            released_s = time.monotonic() + 60
            while held().requests > 2:  # one that a rank may be computing is in no figure, twice
                assert time.monotonic() < released_s
                assert emulator.engine.running == 0 or held().requests == 6
                await asyncio.sleep(0.01)
            assert middleware.controller.state()["pool"]["leases"] == held().requests  # type: ignore[index]


SHARED = """\
engine: none
capacity: {{requests: 4}}
tiers: {{normal: {{}}}}
anonymous: normal
store: {store}
abort_latency: {latency}
"""


@asynccontextmanager
async def replica(folder: Path, store: str, upstream: str, latency: str) -> AsyncIterator[tuple[Any, int]]:
    path = folder / "policy.yaml"
    path.write_text(SHARED.format(store=store, latency=latency))
    middleware = AdmissionMiddleware(ReverseProxy(upstream), path)
    async with serving(middleware) as served:
        yield middleware, served.port


async def hang_up(port: int, middleware: Any) -> None:
    before = middleware.controller.pending_aborts.held().requests
    async with connected(port) as (_, writer):
        writer.write(post(CHAT, SMALL))
        await until(
            lambda: (
                len(middleware.controller.watchdog) == 1
                and middleware.controller.state()["pool"]["leases"] == before + 1
            )
        )
        await asyncio.sleep(0.05)
    await until(lambda: middleware.controller.pending_aborts.held().requests == before + 1)


@pytest.mark.long
async def test_a_store_that_lost_everything_is_told_of_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_ENGINE_CHECK", "off")  # this engine answers no page, and would be down
    with begun_store(tmp_path) as store:
        async with (
            raw_engine(silent) as engine,
            replica(tmp_path, store.url, engine.url, "30s") as (one, port),
            replica(tmp_path, store.url, engine.url, "30s") as (other, other_port),
        ):
            for _ in range(3):
                await hang_up(port, one)
            store.command("FLUSHALL")
            await until_shared(one, leases=3)
            async with connected(other_port) as (_, first), connected(other_port) as (_, second):
                for writer in (first, second):
                    writer.write(post(CHAT, SMALL))
                await until_shared(other, leases=4, waiting=1)  # of two one has room
            await until(lambda: len(other.controller.watchdog) == 0)
            for middleware in (one, other):
                await middleware.controller.pending_aborts.close(waits=False)
            await until_shared(one, leases=0)


async def until_shared(middleware: Any, leases: int, waiting: int = 0) -> None:
    def is_so() -> bool:
        pool = middleware.controller.state()["pool"]
        return (pool["store"]["state"], pool["leases"], pool["waiting"]) == ("shared", leases, waiting)

    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s, middleware.controller.state()["pool"]
        await asyncio.sleep(0.02)


async def test_a_replica_that_ends_keeps_the_room_from_the_others_until_the_engine_has_released_it(
    tmp_path: Path,
) -> None:
    with begun_store(tmp_path) as store:
        async with raw_engine(silent) as engine, replica(tmp_path, store.url, engine.url, "1500ms") as (one, _):
            async with replica(tmp_path, store.url, engine.url, "1500ms") as (other, port):
                await hang_up(port, other)
                hung_up_s = time.monotonic()
            await until_shared(one, leases=0)
            assert time.monotonic() - hung_up_s >= 1.4
