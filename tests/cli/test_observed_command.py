"""`sidecar observed` as a user runs it: before two sidecars that observe one pool, and before a port that is none."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.replicas import CHAT, POLICY, Replica, replicas
from tests.support.http import fetch
from tests.support.shared_pools import begun_store

REQUESTS = 12


async def sent(sidecars: list[Replica]) -> list[int]:
    """Sends more than the pool has room for, over all sidecars in turn, and one with a key that no one has."""
    body = {"model": "m", "max_tokens": 15, "messages": [{"role": "user", "content": "hello"}]}
    async with aiohttp.ClientSession() as client:

        async def one(number: int) -> int:
            headers = {"authorization": "Bearer sk-nobody"} if number == 0 else {}
            async with client.post(sidecars[number % len(sidecars)].url + CHAT, json=body, headers=headers) as response:
                assert response.headers["x-admission-mode"] == "observe"
                await response.read()
                return response.status

        return await asyncio.gather(*(one(number) for number in range(REQUESTS)))


def run(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "sidecar.cli", "observed", *arguments], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    return ended.stdout


def figures(sidecar: Replica, replicas: int) -> Any:
    """The report, when the replica has decided on its requests and has heard of the others."""
    end_s = time.monotonic() + 60
    while True:
        report = fetch(f"{sidecar.admin_url}/observed").json
        counted = report["total"]["requests"], report["undecided"], len(report["left_out"])
        if counted == (REQUESTS // replicas, 0, replicas - 1):
            return report
        assert time.monotonic() < end_s, report
        time.sleep(0.1)


@pytest.mark.long
def test_each_of_two_replicas_tells_what_enforcing_would_have_done_to_its_own_requests(tmp_path: Path) -> None:
    observing = POLICY.replace("engine: vllm", "engine: vllm\nmode: observe")
    with (
        begun_store(tmp_path) as store,
        replicas(tmp_path, 2, observing, SIDECAR_STORE=store.url) as sidecars,
    ):
        assert asyncio.run(sent(sidecars)) == [200] * REQUESTS
        first, second = (figures(sidecar, 2) for sidecar in sidecars)
        assert (first["replicas"], second["replicas"]) == (second["left_out"], first["left_out"])
        assert (first["total"]["refused"], second["total"]["refused"]) == ({"invalid_api_key": 1}, {})
        assert first["total"]["admitted"] + second["total"]["admitted"] == REQUESTS - 1
        # Four have room at a time. One that the other replica's overtook on its way to the store has waited, too.
        assert REQUESTS - 1 - 4 <= first["total"]["waited"] + second["total"]["waited"] < REQUESTS
        assert [row["name"] for row in first["tiers"]] == ["high", ""]
        assert first["conclusion"].startswith("Enforcing would have refused 1 of 6 requests (17%)")
        assert json.loads(run("--admin", sidecars[0].admin_url, "--json", "-"))["total"] == first["total"]
        said = run("--admin", sidecars[0].admin_url)
        assert said.startswith("mode: observe, policy ")
        assert f"not counted: 1 replica observes, too ({second['replicas'][0]})" in said
        assert first["conclusion"][:40] in said
        overview = asyncio.run(sidecars[1].overview())
        assert overview["headline"].startswith("No request is held (mode: observe).")
        assert any("mode: observe" in notice for notice in overview["notices"])
