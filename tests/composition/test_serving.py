"""The parts of one process of `sidecar serve`."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from sidecar.composition.serving import ServeSettings, Serving, load_policy
from tests.support.serving import serving

pytestmark = pytest.mark.anyio


async def test_it_is_not_ready_before_clients_are_served(tmp_path: Path) -> None:
    """The admin pages answer earlier: a pool in a store that is made anew admits no one at first."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("engine: vllm\ncapacity: {requests: 8}\ntiers: {normal: {}}\nanonymous: normal\n")
    settings = ServeSettings("http://127.0.0.1:9", str(policy), "127.0.0.1", 0, "127.0.0.1", 0, grace_s=1.0)
    parts = Serving(settings, load_policy(str(policy)))
    try:
        async with serving(parts.served.pages) as admin, aiohttp.ClientSession(admin.url) as client:
            async with client.get("/readyz") as answer:
                assert (answer.status, (await answer.json())["reasons"]) == (
                    503,
                    ["this process is starting: clients are not served yet"],
                )
            parts.served.opened()
            async with client.get("/readyz") as answer:
                assert (answer.status, (await answer.json())["reasons"]) == (200, [])
    finally:
        parts._end_telemetry()
