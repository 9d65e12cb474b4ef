"""The admin port where models have pools of their own, over real HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.admission.models import served_models

pytestmark = pytest.mark.anyio
TWO = "{org/m: {engines: [a, b]}, org: {engines: [c]}}"


async def test_the_only_models_pages_are_the_ports(tmp_path: Path) -> None:
    async with served_models(tmp_path, "{m: {}}") as sidecar:
        for path in ("/overview", "/models/m/overview"):
            status, overview = await sidecar.page(path)
            assert (status, overview["pool"]) == (200, "default/m")
        async with sidecar.admin.get("/") as response:
            assert "overview/stream" in await response.text()


async def test_a_name_that_begins_another_names_its_own_pool(tmp_path: Path) -> None:
    async with served_models(tmp_path, TWO, 3) as sidecar:
        for model in ("org", "org/m"):
            assert (await sidecar.page(f"/models/{model}/overview"))[1]["pool"] == f"default/{model}"
            async with sidecar.admin.get(f"/models/{model}") as response:
                assert (response.status, response.url.path) == (200, f"/models/{model}/")
        async with sidecar.admin.get("/") as response:
            assert response.headers["content-security-policy"].startswith("default-src 'none'")
            assert 'href="models/org/m/"' in await response.text()
        status, error = await sidecar.page("/models/m/overview")
        assert (status, error["error"]["code"]) == (404, "unknown_model")
        status, error = await sidecar.page("/overview")
        assert (status, error["error"]["code"]) == (404, "unknown_model")
        assert "a command takes --admin URL/models/NAME" in error["error"]["message"]


async def test_the_engines_of_all_pools_are_listed_and_drained(tmp_path: Path) -> None:
    async with served_models(tmp_path, TWO, 3) as sidecar:
        status, found = await sidecar.page("/engines")
        assert (status, [row["name"] for row in found["engines"]]) == (200, ["a", "b", "c"])
        assert [row["name"] for row in (await sidecar.page("/models/org/engines"))[1]["engines"]] == ["c"]
        for name in ("b", "c"):
            status, drained = await sidecar.post(f"/engines/{name}/drain?wait=true")
            assert (status, drained["drained"], drained["engine"]["state"]) == (200, True, "draining")
        assert (await sidecar.ask("org/m"))[1] == "a"
        status, resumed = await sidecar.post("/engines/c/resume")
        assert (status, resumed["engine"]["state"]) == (200, "ready")
        assert (await sidecar.ask("org"))[1] == "c"
        status, error = await sidecar.post("/engines/x/drain")
        assert (status, error["error"]["message"]) == (404, "no engine is called 'x'; the engines are a, b, c")


async def test_a_page_shows_what_was_just_reported(tmp_path: Path) -> None:
    async with served_models(tmp_path, TWO, 3) as sidecar:
        for model in ("org/m", "org"):
            async with sidecar.client.post("/v1/chat/completions", json={"model": model}) as response:
                assert response.status == 400
            status, story = await sidecar.page(f"/requests/{response.headers['x-request-id']}")
            assert (status, story["state"], story["pool"]) == (200, "refused", "default")
            async with sidecar.admin.get("/request", params={"id": response.headers["x-request-id"]}) as page:
                assert (page.status, "invalid_body" in await page.text()) == (200, True)
