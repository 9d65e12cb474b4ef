"""A process follows its policy's files, and says what it made of them wherever somebody looks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.reload import FilesReading, PolicyFiles, PolicyReloader
from tests.support.middleware import write_policy
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Process:
    """What follows a policy. `defect` is raised instead of following another."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.defect: Exception | None = None

    def change_policy(self, policy: Policy) -> None:
        if self.defect is not None:
            raise self.defect
        self.policy = policy


class LookedAt(PolicyFiles):
    """`looked` is set after the first look."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.looked = threading.Event()

    def look(self, *, at_once: bool = False) -> FilesReading | None:
        try:
            return super().look(at_once=at_once)
        finally:
            self.looked.set()


@asynccontextmanager
async def watching(pool: Path) -> AsyncIterator[tuple[PolicyReloader, Process]]:
    process = Process(load(pool))
    watch = PolicyReloader(PolicyFiles(pool), process, every_s=0.02)
    await watch.start()
    try:
        yield watch, process
    finally:
        await watch.stop()


def says(watch: PolicyReloader, words: str) -> Callable[[], bool]:
    return lambda: words in " ".join(watch.notices())


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["event"] for record in caplog.records]


async def test_a_changed_file_replaces_what_runs_and_the_log_says_what_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.policy")
    pool = write_policy(tmp_path)
    async with watching(pool) as (watch, process):
        first = process.policy.generation
        write_policy(tmp_path, requests="8")
        await until(lambda: process.policy.rules.requests == 8)
        assert watch.notices() == ()
        assert watch.rejections == 0
    line = f"policy reloaded, generation {first} -> {process.policy.generation}: capacity requests 4 -> 8"
    assert [record.getMessage() for record in caplog.records] == [line]
    assert events(caplog) == ["policy_reloaded"]


async def test_a_broken_file_leaves_the_good_policy_in_force_and_is_said_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.policy")
    pool = write_policy(tmp_path)
    before = pool.read_text()
    async with watching(pool) as (watch, process):
        running = process.policy
        pool.write_text("engine: [")
        await until(says(watch, f"generation {running.generation} stays in force: {pool}:2"))
        assert (watch.rejections, process.policy) == (1, running)
        pool.write_text("engine: vlm\ntiers: {}\n")
        await until(says(watch, f"\n{pool}:2: tiers: "))
        assert all("\n" not in record.getMessage() for record in caplog.records), "one line each"
        pool.write_text(before)
        await until(lambda: watch.notices() == ())
        assert process.policy is running
    assert events(caplog) == ["policy_rejected", "policy_rejected", "policy_current"]


async def test_two_mistakes_are_one_line_of_the_log_and_a_line_each_of_the_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = write_policy(tmp_path)
    async with watching(pool) as (watch, _):
        pool.write_text(pool.read_text() + "first: 1\nsecond: 2\n")
        await until(lambda: watch.rejections == 1)
        (notice,) = watch.notices()
    assert len(notice.splitlines()) == 2
    assert [record.getMessage() for record in caplog.records] == ["; ".join(notice.splitlines())]


async def test_what_needs_a_restart_is_kept_out_whole_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.policy")
    pool = write_policy(tmp_path)
    async with watching(pool) as (watch, process):
        running = process.policy
        write_policy(tmp_path, engine="vllm", requests="8")
        await until(says(watch, "needs a restart for engine: all of it is kept out"))
        assert (watch.rejections, process.policy) == (1, running)
        write_policy(tmp_path, requests="8")
        await until(lambda: process.policy.rules.requests == 8)
        assert watch.notices() == ()
    assert events(caplog) == ["policy_needs_restart", "policy_reloaded"]


async def test_a_caller_is_answered_at_once_also_where_nothing_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sidecar.policy")
    pool = write_policy(tmp_path)
    process, files = Process(load(pool)), LookedAt(pool)
    watch = PolicyReloader(files, process, every_s=3600)
    await watch.start()
    assert await asyncio.to_thread(files.looked.wait, 60)
    write_policy(tmp_path, requests="8")
    watch.look_at_once()
    await until(lambda: process.policy.rules.requests == 8)
    watch.look_at_once()
    await until(lambda: "policy_current" in events(caplog))
    await watch.stop()
    assert events(caplog) == ["policy_asked", "policy_reloaded", "policy_asked", "policy_current"]


async def test_a_warning_is_reported_when_it_is_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = write_policy(tmp_path)
    async with watching(pool) as (_, process):
        pool.write_text(pool.read_text().replace("critical: {}", "critical: {reserve: 90%}"))
        await until(lambda: process.policy.rules.tiers[0].reserve[1] > 0)
        await until(lambda: len(caplog.records) > 1)
    reloaded, *warned = [record.getMessage() for record in caplog.records]
    assert "tier critical reserve 0% -> 90%" in reloaded
    assert len(warned) == 1
    assert f"{pool}:3: tiers: 90% of the pool is reserved" in warned[0]


async def test_a_defect_of_ours_keeps_the_policy_and_goes_on_looking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(write_policy(tmp_path)) as (watch, process):
        running, process.defect = process.policy, RuntimeError("oops")
        write_policy(tmp_path, requests="8")
        await until(says(watch, "a defect in the sidecar, see the log: RuntimeError: oops"))
        assert process.policy is running
        process.defect = None
        write_policy(tmp_path, requests="9")
        await until(lambda: process.policy.rules.requests == 9)
        assert watch.notices() == ()
    assert "RuntimeError: oops" in caplog.text


async def test_nothing_is_said_of_files_that_are_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with watching(write_policy(tmp_path)) as (watch, _):
        await asyncio.sleep(0.3)
        assert watch.notices() == ()
    assert caplog.records == []
