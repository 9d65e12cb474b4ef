"""An app in the same process reads its grant and passes it on to its engine itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from sidecar import AdmissionMiddleware, Granted, granted
from tests.support.middleware import CHAT, Answer, chat, key, policy
from tests.support.serving import serving
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio


class Engine:
    """Stands in for `LLM.generate_async`."""

    def __init__(self) -> None:
        self.priorities: list[Any] = []

    async def generate_async(self, prompt: str) -> Any:
        grant = granted()
        self.priorities.append(None if grant is None else grant.engine_priority)
        for word in prompt.split():
            await asyncio.sleep(0)
            yield f"data: {word}\n\n"


def grant_of(request: Request) -> Granted:
    """What an app would write as a dependency."""
    grant: Granted = request.scope["admission"]
    return grant


def app_around(engine: Engine) -> Any:
    from fastapi import Depends, FastAPI

    app = FastAPI()
    app.add_middleware(AdmissionMiddleware, policy=policy(engine="tensorrt-llm"))
    grant = Depends(grant_of)

    @app.post(CHAT)
    async def chat_completions(grant: Granted = grant) -> StreamingResponse:
        return StreamingResponse(engine.generate_async(f"{grant.tier} {grant.tenant}"), media_type="text/event-stream")

    @app.post("/v1/responses")
    def in_a_thread() -> dict[str, Any]:
        grant = granted()
        return {"tier": grant.tier if grant else None}

    @app.post("/unguarded")
    async def unguarded() -> dict[str, Any]:
        return {"grant": granted()}

    return app


async def test_every_request_finds_its_own_grant_while_others_run() -> None:
    engine = Engine()
    async with serving(app_around(engine)) as served:

        async def ask(tier: str) -> str:
            body = json.dumps(chat(priority=tier)).encode()
            return Answer.parsed(await exchange(served.port, post(CHAT, body, key("acme")))).body.decode()

        tiers = ["high", "normal", "batch"] * 5
        assert await asyncio.gather(*map(ask, tiers)) == [f"data: {tier}\n\ndata: acme\n\n" for tier in tiers]
        assert sorted(engine.priorities) == sorted([0.667, 0.333, 0.0] * 5)

        threaded = await exchange(served.port, post("/v1/responses", b'{"input":"hi","priority":"batch"}'))
        assert threaded.endswith(b'{"tier":"batch"}')
        assert (await exchange(served.port, post("/unguarded"))).endswith(b'{"grant":null}')
