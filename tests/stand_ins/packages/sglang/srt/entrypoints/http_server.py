"""From sglang/srt/entrypoints/http_server.py (0.5.23): the module's app, its lifespan, and both ways to run uvicorn.

Kept: CORS is added when the module is imported and the API key's check by `_setup_and_run_http_server`, in the mode
with one tokenizer alone; with more, each worker process imports the name in SGLANG_HTTP_SERVER_APP_PATH and reads the
server's arguments from shared memory, here from a variable. What they do is appended to STAND_IN_SGLANG_LOG.
"""

import asyncio
import dataclasses
import json
import os
import time
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

_SHARED_MEMORY = "STAND_IN_SGLANG_ARGS"


class ChatCompletionRequest(BaseModel):
    # What the schema does not know is ignored, unlike TensorRT-LLM's.
    messages: list[dict[str, Any]]
    model: str = "default"
    max_tokens: int | None = None
    priority: int | None = None


@asynccontextmanager
async def lifespan(fast_api_app: FastAPI):
    if getattr(fast_api_app, "is_single_tokenizer_mode", False):
        server_args = fast_api_app.server_args
    else:
        server_args = ServerArgs(**json.loads(os.environ[_SHARED_MEMORY]))
        assert server_args.api_key is None, "API key is not supported in multi-tokenizer mode"
    fast_api_app.state.enable_priority_scheduling = server_args.enable_priority_scheduling
    yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(
    CORSMiddleware, allow_origins=["*"], allow_credentials=True, allow_methods=["*"], allow_headers=["*"]
)


@app.exception_handler(RequestValidationError)
async def validation_exception_handler(request: Request, exc: RequestValidationError):
    return JSONResponse(status_code=400, content={"object": "error", "message": str(exc), "code": 400})


@app.get("/health")
async def health():
    return JSONResponse({})


@app.post("/v1/chat/completions")
async def openai_v1_chat_completions(request: ChatCompletionRequest, raw_request: Request):
    _log("begun", request)
    for _ in range(request.max_tokens or 1):
        if await raw_request.is_disconnected():
            _log("aborted", request)
            break
        await asyncio.sleep(0.002)
    _log("ended", request)
    return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", "content": "t"}}]})


def _log(what: str, request: ChatCompletionRequest) -> None:
    line = {"what": what, "prompt": request.messages[-1]["content"], "priority": request.priority}
    with open(os.environ["STAND_IN_SGLANG_LOG"], "a") as log:
        log.write(json.dumps({**line, "pid": os.getpid(), "at_s": time.monotonic()}) + "\n")


class ApiKeyMiddleware:
    """From sglang/srt/utils/auth.py: 401 to whatever comes without the key, but for health."""

    def __init__(self, app, api_key: str):
        self.app, self.api_key = app, api_key

    async def __call__(self, scope, receive, send):
        sent = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if scope["type"] == "http" and scope["path"] != "/health" and sent != f"Bearer {self.api_key}":
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _setup_and_run_http_server(server_args: ServerArgs) -> None:
    if server_args.tokenizer_worker_num == 1:
        app.is_single_tokenizer_mode = True
        app.server_args = server_args
        if server_args.api_key:
            app.add_middleware(ApiKeyMiddleware, api_key=server_args.api_key)
        config = uvicorn.Config(app, host=server_args.host, port=server_args.port, log_level="info", loop="uvloop")
        uvicorn.Server(config).run()
    else:
        app.is_single_tokenizer_mode = False
        os.environ[_SHARED_MEMORY] = json.dumps(dataclasses.asdict(server_args))
        uvicorn.run(
            envs.SGLANG_HTTP_SERVER_APP_PATH.get(),
            host=server_args.host,
            port=server_args.port,
            log_level="info",
            loop="uvloop",
            workers=server_args.tokenizer_worker_num,
        )


def launch_server(server_args: ServerArgs) -> None:
    _setup_and_run_http_server(server_args)
