"""A policy that orders by gain, with real requests: whose deadline is nearer goes first, whatever came first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from tests.support.middleware import App, chat, guarding, write_policy

pytestmark = pytest.mark.anyio

SLO = "30s}, slo: {ttft: 2s, tpot: 100ms}, gain: {weight: 4"
"""Of tier normal, the tier of requests without a key."""


def by(order: str, folder: Path, more: str = "") -> Policy:
    return load(write_policy(folder, f"order: {order}\n{more}", requests="1", max_wait=SLO))


def came(app: App) -> list[str]:
    """Who came, in order."""
    return [dict(seen.scope["headers"])[b"x-name"].decode() for seen in app.seen]


async def served(policy: Policy, *requests: list[str]) -> list[str]:
    """The order in which the app gets requests that wait behind one; `requests` are their headers."""
    app = App(is_held=True)
    async with guarding(app, policy) as guarded:
        asked = [asyncio.ensure_future(guarded.ask(chat(), "x-name: running"))]
        await guarded.until(leases=1)
        for number, headers in enumerate(requests):
            asked.append(asyncio.ensure_future(guarded.ask(chat(), *headers)))
            await guarded.until(waiting=number + 1)
        app.release(len(asked))
        assert [found.status for found in await asyncio.gather(*asked)] == [200] * len(asked)
    return came(app)[1:]


@pytest.mark.parametrize(
    ("order", "expected"), [("level", ["patient", "urgent", "bulk"]), ("gain", ["patient", "urgent", "bulk"])]
)
async def test_no_deadline_goes_before_an_earlier_request(tmp_path: Path, order: str, expected: list[str]) -> None:
    """They earn the same for the engine's time: rule 9 knows weight, share and cost."""
    found = await served(
        by(order, tmp_path),
        ["x-name: bulk", "authorization: Bearer sk-nightly"],  # a tier without an slo
        ["x-name: patient", "x-slo-ttft-ms: 60000"],
        ["x-name: urgent"],
    )
    assert found == expected


async def test_a_request_that_a_limit_moved_to_another_tier_has_no_gain_there(tmp_path: Path) -> None:
    """It would keep the weight of the tier that it paid for no longer."""
    by("gain", tmp_path)
    with (tmp_path / "tenants" / "acme.yaml").open("a") as acme:
        acme.write("limits: {requests_per_minute: 1}\nover_limit: {downgrade: batch}\n")
    policy = load(tmp_path / "policy.yaml")
    own = "authorization: Bearer sk-acme"
    found = await served(policy, ["x-name: paid", own], ["x-name: over", own], ["x-name: without a key"])
    assert found == ["paid", "without a key", "over"]
