"""`mode: pass`, for the hour in which the sidecar itself is the problem: everything passes, whatever else is wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sidecar import AdmissionMiddleware
from sidecar.policy.passing import bare, load_or_pass, says_pass
from sidecar.policy.secrets import ENGINE_KEY_VARIABLE
from sidecar.policy.store import STORE_VARIABLE
from tests.support.each import each
from tests.support.in_process import ran, serving_engine, serving_sidecar, start_failure
from tests.support.middleware import CHAT, App, chat, key, write_policy
from tests.support.redis_servers import RedisServer
from tests.support.serving import serving
from tests.support.waiting import until
from tests.support.wire import exchange, post
from tests.test_reload import Reloading, reloading

pytestmark = pytest.mark.anyio
KEPT_ALIVE = "keep_alive: 50ms\n"
BROKEN = "mode: pass\ntiers: {high: 12\n"


def pool_file(site: Reloading) -> Path:
    return site.folder / "policy.yaml"


async def test_a_broken_file_that_says_pass_lets_all_through_and_a_mended_one_ends_it(tmp_path: Path) -> None:
    app = App(is_held=True)
    async with reloading(app, tmp_path, requests="1") as site:
        controller, good = site.sidecar.controller, pool_file(site).read_text()
        running = asyncio.ensure_future(site.ask(chat(), key("acme")))
        await until(lambda: site.pool()["leases"] == 1)
        waits = asyncio.ensure_future(site.ask({**chat(), "priority": "batch"}, key("acme")))
        await until(lambda: site.pool()["waiting"] == 1)

        pool_file(site).write_text(f"{good}{BROKEN}")
        await until(lambda: len(app.seen) == 2)
        assert (site.pool()["leases"], site.pool()["waiting"]) == (1, 0), "what runs is settled as usual"
        assert app.seen[1].json == {**chat(), "priority": "batch"}, "as the client sent it"
        assert app.seen[1].all(b"authorization") == [b"Bearer sk-acme"]
        unknown = asyncio.ensure_future(site.ask("no object", "authorization: Bearer sk-unknown"))
        await until(lambda: len(app.seen) == 3)
        app.release(3)
        answers = await asyncio.gather(running, waits, unknown)
        assert [answered.status for answered in answers] == [200] * 3
        assert "x-admission-tier" in answers[0].headers
        assert [name for name in answers[2].headers if name.startswith("x-admission")] == []

        assert controller.readiness() == []
        notices = controller.notices()
        assert notices[0].startswith("mode: pass: every request passes untouched")
        assert any("cannot be used" in notice for notice in notices), "its mistakes are said as well"
        assert controller.state()["mode"] == "pass"
        assert "mode: pass" in site.sidecar.observability._live.overview().headline

        pool_file(site).write_text(good)
        await until(lambda: not controller.is_passing)
        assert (await site.ask(chat(), "authorization: Bearer sk-unknown")).status == 401


async def test_a_policy_that_needs_a_restart_for_the_rest_passes_without_one(tmp_path: Path) -> None:
    async with reloading(App(), tmp_path) as site:
        controller = site.sidecar.controller
        write_policy(site.folder, more="mode: pass\npool: another\n")
        await until(lambda: controller.is_passing)
        assert any("needs a restart for pool" in notice for notice in controller.notices())
        assert (await site.ask(chat(), "authorization: Bearer sk-unknown")).status == 200


async def test_a_lease_from_python_passes_too_and_one_that_waits_does_at_once(tmp_path: Path) -> None:
    async with reloading(App(), tmp_path, requests="1") as site:
        admission = site.sidecar.admission
        async with admission.lease(tokens=10, tenant="acme"):

            async def second() -> float:
                async with admission.lease(tokens=10, tenant="acme") as lease:
                    return lease.queue_wait_s

            waits = asyncio.ensure_future(second())
            await until(lambda: site.pool()["waiting"] == 1)
            await site.write(more="mode: pass\n", requests="1")
            assert await asyncio.wait_for(waits, 60) > 0
            assert await asyncio.wait_for(second(), 60) == 0
        assert site.pool()["leases"] == 0


# -- the start


async def passes(sidecar: AdmissionMiddleware, app: App) -> None:
    async with serving(sidecar) as served, httpx2.AsyncClient(timeout=60) as client:
        answered = await client.post(served.url + CHAT, content=b"anything")
    assert (answered.status_code, app.seen[-1].body) == (200, b"anything")
    assert sidecar.controller.readiness() == []


@each(
    "written",
    [
        "mode: pass\n",
        BROKEN,
        "engine: vlm\nmode: pass # for now\ncapacity: {requests: 4}\ntiers: {normal: {}}\n",
        "mode: 'pass'\nengine: [\n",
    ],
)
async def test_it_starts_with_a_policy_that_is_none(tmp_path: Path, written: str) -> None:
    (tmp_path / "policy.yaml").write_text(written)
    app = App()
    await passes(AdmissionMiddleware(app, tmp_path), app)


async def test_it_starts_with_a_store_that_is_none_and_with_a_policy_that_wants_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, "no address")
    app = App()
    await passes(AdmissionMiddleware(app, write_policy(tmp_path, "mode: pass\n")), app)
    monkeypatch.delenv(STORE_VARIABLE)
    await passes(AdmissionMiddleware(app, write_policy(tmp_path, "mode: pass\nstored_tenants: true\n")), app)


async def test_the_environment_goes_before_the_policy_and_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_MODE", "pass")
    app = App()
    await passes(AdmissionMiddleware(app), app)
    await passes(AdmissionMiddleware(app, write_policy(tmp_path)), app)


async def test_another_mode_of_the_environment_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_MODE", "observe")
    write_policy(tmp_path)
    said = "SIDECAR_MODE: 'observe' is not pass, the one mode that the environment can ask for"
    assert said in str(await start_failure(AdmissionMiddleware(App(), tmp_path)))
    ended = ran("serve", "--upstream", "http://127.0.0.1:9", "--policy", str(tmp_path), "--port", "0")
    assert (ended.returncode, said in ended.stderr) == (1, True)
    monkeypatch.setenv("SIDECAR_MODE", "pass")
    ended = ran("serve", "--port", "0")
    assert (ended.returncode, "there is no engine to send requests to" in ended.stderr) == (1, True)


@each(
    ("line", "is_so"),
    [
        ("mode: pass", True),
        ('mode:   "pass"  # why', True),
        ("mode: pass\r", True),
        ("# mode: pass", False),
        (" mode: pass", False),
        ("mode: passing", False),
        ("mode: 'pass", False),
        ("mode: observe", False),
    ],
)
def test_which_line_says_pass(tmp_path: Path, line: str, is_so: bool) -> None:
    (tmp_path / "policy.yaml").write_bytes(b"tiers: [\xff\n" + line.encode() + b"\nmore: {\n")
    assert says_pass(tmp_path) is is_so
    assert not says_pass(tmp_path / "none.yaml")


def test_a_bare_policy_keeps_what_can_be_used_of_the_file(tmp_path: Path) -> None:
    path = write_policy(tmp_path, "mode: pass\nunknown: 1\nforward_key: true\n", engine="vllm")
    kept = load_or_pass(path, {}).policy
    assert (kept.is_bare, kept.engine.name, kept.forward_key, kept.anonymous is None) == (True, "vllm", True, False)
    write_policy(tmp_path, "store: redis://nowhere\n", engine="vllm")
    kept = load_or_pass(path, {"SIDECAR_MODE": "pass"}).policy
    assert (kept.store, kept.tenants, list(kept.endpoints)[-1]) == (None, {}, "/v1/batch/completions")
    path.write_text("{")
    assert (bare(path).policy.engine.name, bare(path).policy.anonymous) == ("none", None)


# -- what reaches the engine


async def test_the_engines_key_replaces_the_clients_and_who_shows_none_gets_it_where_the_policy_lets_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, "sk-engine")
    app = App()

    async def keys(site: Reloading, *headers: str) -> list[bytes]:
        assert (await site.ask(chat(), *headers, path="/v1/batch/completions")).status == 200
        assert app.seen[-1].scope["path"] == "/v1/completions"
        return app.seen[-1].all(b"authorization") + app.seen[-1].all(b"x-api-key")

    async with reloading(app, tmp_path, more="mode: pass\n") as site:
        assert await keys(site, key("acme")) == [b"Bearer sk-engine"]
        assert await keys(site, "x-api-key: anything") == [b"Bearer sk-engine"]
        assert await keys(site) == [b"Bearer sk-engine"]
        text = pool_file(site).read_text().replace("anonymous: normal", "anonymous: deny")
        pool_file(site).write_text(text)
        await until(lambda: site.sidecar.controller.policy.anonymous is None)
        assert await keys(site) == []
        assert await keys(site, "authorization: Bearer sk-unknown") == [b"Bearer sk-engine"]


@each(
    "more", ["mode: pass\n", "mode: pass\nunknown: 1\n"], ids=["in order", "started with a policy that has a mistake"]
)
async def test_a_gateways_request_gets_the_engines_key_in_place_of_the_name_of_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, "sk-engine")
    app = App()
    path = write_policy(tmp_path, f"{more}gateway: {{tenant_header: x-tenant, addresses: [10.0.0.0/8]}}\n")
    path.write_text(path.read_text().replace("anonymous: normal", "anonymous: deny"))
    async with serving(AdmissionMiddleware(app, tmp_path)) as served:
        await exchange(served.port, post(CHAT, b"{}", "x-tenant: acme"))
        await exchange(served.port, post(CHAT, b"{}"))
    assert [seen.all(b"authorization") + seen.all(b"x-tenant") for seen in app.seen] == [[b"Bearer sk-engine"], []]


async def test_a_path_is_mapped_in_every_spelling_that_is_guarded(tmp_path: Path) -> None:
    app = App()
    async with reloading(app, tmp_path, more="mode: pass\n") as site:
        for path in ("/v1/batch/completions", "//v1/./batch/completions", "/v1/batch/completions/"):
            assert (await site.ask(path=path)).status == 200
    assert [seen.scope["path"] for seen in app.seen] == ["/v1/completions"] * 3


async def test_of_several_engines_and_models_a_request_goes_to_one_that_can_answer_it(tmp_path: Path) -> None:
    async with (
        serving_engine("--engine", "vllm", "--model", "small") as small,
        serving_engine("--engine", "vllm", "--model", "large") as large,
    ):
        engines = [{"name": "a", "url": small}, {"name": "b", "url": large}, {"name": "c", "url": "http://127.0.0.1:9"}]
        written: dict[str, Any] = {
            "engine": "vllm",
            "mode": "pass",
            "engines": {"static": engines, "capacity": {"requests": 4, "tokens": "10k"}},
            "models": {"small": {"engines": ["a", "c"]}, "large": {"engines": ["b"]}},
            "tiers": {"normal": {}},
            "endpoints": {CHAT: {}},
        }
        (tmp_path / "policy.yaml").write_text(json.dumps(written))
        async with serving_sidecar(tmp_path) as (url, admin), httpx2.AsyncClient(timeout=60) as client:
            for model in ("small", "large", "small", "large"):
                answered = await client.post(url + CHAT, json={**chat(), "model": model, "max_tokens": 1})
                assert (answered.status_code, answered.json().get("model")) == (200, model)
            ready = await client.get(f"{admin}/readyz")
            assert (ready.status_code, "mode: pass" in ready.text) == (200, True)


# -- requests that wait when it is switched on


async def test_a_stream_that_was_sent_comments_while_it_waited_goes_on_as_one_stream(tmp_path: Path) -> None:
    app = App(is_held=True, answer=b"data: [DONE]\n\n")
    async with reloading(app, tmp_path, requests="1", more=KEPT_ALIVE) as site:
        running = asyncio.ensure_future(site.ask(chat(), key("acme")))
        await until(lambda: site.pool()["leases"] == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        packed = gzip.compress(json.dumps(chat(stream=True)).encode())
        writer.write(post(CHAT, packed, key("acme"), "accept-encoding: gzip", "content-encoding: gzip"))
        await asyncio.wait_for(reader.readuntil(b": queued"), 60)
        await site.write(more=f"{KEPT_ALIVE}mode: pass\n", requests="1")
        await until(lambda: len(app.seen) == 2)
        assert app.seen[1].all(b"accept-encoding") == [], "its answer has begun as plain text"
        length = app.seen[1].all(b"content-length")
        assert (app.seen[1].json, length) == (chat(stream=True), [b"%d" % len(app.seen[1].body)]), "it was unpacked"
        assert app.seen[1].all(b"content-encoding") == []
        app.release(2)
        rest = await asyncio.wait_for(reader.read(), 60)
        assert (rest.count(b"HTTP/1.1"), rest.count(b"data: [DONE]")) == (0, 1)
        writer.close()
        assert (await running).status == 200


async def test_a_client_that_leaves_meanwhile_leaves_nothing_and_an_upload_passes_whole(tmp_path: Path) -> None:
    app = App(is_held=True)
    upload = "endpoints: {/v1/audio: {api: generic, tokens: {base: 10}}}\n"
    text = write_policy(tmp_path, requests="1").read_text()
    start, _, after = text.partition("endpoints:\n")
    text = f"{start}{upload}{after[after.index('tenants:') :]}"
    async with reloading(app, tmp_path, requests="1") as site:
        pool_file(site).write_text(text)
        await until(lambda: list(site.sidecar.controller.policy.endpoints) == ["/v1/audio"])
        sent = "content-type: application/octet-stream"
        whole = bytes(50_000)
        running = asyncio.ensure_future(exchange(site.port, post("/v1/audio", whole, sent, key("acme"))))
        await until(lambda: site.pool()["leases"] == 1)
        waits = asyncio.ensure_future(exchange(site.port, post("/v1/audio", whole, sent, key("acme"))))
        await until(lambda: site.pool()["waiting"] == 1)
        _, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(post("/v1/audio", whole, sent, key("acme")))
        await until(lambda: site.pool()["waiting"] == 2)
        pool_file(site).write_text(f"{text}mode: pass\n")
        writer.close()
        await until(lambda: len(app.seen) >= 2)
        app.release(5)
        for answered in await asyncio.gather(running, waits):
            assert answered.startswith(b"HTTP/1.1 200")
        assert [len(seen.body) for seen in app.seen[:2]] == [len(whole)] * 2
        await until(lambda: site.sidecar.controller.under_way == 0)
        assert (site.pool()["leases"], site.pool()["waiting"]) == (0, 0)


@pytest.mark.hasty
async def test_with_a_store_that_hangs_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: RedisServer
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, store.url)
    app = App(is_held=True)
    async with reloading(app, tmp_path, requests="1", more="on_store_loss: closed\n") as site:
        asked = [asyncio.ensure_future(site.ask(chat(), key("acme"))) for _ in range(3)]
        await until(lambda: (site.pool()["leases"], site.pool()["waiting"]) == (1, 2))
        store.pause()
        try:
            asked += [asyncio.ensure_future(site.ask(chat(), key("acme")))]
            await site.write(more="on_store_loss: closed\nmode: pass\n", requests="1")
            asked += [asyncio.ensure_future(site.ask(chat(), "authorization: Bearer sk-unknown"))]
            await until(lambda: len(app.seen) == 5)
            app.release(5)
            assert [answered.status for answered in await asyncio.gather(*asked)] == [200] * 5
        finally:
            store.resume()
        await site.write(more="on_store_loss: closed\n", requests="1")
        await until(lambda: (site.pool()["leases"], site.pool()["store"]["state"]) == (0, "shared"))
        app.release(1)
        assert (await site.ask(chat(), key("acme"))).status == 200
