"""The admin port's description beside its routes: none is missing, and none is described that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.routing import BaseRoute, Mount, Route

from sidecar import AdmissionMiddleware
from sidecar.admin import openapi
from sidecar.admin.app import admin_app
from sidecar.admin.operations import PATH
from tests.admin.test_model_routes import TWO
from tests.admission.models import served_models
from tests.support.middleware import App, write_policy
from tests.support.serving import serving

pytestmark = pytest.mark.anyio
NEEDS_MORE = {"/request", "/requests", "/metrics", "/tenants"}
"""Pages that need an id, a telemetry set-up, or a policy with tenants in the store."""


def described() -> set[tuple[str, str]]:
    paths = openapi.document()["paths"]
    return {(method, path) for path, found in paths.items() for method in found if method != "servers"}


def served(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from served(route.routes)
        elif isinstance(route, Route):
            path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
            yield from ((method.lower(), path) for method in (route.methods or {"GET"}) - {"HEAD"})
        else:
            raise AssertionError(f"what is {route!r}?")


def pages(folder: Path) -> Any:
    middleware = AdmissionMiddleware(App(), folder, is_shown=True)
    controller = middleware.controller
    return admin_app(state=controller.state, readiness=list, routes=middleware.observability.routes)


async def test_every_route_is_described_and_nothing_else_is(tmp_path: Path) -> None:
    write_policy(tmp_path)
    app = pages(tmp_path)
    assert set(served(app.routes)) == described() - {("get", "/models")}


async def test_where_models_have_pools_each_has_the_pages_below_its_name(tmp_path: Path) -> None:
    document = openapi.document()
    of_a_pool = {path for path, found in document["paths"].items() if "servers" in found}
    assert document["paths"]["/overview"]["servers"][1]["url"] == "/models/{model}"
    async with served_models(tmp_path, TWO, 3) as sidecar:
        assert (await sidecar.page(PATH))[1]["paths"].keys() == document["paths"].keys()
        for path in [*sorted(one for one in of_a_pool if "{" not in one), "/models", "/tenants"]:
            if path == "/overview/stream":
                continue  # without end
            page = path if path.startswith(("/models", "/tenants")) else f"/models/org{path}"
            async with sidecar.admin.get(page) as answer:
                if answer.status == 404:
                    assert path in NEEDS_MORE, page
                else:
                    assert (answer.status, path in NEEDS_MORE) == (200, False), page


async def test_a_page_that_is_not_there_says_where_the_pages_are(tmp_path: Path) -> None:
    write_policy(tmp_path)
    async with serving(pages(tmp_path), lifespan="off") as admin, aiohttp.ClientSession(admin.url) as session:
        async with session.get("/overvew") as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (404, "unknown_page")
            assert error["message"] == (
                "the admin port has no page '/overvew'; GET /openapi.json describes those that it has"
            )
        async with session.put("/tenants") as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (405, "method_not_allowed")
            assert sorted(answer.headers["allow"].split(", ")) == ["GET", "HEAD", "POST"], error
