"""What a tenant sees of itself at `/v1/admission/self`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from sidecar import AdmissionMiddleware
from tests.admission.models import served_models
from tests.support.middleware import CHAT, KEYS, App, chat, write_policy
from tests.support.serving import serving
from tests.support.shared_pools import begun, begun_store

pytestmark = pytest.mark.anyio
PATH = "/v1/admission/self"
LIMITS = "limits: {requests_per_minute: 60, tokens_per_minute: 6k, concurrent_requests: 9, burst: 60s}\n"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_policy(tmp_path, requests="1", acme=LIMITS)


@pytest.fixture
def shared(policy: Path, tmp_path: Path) -> Iterator[Path]:
    with begun_store(tmp_path) as server:
        policy.write_text(policy.read_text() + f"store: {server.url}\n")
        yield policy


@asynccontextmanager
async def client_of(policy: Path, app: App) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        serving(AdmissionMiddleware(app, policy)) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=20) as client,
    ):
        yield client


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


async def view(client: httpx2.AsyncClient, tenant: str) -> Any:
    await asyncio.sleep(0.3)  # answers are kept for a quarter of a second
    answer = await client.get(PATH, headers=key(tenant))
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def test_it_has_its_tiers_its_limits_and_its_requests(policy: Path) -> None:
    app = App(is_held=True)
    async with client_of(policy, app) as client:
        before = await view(client, "acme")
        assert before == {
            "tenant": "acme",
            "tier": "normal",
            "max_tier": "high",
            "weight": 1,
            "limits": {
                "requests": {"per_minute": 60, "left": 60, "full_in_s": 0.0},
                "tokens": {"per_minute": 6000, "left": 6000, "full_in_s": 0.0},
                "concurrent_requests": 9,
            },
            "here": {"waiting": 0, "running": 0, "held_tokens": 0},
            "tiers": [{"tier": tier, "waiting": 0, "expected_wait_s": 0.0} for tier in ("high", "normal", "batch")],
        }
        asked = [asyncio.ensure_future(client.post(CHAT, json=chat(), headers=key("acme"))) for _ in range(3)]
        others = [asyncio.ensure_future(client.post(CHAT, json=chat(), headers=key("nightly"))) for _ in range(2)]
        during = await view(client, "acme")
        assert during["here"]["waiting"] == 2
        assert during["here"]["running"] == 1
        assert during["here"]["held_tokens"] > 0
        assert 57 <= during["limits"]["requests"]["left"] <= 58
        assert 0 < during["limits"]["requests"]["full_in_s"] <= 3
        assert [tier["waiting"] for tier in during["tiers"]] == [0, 2, 2]
        assert all(tier["expected_wait_s"] is None or tier["expected_wait_s"] > 0 for tier in during["tiers"][1:])
        nightly = await view(client, "nightly")
        assert nightly["limits"] == {}
        assert [tier["tier"] for tier in nightly["tiers"]] == ["batch"]  # nothing of those it may not ask for
        assert nightly["here"]["waiting"] == 2
        assert "acme" not in str(nightly)
        app.release(5)
        await asyncio.gather(*asked, *others)


async def test_in_a_store_the_limits_are_those_of_all_replicas(shared: Path) -> None:
    async with client_of(shared, App()) as one, client_of(shared, App()) as other:
        for client in (one, other, one):
            assert (await client.post(CHAT, json=chat(), headers=key("acme"))).status_code == 200
        for client in (one, other):
            left = (await view(client, "acme"))["limits"]["requests"]["left"]
            assert 57 <= left <= 58


async def test_a_store_that_is_away_leaves_what_is_left_unknown(shared: Path, tmp_path: Path) -> None:
    shared.write_text(shared.read_text().replace("redis://127.0.0.1", "redis://127.0.0.2"))  # noqa: ASYNC240
    async with client_of(shared, App()) as client:
        found = await view(client, "acme")
        assert found["limits"]["requests"] == {"per_minute": 60, "left": None, "full_in_s": None}


async def test_in_a_store_each_model_has_its_own_part_of_the_limits(tmp_path: Path) -> None:
    digest = sha256(b"sk-acme").hexdigest()
    await anyio.Path(tmp_path / "acme.yaml").write_text(
        f'tenant: acme\nkeys: ["sha256:{digest}"]\ntier: normal\nlimits: {{requests_per_minute: 6, burst: 60s}}\n'
    )
    with begun_store(tmp_path, "default/m") as server:
        begun(server, "default/n")
        more = f"store: {server.url}\ntenants: acme.yaml\n"
        async with served_models(tmp_path, "{m: {engines: [a]}, n: {engines: [b]}}", more=more) as it:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            async with it.client.post(CHAT, json=body, headers=key("acme")) as answer:
                assert answer.status == 200
            async with it.client.get(PATH, headers=key("acme")) as answer:
                found = await answer.json()
    assert found["limits"]["requests"] == {"per_minute": 6, "left": None, "full_in_s": None}
    assert [found["limits_by_model"][model]["requests"]["left"] for model in ("m", "n")] == [5, 6]
    assert list(found["models"]) == ["m", "n"]


async def test_a_key_is_needed_and_nothing_is_said_without_one(policy: Path) -> None:
    app = App()
    async with client_of(policy, app) as client:
        wrong = await client.get(PATH, headers={"authorization": "Bearer sk-wrong"})
        assert wrong.status_code == 401
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        both = httpx2.Headers([("x-api-key", "sk-acme"), ("x-api-key", "sk-nightly")])
        assert (await client.get(PATH, headers=both)).status_code == 400
        anonymous = (await client.get(PATH)).json()
        assert anonymous["tenant"] == "anonymous"
        head = await client.head(PATH, headers=key("acme"))
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 100
        assert not app.seen  # no engine hears of it


async def test_asking_without_end_costs_one_look_in_a_quarter_of_a_second(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    middleware = AdmissionMiddleware(App(), await asyncio.to_thread(lambda: policy))
    looks: list[str] = []
    tenant_use = middleware.controller.pool.tenant_use
    monkeypatch.setattr(
        middleware.controller.pool, "tenant_use", lambda tenant: looks.append(tenant) or tenant_use(tenant)
    )
    async with serving(middleware) as served, httpx2.AsyncClient(base_url=served.url) as client:
        for _ in range(50):
            assert (await client.get(PATH, headers=key("acme"))).status_code == 200
    assert len(looks) < 5
