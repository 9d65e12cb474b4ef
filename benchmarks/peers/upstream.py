"""Fast upstream for the cost of a request: whole answers at once, streams of 220 chunks 10 ms apart.

It answers as an SGLang server where a gateway asks which engine it is. uvicorn runs it.
"""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.overhead_apps import answer, bare, body_of, lifespan, stream
from benchmarks.peers.setting import MODEL

CHUNKS = 220
PAGES = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sglang"}]},
    "/get_server_info": {"served_model_name": MODEL, "model_path": MODEL, "max_running_requests": 4096, "version": "0"},
    "/server_info": {"served_model_name": MODEL, "model_path": MODEL, "max_running_requests": 4096, "version": "0"},
    "/get_model_info": {"model_path": MODEL, "is_generation": True},
    "/model_info": {"model_path": MODEL, "is_generation": True},
}


def _chunk(number: int) -> bytes:
    """Chunks differ: LiteLLM ends a stream that repeats itself a hundred times."""
    choice = {"index": 0, "delta": {"content": f" word{number}"}, "finish_reason": None}
    if number == CHUNKS - 1:
        choice |= {"delta": {}, "finish_reason": "stop"}
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()


STREAM = (*(_chunk(number) for number in range(CHUNKS)), b"data: [DONE]\n\n")


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    elif scope["method"] == "GET" and scope["path"] in PAGES:
        await answer(send, json.dumps(PAGES[scope["path"]]).encode())
    elif scope["method"] == "POST":
        is_stream = json.loads(await body_of(receive)).get("stream")
        await (stream(send, STREAM) if is_stream else answer(send))
    else:
        await bare(scope, receive, send)


def fast() -> ASGIApp:
    """The app, for uvicorn."""
    return _app
