"""Waiting, and being settled exactly once, whatever happens to client, app, task and server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from sidecar.admission.request import RequestHandler
from sidecar.events import Admitted, Outcome, Queued, Refused, Settled
from tests.support.middleware import (
    CHAT,
    SMALL,
    App,
    Caller,
    Guarded,
    answer,
    chat,
    chunk,
    guarding,
    policy,
    start,
)
from tests.support.serving import serving
from tests.support.wire import connected, post

pytestmark = pytest.mark.anyio

NARROW = policy(requests="1")


def asking(guarded: Guarded, *headers: str, **members: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(guarded.ask(chat(**members), *headers))


# Waiting


async def test_the_wait_is_reported_to_the_client_the_app_and_the_observer() -> None:
    app = App(is_held=True)
    async with guarding(app, NARROW) as guarded:
        first = asking(guarded)
        await guarded.until(leases=1)
        second = asking(guarded)
        await guarded.until(waiting=1)
        await asyncio.sleep(0.05)
        app.release(2)
        answers = await asyncio.gather(first, second)
        story = guarded.recorder.stories[1]
    assert story.kinds == ["Classified", "Queued", "Admitted", "FirstByte", "Settled"]
    waited_us = story.one(Admitted).queue_wait_us
    assert waited_us >= 45_000
    assert waited_us == pytest.approx(story.one(Admitted).at_us - story.one(Queued).at_us, abs=1_000_000)
    assert int(answers[1].headers["x-admission-wait-ms"]) == waited_us // 1000
    assert answers[1].headers["server-timing"] == f"admission;dur={waited_us / 1000:.3f}"
    assert app.seen[1].scope["admission"].queue_wait_s == waited_us / 1e6
    assert answers[0].headers["x-admission-wait-ms"] == "0"


async def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue_at_once() -> None:
    app = App(is_held=True)
    async with guarding(app, NARROW) as guarded:
        first = asking(guarded)
        await guarded.until(leases=1)
        async with connected(guarded.port) as (_, writer):
            writer.write(post(CHAT, SMALL))
            await guarded.until(waiting=1)
        await guarded.until(waiting=0)
        third = asking(guarded)
        await guarded.until(waiting=1)
        app.release(2)
        await asyncio.gather(first, third)
        gone = guarded.recorder.stories[1].one(Refused)
    assert len(app.seen) == 2
    assert (gone.code, gone.status) == ("client_left", None)
    assert gone.queue_wait_us > 0


async def test_an_open_connection_that_sends_on_while_it_waits_stays_in_the_queue() -> None:
    app = App(is_held=True)
    async with guarding(app, NARROW) as guarded, connected(guarded.port) as (reader, writer):
        first = asking(guarded)
        await guarded.until(leases=1)
        writer.write(post(CHAT, SMALL, close=False))
        await guarded.until(waiting=1)
        writer.write(post(CHAT, SMALL))  # pipelined: served behind the first
        await asyncio.sleep(0.05)
        assert guarded.waiting == 1
        app.release(3)
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 2
        await first


@pytest.mark.parametrize(("asked", "waited_s"), [("30ms", 0.03), ("1h", 0.2), ("0s", 0.0)])
async def test_a_client_may_shorten_its_wait_and_never_lengthens_it(asked: str, waited_s: float) -> None:
    app = App(is_held=True)
    async with guarding(app, policy(requests="1", max_wait="200ms")) as guarded:
        first = asking(guarded)
        await guarded.until(leases=1)
        refused = await guarded.ask(None, f"x-admission-max-wait: {asked}")
        assert refused.is_error(503, "queue_timeout", "normal", f"{waited_s:g} s", "again")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        app.release()
        await first
        waited_us = guarded.recorder.stories[1].one(Refused).queue_wait_us
    assert waited_s - 0.005 <= waited_us / 1e6 < waited_s + 0.15


async def test_one_that_would_have_to_wait_no_time_is_admitted_where_there_is_room() -> None:
    async with guarding(App(), NARROW) as guarded:
        assert (await guarded.ask(None, "x-admission-max-wait: 0s")).status == 200


@pytest.mark.parametrize("value", ["5", "-1s", "soon", "", "1e400s", "nan", "99999999h", "\xe9"])
async def test_a_longest_wait_that_is_no_duration_is_a_400(value: str) -> None:
    async with guarding(App()) as guarded:
        refused = await guarded.ask(None, f"x-admission-max-wait: {value}")
        assert refused.is_error(400, "invalid_header", "x-admission-max-wait", "write")


async def test_who_comes_again_with_the_same_body_finds_the_place_that_was_promised_to_it() -> None:
    app = App(is_held=True)
    async with guarding(app, policy(requests="1", max_requests="2")) as guarded:
        requests = [asking(guarded, priority="batch", user=f"{count}") for count in range(3)]
        await guarded.until(waiting=2)
        refused = await guarded.ask(chat(priority="batch", user="refused"), "x-stainless-retry-count: 0")
        assert refused.is_error(503, "queue_full")
        assert int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
        app.release()
        await guarded.until(waiting=1)
        assert (await guarded.ask(chat(priority="batch", user="another"))).is_error(503, "queue_full")
        twin = await guarded.ask(chat(priority="batch", user="refused"), "x-stainless-retry-count: 0")
        assert twin.is_error(503, "queue_full")
        requests.append(asking(guarded, "x-stainless-retry-count: 1", priority="batch", user="refused"))
        await guarded.until(waiting=2)
        app.release(3)
        assert {answer.status for answer in await asyncio.gather(*requests)} == {200}


# The client


async def test_an_app_that_does_not_listen_loses_its_lease_when_the_grace_is_over() -> None:
    app = App(is_held=True)
    async with guarding(app, policy(grace="50ms")) as guarded:
        async with connected(guarded.port) as (_, writer):
            writer.write(post(CHAT, SMALL))
            await guarded.until(leases=1)
        await guarded.until(leases=0)  # though the app has not answered
        assert len(guarded.sidecar.watchdog) == 1
        assert guarded.recorder.ends == ["client_left"]
        app.release()


async def test_a_client_that_leaves_in_the_moment_of_its_grant_does_not_reach_the_app() -> None:
    app = App(is_held=True)
    guarded = Guarded(app, NARROW)
    first, second = Caller(guarded.sidecar, SMALL), Caller(guarded.sidecar, SMALL)
    running = [first.begin()]
    await guarded.until(leases=1)
    running.append(second.begin())
    await guarded.until(waiting=1)
    await asyncio.sleep(0.01)
    app.release()
    second.leave()
    await asyncio.wait_for(asyncio.gather(*running), 60)
    assert len(app.seen) == 1
    assert second.sent == []
    assert guarded.recorder.ends == ["completed", "client_left"]
    await guarded.nothing_left()


# The app


async def fails_before(send: Any) -> None:
    raise RuntimeError("before")


async def fails_after(send: Any) -> None:
    await start(send)
    await chunk(send, b"data: 1\n\n")
    raise RuntimeError("after")


async def says_nothing(send: Any) -> None:
    return


async def stops_halfway(send: Any) -> None:
    await start(send)
    await chunk(send, b"data: 1\n\n")


@pytest.mark.parametrize(
    ("behavior", "raised", "error"),
    [
        (fails_before, RuntimeError, "RuntimeError"),
        (fails_after, RuntimeError, "RuntimeError"),
        (says_nothing, None, "incomplete_response"),
        (stops_halfway, None, "incomplete_response"),
    ],
)
async def test_an_app_that_fails_gives_its_lease_back(
    behavior: Callable[[Any], Awaitable[None]], raised: type[Exception] | None, error: str
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await behavior(send)

    guarded = Guarded(app, policy())
    caller = Caller(guarded.sidecar, SMALL)
    if raised is None:
        await caller.run()
    else:
        with pytest.raises(raised):
            await caller.run()
    settled = guarded.recorder.stories[0].one(Settled)
    assert (settled.outcome, settled.error) == (Outcome.FAILED, error)
    await guarded.nothing_left()


@pytest.mark.parametrize("behavior", [fails_before, fails_after, says_nothing, stops_halfway])
async def test_a_failing_app_ends_as_it_would_without_us(behavior: Callable[[Any], Awaitable[None]]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        await receive()
        await behavior(send)

    async def through(port: int) -> bytes:
        async with connected(port) as (reader, writer):
            writer.write(post(CHAT, SMALL))
            return await reader.read()

    async with serving(app) as bare:
        without = await through(bare.port)
    async with guarding(app) as guarded:
        with_us = await through(guarded.port)
    assert with_us.partition(b"\r\n")[0] == without.partition(b"\r\n")[0]
    assert with_us.partition(b"\r\n\r\n")[2] == without.partition(b"\r\n\r\n")[2]


async def test_work_behind_the_response_does_not_hold_the_lease() -> None:
    finish = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await answer(send, b"{}")
        await finish.wait()

    guarded = Guarded(app, policy())
    running = Caller(guarded.sidecar, SMALL).begin()
    await guarded.until(stories=1, leases=0)
    assert not running.done()
    assert guarded.recorder.ends == ["completed"]
    finish.set()
    await running
    await guarded.nothing_left()


async def test_a_disconnect_that_servers_say_behind_a_response_is_no_departure() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.15)  # a round passes: somebody listens
        await start(send)
        await chunk(send, b"x", more=False)

    class Server(Caller):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if message["type"] == "http.response.body":
                self.leave()
                await asyncio.sleep(0.01)

    guarded = Guarded(app, policy(body_timeout="50ms"))
    await Server(guarded.sidecar, SMALL).run()
    assert guarded.recorder.ends == ["completed"]


async def test_an_app_that_fails_because_the_client_left_is_a_departure() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        raise RuntimeError("client gone")

    guarded = Guarded(app, policy())
    caller = Caller(guarded.sidecar, SMALL)
    running = caller.begin()
    await guarded.until(leases=1)
    caller.leave()
    with pytest.raises(RuntimeError):
        await running
    settled = guarded.recorder.stories[0].one(Settled)
    assert (settled.outcome, settled.error) == (Outcome.CLIENT_LEFT, None)


# The task


async def canceled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_canceled_while_waiting() -> None:
    app = App(is_held=True)
    guarded = Guarded(app, NARROW)
    first = Caller(guarded.sidecar, SMALL).begin()
    second = Caller(guarded.sidecar, SMALL).begin()
    await guarded.until(leases=1, waiting=1)
    await canceled(second)
    assert guarded.waiting == 0
    app.release()
    await first
    assert guarded.recorder.ends == ["completed", "canceled"]
    await guarded.nothing_left()


async def test_canceled_while_running() -> None:
    guarded = Guarded(App(is_held=True), policy())
    running = Caller(guarded.sidecar, SMALL).begin()
    await guarded.until(leases=1)
    await canceled(running)
    settled = guarded.recorder.stories[0].one(Settled)
    assert (settled.outcome, settled.error) == (Outcome.FAILED, "CancelledError")
    await guarded.nothing_left()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 does not count cancellations: this one is taken for ours")
async def test_canceled_in_the_moment_of_the_body_timeout_it_stays_canceled() -> None:
    guarded = Guarded(App(), policy(body_timeout="20ms"))
    caller = Caller(guarded.sidecar)
    running = caller.begin()
    await guarded.until(stories=1)
    (exchange,) = guarded.sidecar.watchdog._watched
    assert isinstance(exchange, RequestHandler)
    exchange._received_us -= 10**6
    exchange.check()
    await canceled(running)
    assert caller.sent == []
    await guarded.nothing_left()


async def test_a_timed_out_body_leaves_the_task_uncanceled() -> None:
    guarded = Guarded(App(), policy(body_timeout="20ms"))
    caller = Caller(guarded.sidecar)
    running = caller.begin()
    await asyncio.wait_for(running, 60)
    assert caller.status == 408
    assert getattr(running, "cancelling", int)() == 0
    await guarded.nothing_left()


async def test_a_server_that_is_stopped_leaves_nothing() -> None:
    app = App(is_held=True)
    guarded = Guarded(app, NARROW)
    writers = []
    async with serving(guarded.sidecar) as guarded.served:
        for request in (post(CHAT, SMALL), post(CHAT, SMALL), post(CHAT, SMALL)[:-3]):
            _, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
            writer.write(request)
            writers.append(writer)
        await guarded.until(leases=1, waiting=1, stories=3)
    await guarded.nothing_left()
    assert len(guarded.recorder.ends) == 3
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
