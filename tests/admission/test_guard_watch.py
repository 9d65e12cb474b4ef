"""A guarded tier that misses its SLO for another reason than less important work is reported, once each time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from sidecar.admission.slo import GuardWatch
from sidecar.policy.compiler import load
from sidecar.pools import Pool
from sidecar.pools.guards import GuardFigures
from tests.pools.harness import simple
from tests.support.middleware import SMALL, App, Caller, TestedMiddleware
from tests.support.virtual_time import run_virtually, virtual_now_us

POLICY = """\
engine: vllm
capacity: {tokens: 20k, requests: 8}
tiers:
  chat: {slo: {ttft: 1ms, tpot: 1ms, hold: 97%}}
  batch: {}
default_tier: chat
anonymous: chat
endpoints: {/v1/chat/completions: {}}
"""


class Guarded(Pool):
    in_vain: Sequence[str] = ()

    def guards(self) -> Sequence[GuardFigures]:
        return [GuardFigures(tier, 0.1, 0.0, 0.5, 10, 10, tier in self.in_vain) for tier in ("chat", "tools")]


def test_each_beginning_and_each_end_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sidecar.guard")
    pool = Guarded(simple())
    watch = GuardWatch(pool)

    def logged() -> list[str]:
        watch.look()
        watch.look()
        found = [
            f"{record.event}: {record.getMessage().split(' misses its SLO though')[0]}" for record in caplog.records
        ]
        caplog.clear()
        return found

    assert logged() == []
    assert watch.notices() == []
    pool.in_vain = ["chat"]
    assert logged() == ["guard_in_vain: tier chat"]
    (notice,) = watch.notices()
    assert notice.startswith("tier chat misses its SLO though less important work holds no more than its reserves: not")
    assert GuardWatch(pool, lambda: False).notices() == [], "nothing is held back in the dry run"
    pool.in_vain = ["chat", "tools"]
    assert logged() == ["guard_in_vain: tier tools"]
    pool.in_vain = []
    ended = "no longer misses its SLO without less important work"
    assert logged() == [f"guard_in_vain_ended: tier {tier} {ended}" for tier in ("chat", "tools")]


def test_an_slo_that_the_engine_cannot_keep_is_in_the_log_and_among_the_notices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    policy = load(tmp_path)

    async def misses() -> None:
        pool, app = Pool(policy, virtual_now_us), App(is_held=True)
        sidecar = TestedMiddleware(app, policy=policy, pool=pool)
        caller = asyncio.create_task(Caller(sidecar, SMALL).run())
        for _ in range(10):
            for number in range(12):
                pool.note_slo(0, f"tenant {number}", is_missed=True)
            await asyncio.sleep(3)
        assert any("tier chat misses its SLO" in notice for notice in sidecar.notices())
        assert [record.levelname for record in caplog.records if getattr(record, "event", "") == "guard_in_vain"] == [
            "WARNING"
        ]
        app.release()
        await caller

    run_virtually(misses())
