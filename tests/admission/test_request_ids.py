"""The request's id, as each client library reads it from answers and from refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.middleware import Answer, App, chunk, guarding, key, policy, whole_body
from tests.support.wire import exchange, post

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hi"}]
MESSAGE = (
    b'{"id": "m1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", '
    b'"stop_sequence": null, "content": [{"type": "text", "text": "hi"}], '
    b'"usage": {"input_tokens": 1, "output_tokens": 1}}'
)
JSON = [(b"content-type", b"application/json")]


class Engine(App):
    """Answers as Anthropic's API does. With `own` it has an id of its own for each request."""

    def __init__(self, own: bytes | None = None) -> None:
        super().__init__()
        self.own = own

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        await whole_body(receive)
        named = [] if self.own is None else [(b"request-id", self.own)]
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON, *named]})
        await chunk(send, MESSAGE, more=False)


@pytest.mark.parametrize("mode", ["enforce", "observe"])
async def test_messages_have_the_id_by_anthropics_name_too(mode: str) -> None:
    async with guarding(Engine(), policy(f"mode: {mode}\n")) as guarded:
        made = await guarded.ask({"model": "m", "messages": MESSAGES, "max_tokens": 5}, path="/v1/messages")
        assert made.status == 200
        assert made.headers["request-id"] == made.headers["x-request-id"]


async def test_refused_messages_have_it_as_well() -> None:
    async with guarding(Engine()) as guarded:
        body = {"model": "m", "messages": MESSAGES, "max_tokens": 5}
        refused = await guarded.ask(body, "x-api-key: sk-no-one", path="/v1/messages")
    assert refused.status == 401
    assert refused.json["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]


async def test_an_engines_own_id_of_a_message_stays() -> None:
    async with guarding(Engine(b"the-engines")) as guarded:
        body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 5}).encode()
        raw = await exchange(guarded.port, post("/v1/messages", body, key("acme")))
    assert re.findall(rb"(?m)^request-id: (.*)\r$", raw) == [b"the-engines"]
    assert len(Answer.parsed(raw).headers["x-request-id"]) == 32


async def test_other_apis_have_no_header_of_anthropics() -> None:
    async with guarding(Engine()) as guarded:
        assert "request-id" not in (await guarded.ask()).headers
