"""A replica that starts without its store: `on_store_loss` decides there, too, and `mode: observe` keeps every pod."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.policy.store import STORE_VARIABLE
from tests.support.middleware import App, chat, key
from tests.support.waiting import until
from tests.test_reload import reloading

pytestmark = pytest.mark.anyio
NEVER = "the store has not been reached yet"


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, "redis://127.0.0.1:9/0")


async def test_it_divides_the_pool_by_the_replicas_of_the_policy(tmp_path: Path) -> None:
    app = App(is_held=True)
    async with reloading(app, tmp_path, more="replicas: 2\n", requests="5") as site:
        asked = [asyncio.ensure_future(site.ask(chat(), key("acme"))) for _ in range(3)]
        await until(lambda: (site.pool()["leases"], site.pool()["waiting"]) == (2, 1))
        controller = site.sidecar.controller
        assert controller.readiness() == []
        (notice,) = (said for said in controller.notices() if said.startswith(NEVER))
        assert "its part of the pool is 50,000 of 100,000 tokens and 2 of 5 requests" in notice
        assert site.pool()["store"]["part"] == {"tokens": 50_000, "requests": 2}
        app.release(3)
        assert [answered.status for answered in await asyncio.gather(*asked)] == [200] * 3


async def test_alone_it_has_the_whole_pool_and_one_that_is_closed_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reloading(App(), tmp_path / "divide") as site:
        assert (await site.ask(chat(), key("acme"))).status == 200
        assert site.pool()["capacity"] == {"tokens": 100_000, "requests": 4}
    async with reloading(App(), tmp_path / "closed", more="on_store_loss: closed\n") as site:
        assert (await site.ask(chat(), key("acme"))).is_error(503, "store_unavailable")
        (reason,) = site.sidecar.controller.readiness()
        assert reason.startswith(NEVER)
        caplog.clear()
    assert "are lost" not in caplog.text, "it has served nothing"


async def test_a_dry_run_is_ready_whatever_the_store_does_and_says_it_as_a_notice(tmp_path: Path) -> None:
    async with reloading(App(), tmp_path, more="mode: observe\non_store_loss: closed\n") as site:
        assert (await site.ask(chat(), key("acme"))).status == 200
        assert site.sidecar.controller.readiness() == []
        assert any(said.startswith(NEVER) for said in site.sidecar.controller.notices())
