"""Tokens before a pool for each model."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from sidecar import AdmissionMiddleware
from sidecar.policy.compiler import load
from tests.fleet.engines import engines
from tests.identity.issuer import Issuer, ec, jwt_section
from tests.support.middleware import CHAT, chat
from tests.support.serving import serving

pytestmark = pytest.mark.anyio

MODELS = """\
engine: vllm
engines:
  static: [{{name: a, url: "http://127.0.0.1:{a}"}}, {{name: b, url: "http://127.0.0.1:{b}"}}]
  capacity: {{tokens: 20k, requests: 2}}
models: {{one: {{engines: [a]}}, two: {{engines: [b]}}}}
tiers: {{normal: {{}}}}
tenants: tenants/*.yaml
endpoints: {{/v1/chat/completions: {{}}}}
"""


async def _asked(url: str, token: str, model: str = "m") -> tuple[int, str | None]:
    headers = {"authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(url + CHAT, json=chat(model=model), headers=headers) as response,
    ):
        await response.read()
        return response.status, response.headers.get("x-admission-tier")


async def test_the_pools_of_all_models_use_the_same_keys_of_the_issuer(tmp_path: Path) -> None:
    issuer = Issuer(ec())
    async with issuer.serving(), engines(2) as (a, b):
        (tmp_path / "tenants").mkdir()
        (tmp_path / "tenants" / "acme.yaml").write_text("tenant: acme\ntier: normal\n")
        (tmp_path / "policy.yaml").write_text(MODELS.format(a=a.port, b=b.port) + jwt_section(issuer.url))
        middleware = AdmissionMiddleware(None, load(tmp_path), is_shown=True)
        front = middleware.controller
        async with serving(middleware) as served:
            for model in ("one", "two"):
                assert await _asked(served.url, issuer.token(), model) == (200, "normal")
        assert all(one.identities is front.identities for one in front.controllers.values())
        front.identities.keys.failure = "answered 500"
        assert [notice for notice in front.notices() if "answered 500" in notice] == [front.identities.keys.problem()]
    assert issuer.fetches == 1
