"""A policy is replaced while requests wait and stream, through real HTTP: nothing is lost, and what is new counts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar import AdmissionMiddleware
from sidecar.cluster import overview
from sidecar.policy.store import STORE_VARIABLE
from tests.support.middleware import CHAT, Answer, App, chat, chunk, key, start, whole_body, write_policy
from tests.support.serving import serving
from tests.support.shared_pools import begun_store
from tests.support.waiting import until
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio


class Reloading:
    """A sidecar before an app, and its policy's files."""

    def __init__(self, sidecar: AdmissionMiddleware, folder: Path, port: int) -> None:
        self.sidecar, self.folder, self.port = sidecar, folder, port

    async def ask(self, body: Any = None, *headers: str, path: str = CHAT) -> Answer:
        raw = json.dumps(chat() if body is None else body).encode()
        return Answer.parsed(await asyncio.wait_for(exchange(self.port, post(path, raw, *headers)), 30))

    def pool(self) -> Any:
        return self.sidecar.controller.state()["pool"]

    def counted(self) -> tuple[int, int]:
        """How many were admitted and refused, as the live page counts them."""
        buckets = [
            bucket for tier in self.sidecar.observability._live._overview(time.time()).tiers for bucket in tier.recent
        ]
        return sum(bucket.admitted for bucket in buckets), sum(bucket.refused for bucket in buckets)

    async def write(self, more: str = "", **settings: str) -> None:
        """Writes the files anew, and returns when the sidecar follows them."""
        before = self.sidecar.controller.policy.generation
        write_policy(self.folder, more, **settings)
        await until(lambda: self.sidecar.controller.policy.generation != before)


@asynccontextmanager
async def reloading(app: Any, folder: Path, **settings: str) -> AsyncIterator[Reloading]:
    write_policy(folder, **settings)
    sidecar = AdmissionMiddleware(app, folder, is_shown=True)
    async with serving(sidecar) as served:
        yield Reloading(sidecar, folder, served.port)


async def test_requests_that_wait_and_run_outlast_a_smaller_and_a_larger_pool_in_order(tmp_path: Path) -> None:
    app = App(is_held=True)
    async with reloading(app, tmp_path, requests="4") as site:

        async def asks(number: int) -> asyncio.Task[Answer]:
            """The number is known by its maximum output; returns when it waits or runs."""
            before = site.pool()["leases"] + site.pool()["waiting"]
            asked = asyncio.ensure_future(site.ask(chat(max_tokens=100 + number)))
            await until(lambda: site.pool()["leases"] + site.pool()["waiting"] > before)
            return asked

        asked = [await asks(number) for number in range(12)]
        assert (site.pool()["leases"], site.pool()["waiting"]) == (4, 8)

        await site.write(requests="2")
        assert (site.pool()["leases"], site.pool()["waiting"]) == (4, 8), "what runs goes on, and who waits waits"
        app.release(2)
        await until(lambda: site.pool()["leases"] == 2)
        assert site.pool()["waiting"] == 8, "a smaller pool drains"
        app.release(1)
        await until(lambda: site.pool()["waiting"] == 7)
        assert site.pool()["leases"] == 2

        await site.write(requests="6")
        assert (site.pool()["leases"], site.pool()["waiting"]) == (6, 3), "a larger one lets them in at once"
        app.release(9)
        answers = await asyncio.gather(*asked)
        assert [answered.status for answered in answers] == [200] * 12
        assert [seen.json["max_tokens"] for seen in app.seen] == [100 + number for number in range(12)]
        await until(lambda: site.pool()["leases"] == site.pool()["waiting"] == site.sidecar.controller.under_way == 0)
        assert [tier["held"] for tier in site.pool()["tiers"]] == [{"tokens": 0, "requests": 0}] * 4
        assert site.counted() == (12, 0)


async def test_a_stream_goes_on_through_a_reload_and_its_tenant_may_be_gone_by_then(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await App()(scope, receive, send)
            return
        await whole_body(receive)
        await start(send, content_type=b"text/event-stream")
        await chunk(send, b"data: one\n\n")
        await go_on.wait()
        await chunk(send, b"data: two\n\n", more=False)

    async with reloading(streams, tmp_path, requests="1") as site:
        first = asyncio.ensure_future(site.ask(chat(stream=True), key("acme")))
        await until(lambda: site.pool()["leases"] == 1)
        waits = asyncio.ensure_future(site.ask(chat(stream=True), key("acme")))
        await until(lambda: site.pool()["waiting"] == 1)
        before = site.sidecar.controller.policy.generation
        (tmp_path / "tenants" / "acme.yaml").unlink()
        await until(lambda: site.sidecar.controller.policy.generation != before)
        assert (await site.ask(chat(), key("acme"))).is_error(401, "invalid_api_key")
        go_on.set()
        for answered in await asyncio.gather(first, waits):
            assert (answered.status, answered.body) == (200, b"data: one\n\ndata: two\n\n")
            assert answered.headers["x-admission-tier"] == "normal"
        await until(lambda: site.pool()["leases"] == site.sidecar.controller.under_way == 0)


async def test_requests_that_never_stop_coming_meet_no_gap(tmp_path: Path) -> None:
    """Every one of them is served while the policy changes back and forth under them, and all are counted."""
    async with reloading(App(), tmp_path, requests="3") as site:
        is_over = asyncio.Event()
        statuses: list[int] = []

        async def keeps_asking() -> None:
            while not is_over.is_set():
                statuses.append((await site.ask(None, key("acme"))).status)
                await asyncio.sleep(0.005)

        clients = [asyncio.ensure_future(keeps_asking()) for _ in range(6)]
        for requests in ("1", "9", "2"):
            await site.write(requests=requests)
            assert site.pool()["capacity"]["requests"] == int(requests)
        is_over.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        await until(lambda: site.pool()["leases"] == site.pool()["waiting"] == site.sidecar.controller.under_way == 0)
        assert site.counted() == (len(statuses), 0)


@pytest.mark.alone
async def test_a_removed_tenants_key_stops_within_a_second(tmp_path: Path) -> None:
    """The best of three: whether the machine has time for us is another question."""
    async with reloading(App(), tmp_path) as site:
        file = tmp_path / "tenants" / "acme.yaml"
        text, took_s = file.read_text(), []
        for _ in range(3):
            assert (await site.ask(None, key("acme"))).status == 200
            file.unlink()
            removed_s = time.monotonic()
            while (await site.ask(None, key("acme"))).status != 401:
                assert time.monotonic() - removed_s < 15
                await asyncio.sleep(0.01)
            took_s.append(time.monotonic() - removed_s)
            before = site.sidecar.controller.policy.generation
            file.write_text(text)
            await until(lambda before=before: site.sidecar.controller.policy.generation != before)
            await asyncio.sleep(0.3)  # in another moment of its round
        assert min(took_s) < 1.0, took_s


async def test_endpoints_sources_and_sizes_are_those_of_the_new_policy(tmp_path: Path) -> None:
    app = App()
    async with reloading(app, tmp_path, max_body="1KiB") as site:
        assert (await site.ask(chat(pad="x" * 2000))).status == 413
        large = json.dumps(chat(pad="x" * 2000))
        write_policy(tmp_path, max_body="64KiB")
        path = tmp_path / "policy.yaml"
        before = site.sidecar.controller.policy.generation
        path.write_text(
            path.read_text().replace("  /v1/embeddings: {}\n", "  /v2/chat: {api: chat, tier: batch}\n")
            + "tier_header: x-tier\n"
        )
        await until(lambda: site.sidecar.controller.policy.generation != before)
        assert (await site.ask(json.loads(large), "x-tier: batch")).headers["x-admission-tier"] == "batch"
        assert (await site.ask(path="/v2/chat")).headers["x-admission-tier"] == "batch"
        assert "x-admission-tier" not in (await site.ask(path="/v1/embeddings")).headers
        assert site.sidecar.controller.watchdog.interval_s == 1.0


async def test_everything_that_shows_the_policy_shows_the_new_one(tmp_path: Path) -> None:
    async with reloading(App(), tmp_path) as site:
        await site.write("mode: observe\n", requests="8")
        state: Any = site.sidecar.controller.state()
        assert state["policy"]["generation"] == site.sidecar.controller.policy.generation
        live = site.sidecar.observability._live.overview()
        assert live.generation == site.sidecar.controller.policy.generation
        assert live.capacity.requests == 8


async def test_a_sidecar_begins_and_ends_to_observe_while_others_wait(tmp_path: Path) -> None:
    app = App(is_held=True)
    async with reloading(app, tmp_path, requests="1") as site:
        asked = [asyncio.ensure_future(site.ask())]
        await until(lambda: len(app.seen) == 1)
        asked.append(asyncio.ensure_future(site.ask()))
        await until(lambda: site.pool()["waiting"] == 1)
        await site.write("mode: observe\n", requests="1")
        asked.append(asyncio.ensure_future(site.ask()))
        await until(lambda: len(app.seen) == 2)
        assert site.pool()["leases"] == 1, "who came before waits its turn, who comes now passes"
        await site.write(requests="1")
        await until(lambda: site.pool()["waiting"] == 1)  # no one stands behind a shadow
        asked.append(asyncio.ensure_future(site.ask()))
        await until(lambda: site.pool()["waiting"] == 2)
        app.release(4)
        assert [answered.status for answered in await asyncio.gather(*asked)] == [200] * 4
        await until(lambda: site.pool()["leases"] == site.pool()["waiting"] == site.sidecar.controller.under_way == 0)


async def test_replicas_that_run_different_policies_say_so_until_they_run_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "LASTING_S", 0.0)
    with begun_store(tmp_path) as store:
        monkeypatch.setenv(STORE_VARIABLE, store.url)
        async with (
            reloading(App(), tmp_path / "one", more="max_choices: 2\n") as one,
            reloading(App(), tmp_path / "two", more="max_choices: 3\n") as two,
        ):
            for site, theirs in ((one, two), (two, one)):
                here, there = (each.sidecar.controller for each in (site, theirs))
                said = f"runs policy generation {there.policy.generation}, this one {here.policy.generation}, for "
                await until(lambda said=said, here=here: said in " ".join(here.notices()))
                assert set(here.state()["generations"]) == {here.policy.generation, there.policy.generation}
            await two.write("max_choices: 2\n")
            for site in (one, two):
                await until(lambda controller=site.sidecar.controller: len(controller.state()["generations"]) == 1)
                assert site.sidecar.controller.notices() == []
