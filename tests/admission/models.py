"""Models with pools of their own, in this event loop: real servers and sockets, before emulated engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from sidecar.admin.app import admin_app
from sidecar.app import AdmissionMiddleware
from sidecar.fleet.models import ModelsController
from sidecar.policy.compiler import load
from tests.fleet.engines import LocalEngine, engines
from tests.support.serving import serving

CHAT = "/v1/chat/completions"
POLICY = """\
engine: vllm
mode: {mode}
engines:
{source}
  capacity: {{tokens: 20k, requests: 2}}
  health: {{every: 100ms, fail: 2, rise: 1}}
  slow_start: 0s
models: {models}
tiers: {{normal: {{queue: {{max_wait: {max_wait}}}}}}}
anonymous: normal
max_body: 64KiB
endpoints: {endpoints}
"""


@dataclass
class ServedModels:
    """A sidecar, its admin port, and its engines: a, b, c ..."""

    middleware: AdmissionMiddleware
    client: aiohttp.ClientSession
    admin: aiohttp.ClientSession
    engines: Sequence[LocalEngine]

    @property
    def front(self) -> ModelsController:
        """The controller of the process."""
        assert isinstance(self.middleware.controller, ModelsController)
        return self.middleware.controller

    async def ask(self, model: str | None, **more: Any) -> tuple[int, str | None, Any]:
        """Sends a small request. Returns status, engine, and the body."""
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, **more}
        sent = body if model is None else {"model": model, **body}
        async with self.client.post(CHAT, json=sent) as response:
            return response.status, response.headers.get("x-admission-engine"), await response.json()

    async def page(self, path: str) -> tuple[int, Any]:
        """A page of the admin port."""
        async with self.admin.get(path) as response:
            return response.status, await response.json()

    async def post(self, path: str) -> tuple[int, Any]:
        """Posts to the admin port."""
        async with self.admin.post(path) as response:
            return response.status, await response.json()


def static(found: Sequence[LocalEngine]) -> str:
    """The policy's list of these engines."""
    entries = (f"{{name: {chr(97 + number)}, url: 'http://127.0.0.1:{one.port}'}}" for number, one in enumerate(found))
    return f"  static: [{', '.join(entries)}]"


@asynccontextmanager
async def served_models(
    folder: Path,
    models: str,
    count: int = 2,
    *,
    listed: bool = False,
    mode: str = "enforce",
    max_wait: str = "30s",
    endpoints: str = f"{{{CHAT}: {{}}}}",
    more: str = "",
) -> AsyncIterator[ServedModels]:
    """Serves a policy with these models. `listed`: the engines stand in an engine list. `more`: lines of the policy."""
    async with AsyncExitStack() as running:
        found = await running.enter_async_context(engines(count))
        source = static(found)
        if listed:
            (folder / "engines.yaml").write_text(source.replace("  static:", "engines:"))
            source = "  file: engines.yaml"
        policy = folder / "policy.yaml"
        text = POLICY.format(source=source, models=models, mode=mode, max_wait=max_wait, endpoints=endpoints)
        policy.write_text(text + more)
        middleware = AdmissionMiddleware(None, load(policy), is_shown=True)
        pages = admin_app(
            state=middleware.controller.state,
            readiness=middleware.controller.readiness,
            notices=middleware.controller.notices,
            routes=middleware.observability.routes,
        )
        served = await running.enter_async_context(serving(middleware))
        shown = await running.enter_async_context(serving(pages, lifespan="off"))
        client = await running.enter_async_context(aiohttp.ClientSession(served.url))
        admin = await running.enter_async_context(aiohttp.ClientSession(shown.url))
        yield ServedModels(middleware, client, admin, found)
