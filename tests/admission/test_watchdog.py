"""One timer looks after everybody, only while there is somebody."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sidecar.admission import watchdog
from sidecar.admission.watchdog import Watchdog
from sidecar.app import AdmissionMiddleware
from sidecar.cluster.document import PoolFigures
from tests.support.middleware import SMALL, App, Caller, policy
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Visitor:
    def __init__(self) -> None:
        self.visits = 0
        self.has_given_up = False

    def check(self) -> None:
        self.visits += 1

    def give_up(self) -> None:
        self.has_given_up = True


async def test_every_waiter_for_the_end_is_woken() -> None:
    rounds, first, second = Watchdog(1), Visitor(), Visitor()
    await asyncio.wait_for(rounds.emptied(), 60)
    rounds.add(first)
    waiting = [asyncio.create_task(rounds.emptied()) for _ in range(3)]
    await asyncio.sleep(0)
    rounds.discard(first)
    rounds.add(second)  # the next one is here before they look
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    rounds.discard(second)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)


async def test_a_check_that_fails_keeps_no_other_from_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Visitor):
        def check(self) -> None:
            super().check()
            raise RuntimeError("a fault in a check")

    rounds, visitors = Watchdog(0.01), [Broken(), Visitor(), Broken(), Visitor()]
    for visitor in visitors:
        rounds.add(visitor)
    await until(lambda: all(visitor.visits >= 2 for visitor in visitors))
    for visitor in visitors:
        rounds.discard(visitor)
    assert {str(record.exc_info[1]) for record in caplog.records if record.exc_info} == {"a fault in a check"}


async def test_a_call_that_blocks_the_loop_is_counted_and_said_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through a handler: what blocks is one of the host's, and the timer is ours."""
    monkeypatch.setattr(watchdog, "BLOCKED_S", 0.2)

    async def blocks(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251  # the fault that this is about
        await until(lambda: sidecar.controller.watchdog.blocked_s != before_s)
        await App()(scope, receive, send)

    sidecar = AdmissionMiddleware(blocks, policy=policy(body_timeout="50ms"))
    for _ in range(2):
        before_s = sidecar.controller.watchdog.blocked_s
        caller = Caller(sidecar, SMALL)
        await asyncio.wait_for(caller.run(), 60)
        assert caller.status == 200
    sample = sidecar.observability._gauges.sample()
    assert sample is not None
    assert [figures.loop_blocked_s > 0.8 for _, figures in sample if isinstance(figures, PoolFigures)] == [True]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "sidecar.watchdog"]
    assert "stood still for 0." in line
    assert "with 1 requests under way" in line
