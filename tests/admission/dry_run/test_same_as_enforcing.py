"""The proof of `mode: observe`: the same load, observed and enforced, waits alike and is refused alike.

Virtual time, and an engine that takes as long as the load says, whatever else it does. So both runs decide at the same
moments, and may differ by what a microsecond is rounded to.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.events import Admitted, Observed, Preempted, Refused, Risen
from sidecar.policy import compiler
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from tests.support.middleware import Caller, Recorder, TestedMiddleware, chat, write_policy
from tests.support.virtual_time import run_virtually, virtual_now_us

TOLERANCE_US = 10
TIERS = ("critical", "high", "normal", "batch")
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))]


@dataclass(frozen=True)
class Planned:
    """One request. Its client hangs up before the first byte, `patience_us` after it came; None: it waits for ever.

    With a `user` it is one of acme's.
    """

    at_us: int
    tier: str
    tokens: int
    runs_us: int
    patience_us: int | None
    deadline_us: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class Became:
    """What became of it: a refusal's code, `client_left`, or None where it was admitted."""

    code: str | None
    queue_wait_us: int
    starvation_us: int


def load(seed: int, count: int = 150) -> list[Planned]:
    """An overload that comes and goes: some tiers' requests are refused, most wait, some leave."""
    luck = random.Random(seed)
    planned, at_us = [], 0
    for _ in range(count):
        at_us += round(luck.expovariate(1 / luck.choice((20_000, 20_000, 400_000))))
        runs_us = luck.randrange(50_000, 900_000)
        leaves = luck.random() < 0.15
        planned.append(
            Planned(
                at_us,
                luck.choice(TIERS),
                luck.randrange(100, 30_000),
                runs_us,
                luck.randrange(1000, runs_us) if leaves else None,
            )
        )
    return planned


class Engine:
    """Takes as long as it should, streams its answer's first byte at the end, and hears when its client leaves."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        await receive()
        gone = asyncio.ensure_future(receive())
        await asyncio.wait((gone,), timeout=int(headers[b"x-runs-us"]) / 1e6)
        if gone.done():
            return
        gone.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def one(sidecar: TestedMiddleware, number: int, planned: Planned) -> None:
    await asyncio.sleep(planned.at_us / 1e6)
    body = chat(max_tokens=planned.tokens, priority=planned.tier)
    headers = [(b"x-request-id", b"%d" % number), (b"x-runs-us", b"%d" % planned.runs_us)]
    if planned.deadline_us is not None:
        headers.append((b"x-admission-deadline", b"%dus" % planned.deadline_us))
    if planned.user is not None:
        headers += [(b"authorization", b"Bearer sk-acme"), (b"x-user-id", planned.user.encode())]
    caller = Caller(sidecar, msgspec.json.encode(body), headers=headers)
    calling = caller.begin()
    if planned.patience_us is not None:
        await asyncio.wait((calling,), timeout=planned.patience_us / 1e6)
        if not calling.done():
            caller.leave()
    await calling


async def play(with_policy: Policy, plan: list[Planned], recorder: Recorder | None = None) -> list[Became]:
    """Plays a load through a sidecar; returns what became of each request, in the order of the plan."""
    recorder, found = recorder or Recorder(), list[Observed]()
    sidecar = TestedMiddleware(
        Engine(),
        policy=with_policy,
        pool=Pool(with_policy, virtual_now_us),
        observer=recorder,
        observed=found.append,
    )
    await asyncio.gather(*(one(sidecar, number, planned) for number, planned in enumerate(plan)))
    await asyncio.sleep(60)  # shadows outlive their requests
    assert len(sidecar.shadows) == 0
    assert (sidecar.pool.state()["leases"], sidecar.pool.state()["waiting"]) == (0, 0)
    became = {}
    if with_policy.mode is Mode.OBSERVE:
        became = {one.request_id: Became(one.code, one.queue_wait_us, one.starvation_us) for one in found}
        assert len(found) == len(plan)
    else:
        for story in recorder.stories:
            reported = [event for event in story.events if isinstance(event, Admitted | Refused)][-1]
            code = reported.code if isinstance(reported, Refused) else None
            became[story.received.request_id] = Became(code, reported.queue_wait_us, reported.starvation_us)
    return [became[str(number)] for number in range(len(plan))]


def policies(folder: Path, **changes: str) -> dict[Mode, Policy]:
    """Room for three; batch has a short queue, normal a short patience, the others wait for as long as it takes.

    Anybody may ask for any tier. `changes` are what stands in place of a tier's `{`.
    """
    users = "users: {limits: {requests_per_minute: 300, burst: 2s}}\n"
    path = write_policy(
        folder, requests="3", max_wait="800ms", max_requests="4", deadline=", max_deadline: 1h", acme=users
    )
    written = path.read_text().replace("anonymous: normal", "anonymous: critical")
    for tier, settings in changes.items():
        written = written.replace(f"  {tier}: {{", f"  {tier}: {{{settings}")
    path.write_text(written)
    loaded = compiler.load(path)
    return {mode: replace(loaded, mode=mode) for mode in (Mode.OBSERVE, Mode.ENFORCE)}


def alike(folder: Path, plan: list[Planned], **changes: str) -> tuple[list[Became], Recorder]:
    """Plays a load both ways, and fails where they are apart. Returns what became of it, and what was reported."""
    by_mode, recorder = policies(folder, **changes), Recorder()
    enforced = run_virtually(play(by_mode[Mode.ENFORCE], plan, recorder))
    observed = run_virtually(play(by_mode[Mode.OBSERVE], plan))
    assert [one.code for one in observed] == [one.code for one in enforced]
    for would, did in zip(observed, enforced, strict=True):
        assert would.queue_wait_us == pytest.approx(did.queue_wait_us, abs=TOLERANCE_US)
        if not changes:
            assert would.starvation_us == pytest.approx(did.starvation_us, abs=TOLERANCE_US)
    return enforced, recorder


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_requests_with_deadlines_would_rise_and_end_as_they_do(seed: int, tmp_path: Path) -> None:
    luck, planned = random.Random(seed), load(seed)
    for number, one in enumerate(planned):
        if one.tier == "batch":
            planned[number] = replace(one, deadline_us=luck.randrange(100_000, 2_000_000))
    enforced, recorder = alike(tmp_path, planned)
    events = [event for story in recorder.stories for event in story.events]
    assert {event.tier for event in events if isinstance(event, Risen)} == {"critical", "high", "normal"}
    assert "deadline" in {one.code for one in enforced}


def test_users_of_a_tenant_would_take_turns_and_meet_their_limits_as_they_do(tmp_path: Path) -> None:
    luck = random.Random(0)
    enforced, _ = alike(tmp_path, [replace(one, user=luck.choice("fffgh")) for one in load(0)])
    assert {one.code for one in enforced} >= {None, "tenant_limit", "queue_timeout"}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_enforcing_would_have_done_is_what_it_does(seed: int, tmp_path: Path) -> None:
    enforced, _ = alike(tmp_path, load(seed))
    # The load must show something: all endings, waits, and starvation.
    assert {one.code for one in enforced} == {None, "queue_full", "queue_timeout", "client_left"}
    assert sum(one.queue_wait_us > 0 for one in enforced) > 40
    assert any(one.starvation_us > 0 for one in enforced)


@pytest.mark.parametrize("seed", range(1, 3))
def test_so_it_is_where_running_requests_give_their_room_to_more_important_ones(seed: int, tmp_path: Path) -> None:
    plan = [replace(planned, patience_us=None) for planned in load(seed)]
    _, recorder = alike(tmp_path, plan, critical="preempt_after: 20ms", batch="preemptible: true, ")
    assert sum(isinstance(event, Preempted) for story in recorder.stories for event in story.events) > 3
