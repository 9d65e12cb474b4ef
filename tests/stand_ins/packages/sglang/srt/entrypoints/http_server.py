"""From sglang/srt/entrypoints/http_server.py (0.5.23): the module's app, its lifespan, and both ways to run uvicorn.

Kept: CORS is added when the module is imported and the API key's check by `_setup_and_run_http_server`, in the mode
with one tokenizer alone; with more, each worker process imports the name in SGLANG_HTTP_SERVER_APP_PATH and reads the
server's arguments from shared memory, here from a variable. The server warms itself up by a POST /generate to itself,
and ends itself where that is not answered 200 (`_execute_server_warmup`). Kept as well: the error shapes of chat, of
messages and of responses, and which endpoint hands the priority of its body over (responses and messages do not).
"""

import dataclasses
import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse

from sglang.srt.entrypoints.openai.protocol import (
    AnthropicMessagesRequest,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
)
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)
_SHARED_MEMORY = "STAND_IN_SGLANG_ARGS"


@asynccontextmanager
async def lifespan(fast_api_app: FastAPI):
    if getattr(fast_api_app, "is_single_tokenizer_mode", False):
        server_args = fast_api_app.server_args
    else:
        server_args = ServerArgs(**json.loads(os.environ[_SHARED_MEMORY]))
        assert server_args.api_key is None, "API key is not supported in multi-tokenizer mode"
    fast_api_app.state.tokenizer_manager = TokenizerManager(server_args)
    if getattr(fast_api_app, "is_single_tokenizer_mode", False) and not server_args.skip_server_warmup:
        threading.Thread(target=_execute_server_warmup, args=(server_args,), daemon=True).start()
    yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(
    CORSMiddleware, allow_origins=["*"], allow_credentials=True, allow_methods=["*"], allow_headers=["*"]
)


@app.exception_handler(RequestValidationError)
async def validation_exception_handler(request: Request, exc: RequestValidationError):
    return _error(request.url.path, str(exc))


def _error(path: str, message: str) -> JSONResponse:
    if path.startswith("/v1/messages"):
        content = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    elif path.startswith("/v1/responses"):
        content = {"error": {"message": message, "type": "Bad Request", "param": None, "code": 400}}
    else:
        content = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return JSONResponse(content, 400)


@app.get("/health")
async def health():
    return JSONResponse({})


@app.get("/server_info")
async def server_info(request: Request):
    manager = request.app.state.tokenizer_manager
    return {
        "version": "0.5.23",
        "enable_priority_scheduling": manager.enable_priority_scheduling,
        "default_priority_value": manager.default_priority_value,
        "internal_states": [],
    }


@app.get("/v1/models")
async def available_models():
    return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "sglang"}]}


@app.post("/v1/chat/completions")
async def openai_v1_chat_completions(request: ChatCompletionRequest, raw_request: Request):
    most = request.max_completion_tokens or request.max_tokens
    return await _served(raw_request, request.messages[-1]["content"], most, request.stream, request.priority)


@app.post("/v1/completions")
async def openai_v1_completions(request: CompletionRequest, raw_request: Request):
    return await _served(raw_request, request.prompt, request.max_tokens, request.stream, request.priority)


@app.post("/v1/embeddings")
async def openai_v1_embeddings(request: EmbeddingRequest, raw_request: Request):
    return await _served(raw_request, request.input, 1, False, request.priority)


@app.post("/v1/responses")
async def v1_responses_request(request: ResponsesRequest, raw_request: Request):
    return await _served(raw_request, request.input, request.max_output_tokens, request.stream)


@app.post("/v1/messages")
async def anthropic_v1_messages(request: AnthropicMessagesRequest, raw_request: Request):
    return await _served(raw_request, request.messages[-1]["content"], request.max_tokens, request.stream)


@app.post("/generate")
async def generate_request(obj: GenerateReqInput, request: Request):
    most = (obj.sampling_params or {}).get("max_new_tokens")
    return await _served(request, obj.text, most, obj.stream, obj.priority)


@app.post("/abort_request")
async def abort_request(request: Request):
    request.app.state.tokenizer_manager.abort_request((await request.json()).get("rid", ""))
    return Response()


async def _served(raw_request: Request, prompt: Any, most: int | None, stream: bool, priority: int | None = None):
    obj = GenerateReqInput(prompt, {"max_new_tokens": most}, stream, priority)
    generated = raw_request.app.state.tokenizer_manager.generate_request(obj, raw_request)
    if stream:
        return StreamingResponse(_events(generated), media_type="text/event-stream")
    try:
        text = await anext(generated)
    except ValueError as error:
        return _error(raw_request.url.path, str(error))
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


async def _events(generated):
    async for text in generated:
        yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"
    yield "data: [DONE]\n\n"


def _execute_server_warmup(server_args: ServerArgs) -> None:
    url = f"http://{server_args.host}:{server_args.port}"
    body = json.dumps({"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 8}}).encode()
    headers = {"content-type": "application/json"}
    if server_args.api_key:
        headers["authorization"] = f"Bearer {server_args.api_key}"
    for _ in range(120):
        time.sleep(0.05)
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            urllib.request.urlopen(urllib.request.Request(f"{url}/generate", body, headers), timeout=600).close()
            return
        except urllib.error.HTTPError as error:
            logger.error("Initialization failed. warmup error: %s", error)
            os.kill(os.getpid(), signal.SIGKILL)
        except OSError:
            continue


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
