"""A process notices that its policy's files were edited, and says so wherever somebody looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.live.policy_watch import PolicyWatch
from sidecar.policy.loading import load
from sidecar.policy.watch import PolicyFiles
from tests.support.door import write_policy

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def watching(pool: Path) -> AsyncIterator[PolicyWatch]:
    watch = PolicyWatch(PolicyFiles(pool, load(pool).generation), every_s=0.02)
    await watch.start()
    try:
        yield watch
    finally:
        await watch.stop()


async def until(watch: PolicyWatch, words: str) -> None:
    async def said() -> None:
        while words not in " ".join(watch.notices()) or (not words and watch.notices()):  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0.01)

    await asyncio.wait_for(said(), 5)


async def test_a_broken_file_is_a_notice_a_log_line_and_a_count_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.policy")
    pool = write_policy(tmp_path)
    before = pool.read_text()
    async with watching(pool) as watch:
        pool.write_text("engine: [")
        await until(watch, "a restart would fail")
        assert f"{pool}:2" in watch.notices()[0]
        assert watch.rejections == 1
        pool.write_text(before + "# longer\n")
        await until(watch, "restart to run by them")
        pool.write_text(before)
        await until(watch, "")
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events == ["policy_rejected", "policy_changed", "policy_current"]


async def test_nothing_is_said_of_files_that_are_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with watching(write_policy(tmp_path)) as watch:
        await asyncio.sleep(0.1)
        assert watch.notices() == ()
    assert caplog.records == []
