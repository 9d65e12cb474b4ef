"""Draining: no one new, and everybody who is there to the end."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.middleware import App, Guarded, guarding, policy
from tests.support.wire import exchange, get

pytestmark = pytest.mark.anyio


async def test_new_requests_are_refused_and_those_that_wait_or_run_are_served_to_their_end() -> None:
    app = App(is_held=True)
    async with guarding(app, policy(requests="1")) as guarded:
        running = asyncio.create_task(guarded.ask())
        await guarded.until(leases=1)
        waiting = asyncio.create_task(guarded.ask())
        await guarded.until(waiting=1)

        guarded.sidecar.drain()
        drained = [asyncio.create_task(guarded.sidecar.drained()) for _ in range(2)]
        refused = await guarded.ask()
        assert refused.is_error(503, "draining", "shutting down", "another")
        assert refused.headers["retry-after"] == "1"
        assert not any(task.done() for task in drained)

        app.release()
        assert (await running).status == 200
        await guarded.until(leases=1, waiting=0)
        assert not any(task.done() for task in drained)
        app.release()
        assert (await waiting).status == 200
        await asyncio.wait_for(asyncio.gather(*drained), 60)
    assert guarded.recorder.ends == ["completed", "completed", "draining"]


async def test_what_is_not_guarded_is_served_while_draining() -> None:
    async with guarding(App()) as guarded:
        guarded.sidecar.drain()
        assert (await exchange(guarded.port, get("/health"))).startswith(b"HTTP/1.1 200")


async def test_with_nothing_under_way_it_is_drained_at_once() -> None:
    sidecar = Guarded(App(), policy()).sidecar
    sidecar.drain()
    await asyncio.wait_for(sidecar.drained(), 60)


async def test_readiness_and_state_say_so() -> None:
    sidecar = Guarded(App(), policy()).sidecar
    assert (list(sidecar.readiness()), sidecar.state()["draining"]) == ([], False)
    sidecar.drain()
    assert (list(sidecar.readiness()), sidecar.state()["draining"]) == (["draining"], True)


async def test_draining_refuses_before_it_reads_key_or_body() -> None:
    async with guarding(App()) as guarded:
        guarded.sidecar.drain()
        assert (await guarded.ask(b"not JSON", "x-api-key: sk-wrong")).code == "draining"
        assert (await guarded.ask(b"{", path="/v1/messages")).json["error"]["type"] == "overloaded_error"
