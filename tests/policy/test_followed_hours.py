"""Hours as time goes on: one change at each border, whatever the clock does, and whoever else changes the policy."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path

import pytest

from sidecar.policy import reload
from sidecar.policy.choices import Mode
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.policy.reload import FollowedHours
from tests.policy.files import SMALL, pool
from tests.support.each import each

pytestmark = pytest.mark.anyio
DAY = "mon-fri 08:00-18:00 UTC"
BEGIN_S = datetime(2026, 11, 30, 8, tzinfo=timezone.utc).timestamp()
NIGHT, WORK = Fraction(3, 10), Fraction(1, 10)


def policy(folder: Path, limit: str = "30%", hours: str = f'{{"{DAY}": {{limit: 10%}}}}') -> Policy:
    return load(pool(folder, SMALL.replace("batch: {}", f"batch: {{limit: {limit}, hours: {hours}}}")))


class Governed:
    """Uses a policy, and keeps every one that it was given."""

    def __init__(self, first: Policy) -> None:
        self.policies, self.defects = [first], 0

    @property
    def policy(self) -> Policy:
        return self.policies[-1]

    def change_policy(self, policy: Policy) -> None:
        if self.defects:
            self.defects -= 1
            raise RuntimeError("cannot be used now")
        self.policies.append(policy)

    def limits(self) -> list[Fraction]:
        return [one.tiers[2].limit for one in self.policies]


class Following:
    """Hours that are followed by a clock that is set."""

    def __init__(self, written: Policy, now_s: float) -> None:
        self.now_s = now_s
        self.governed = Governed(written.at(now_s))
        self.hours = FollowedHours(self.governed, lambda: self.now_s)
        self.hours.start()

    def look(self, now_s: float) -> list[Fraction]:
        """As the timer does; what has counted so far, one after the other."""
        self.now_s = now_s
        self.hours._look()
        return self.governed.limits()


@each(
    ("clock", "counted"),
    [
        ((-10, -0.001, 0, 1, 3600), [NIGHT, WORK]),
        ((-1, 0, -1, 0.5, 10 * 3600 - 1, 10 * 3600), [NIGHT, WORK, NIGHT, WORK, NIGHT]),  # set back over the border
        ((-1, 24 * 3600 + 5), [NIGHT, WORK]),  # suspended for a night
        ((-1, 15 * 3600), [NIGHT]),  # and for a day: both borders have passed
    ],
)
async def test_each_border_is_one_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: tuple[float, ...], counted: list[Fraction]
) -> None:
    caplog.set_level(logging.INFO, "sidecar.policy")
    following = Following(policy(tmp_path), BEGIN_S - 60)
    for later_s in clock:
        following.look(BEGIN_S + later_s)
    following.hours.stop()
    assert following.governed.limits() == counted
    lines = [line.getMessage() for line in caplog.records if getattr(line, "event", "") == "policy_hours"]
    wanted = {NIGHT: "tier batch limit 10% -> 30%", WORK: "tier batch limit 30% -> 10%"}
    assert lines == [f"hours of the policy: {wanted[limit]}" for limit in counted[1:]]


async def test_a_reload_at_the_border_has_what_counts_then(tmp_path: Path) -> None:
    following = Following(policy(tmp_path), BEGIN_S - 1)
    following.now_s = BEGIN_S
    other = policy(tmp_path, limit="40%")
    following.hours.change_policy(other)
    assert following.governed.limits() == [NIGHT, WORK]
    assert following.hours.policy is other
    assert following.look(BEGIN_S + 1) == [NIGHT, WORK]  # the border that the reload has had already
    assert following.look(BEGIN_S + 10 * 3600)[-1] == Fraction(4, 10)
    following.hours.change_policy(replace(other, mode=Mode.PASS))
    assert following.governed.policy.mode is Mode.PASS
    following.hours.change_policy(policy(tmp_path, hours="{sat UTC: {limit: 50%}}"))
    assert following.governed.limits()[-1] == NIGHT
    following.hours.stop()


async def test_a_change_that_fails_is_made_at_the_next_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    following = Following(policy(tmp_path), BEGIN_S - 1)
    following.governed.defects = 1
    assert following.look(BEGIN_S) == [NIGHT]
    assert "a defect in the sidecar" in caplog.text
    assert following.look(BEGIN_S + 1) == [NIGHT, WORK]
    following.governed.defects = 1
    with pytest.raises(RuntimeError):
        following.hours.change_policy(policy(tmp_path, limit="40%"))
    assert following.look(BEGIN_S + 10 * 3600) == [NIGHT, WORK, NIGHT]  # of the policy that stayed
    following.hours.stop()


async def test_the_timer_meets_the_border_and_looks_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "LOOK_AGAIN_S", 0.01)
    following = Following(policy(tmp_path), BEGIN_S - 3600)
    loop = asyncio.get_running_loop()
    following.now_s = BEGIN_S + 1  # the clock is set, an hour before the timer of the border
    end_s = loop.time() + 60
    while following.governed.limits() != [NIGHT, WORK]:
        assert loop.time() < end_s
        await asyncio.sleep(0.001)
    following.hours.stop()
    following.now_s = BEGIN_S - 1
    await asyncio.sleep(0.05)
    assert following.governed.limits() == [NIGHT, WORK]  # no one follows any more


async def test_a_policy_without_hours_has_no_timer(tmp_path: Path) -> None:
    following = Following(load(pool(tmp_path)), BEGIN_S - 1)
    assert following.hours._timer is None
    assert following.look(BEGIN_S) == [1]
    following.hours.change_policy(policy(tmp_path))
    assert following.hours._timer is not None
    following.hours.stop()
