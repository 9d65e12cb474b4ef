"""`mode: observe` before several engines: requests pass at once, to the engine with the fewest, and none is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fleet.routed import engines_of, ok, routed, rude, silent, write_policy
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_a_hurry")]
OBSERVE = "mode: observe"


async def test_requests_pass_however_many_and_spread_by_what_each_engine_has(tmp_path: Path) -> None:
    async with rude(silent, silent, silent) as stands:
        settings = {"capacity": "{tokens: 1k, requests: 1}", "max_wait": "0s", "more": OBSERVE}
        policy = write_policy(tmp_path / "policy.yaml", engines_of(stands), **settings)
        async with routed(policy) as sidecar:
            sidecar.recorder.check = lambda: None  # type: ignore[method-assign]  # a dry run has other stories
            asking = [sidecar.begin() for _ in range(30)]
            await until(lambda: sum(stand.count for stand in stands) == 30)
            assert [stand.count for stand in stands] == [10, 10, 10]
            for one in asking[:6]:
                one.cancel()
            await until(lambda: sum(member.open_requests for member in sidecar.fleet.members()) == 24)
            assert sum(sidecar.held.values()) <= 3, "the pool shows what enforcing would do"
            for one in asking:
                one.cancel()
            await until(lambda: not any(member.open_requests for member in sidecar.fleet.members()))


async def test_a_draining_engine_and_one_that_is_down_get_none(tmp_path: Path) -> None:
    async with rude(ok, ok, ok) as stands:
        policy = write_policy(tmp_path / "policy.yaml", engines_of(stands), more=OBSERVE)
        async with routed(policy) as sidecar:
            sidecar.recorder.check = lambda: None  # type: ignore[method-assign]
            sidecar.fleet.drain("b")
            await stands[0].crash()
            await until(lambda: sidecar.fleet.members()[0].state.value == "down")
            found = await asyncio.gather(*(sidecar.ask() for _ in range(12)))
            assert {reply.status for reply in found} == {200}
            assert [stand.count for stand in stands] == [0, 0, 12]
