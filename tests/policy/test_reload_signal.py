"""SIGHUP in a server that is not ours is taken only where it is free, and given back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.policy import reload
from sidecar.policy.reload import ReloadSignal

pytestmark = pytest.mark.anyio
SAYS = "from sidecar.policy.reload import _has_terminal; print(_has_terminal(), flush=True)"


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reload, "_has_terminal", lambda: False)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def test_it_is_heard_until_it_is_let_go() -> None:
    heard = asyncio.Event()
    taken = ReloadSignal(heard.set)
    assert taken.take()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(heard.wait(), 60)
    taken.let_go()
    taken.let_go()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda *_: None])
async def test_one_that_means_something_already_is_left_alone(theirs: Any) -> None:
    signal.signal(signal.SIGHUP, theirs)
    taken = ReloadSignal(lambda: None)
    assert not taken.take()
    taken.let_go()
    assert signal.getsignal(signal.SIGHUP) is theirs


async def test_that_of_a_terminal_ends_the_process_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "_has_terminal", lambda: True)
    assert not ReloadSignal(lambda: None).take()


async def test_outside_of_the_main_thread_there_are_no_signals() -> None:
    async def take() -> bool:
        return ReloadSignal(lambda: None).take()

    assert not await asyncio.to_thread(lambda: asyncio.run(take()))


def test_a_terminal_is_noticed() -> None:
    root = Path(__file__).parents[2]
    without = subprocess.run(
        [sys.executable, "-c", SAYS], cwd=root, start_new_session=True, capture_output=True, text=True, check=True
    )
    assert without.stdout.strip() == "False"
    spawns = f"import pty, sys; pty.spawn([sys.executable, '-c', {SAYS!r}])"
    within = subprocess.run(
        [sys.executable, "-c", spawns], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert "True" in within.stdout
