"""From tensorrt_llm/serve/openai_server.py @ f996de06: constructor, routes, error answers, `__call__`.

Kept: every endpoint's call of `generate_async` (chat, harmony and completions pass a priority, responses and messages
pass none, nor do the requests of a batch); a validation error is a 400 with {"error": text}, under /v1/messages one in
Anthropic's envelope; so is nearly every exception; a client's departure is looked for every second; the arrival-time
middleware inside. Render routes are there with TRTLLM_ENABLE_RENDER_ENDPOINTS=1 alone.
"""

import asyncio
import json
import os
import socket
import uuid
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tensorrt_llm.build import HAS_FIELD
from tensorrt_llm.executor.request import DEFAULT_REQUEST_PRIORITY
from tensorrt_llm.serve.openai_protocol import (
    AnthropicCountTokensRequest,
    AnthropicCreateBatchRequest,
    AnthropicMessagesRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)

TIMEOUT_KEEP_ALIVE = 5  # seconds.


class ServerArrivalTimeMiddleware:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


class OpenAIServer:
    def __init__(
        self,
        generator: Any,
        model: str,
        tool_parser: str | None,
        server_role: Any | None,
        metadata_server_cfg: Any,
        disagg_cluster_config: Any | None = None,
        multimodal_server_config: Any | None = None,
        chat_template: str | None = None,
        allow_request_chat_template: bool = False,
        embedding_max_queue_delay: float = 0.005,
        embedding_max_queue_size: int = 2048,
        input_processor_workers: int = 8,
        media_load_workers: int = 8,
        internal_disagg_auth_key: str | None = None,
        enable_rl_control_endpoints: bool = False,
        rl_control_api_key: str | None = None,
    ):
        self.generator = generator
        self.model = model
        self.batches: dict[str, dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

        @asynccontextmanager
        async def lifespan(app: FastAPI):
            yield
            self.generator.shutdown()

        self.app = FastAPI(lifespan=lifespan)

        @self.app.exception_handler(RequestValidationError)
        async def validation_exception_handler(request, exc):
            if request.url.path.startswith("/v1/messages"):
                return anthropic_error_response(str(exc), "invalid_request_error", 400)
            return JSONResponse(status_code=400, content={"error": str(exc)})

        self.register_routes()
        self.app.add_middleware(ServerArrivalTimeMiddleware)

    def register_routes(self):
        self.app.add_api_route("/health", self.health, methods=["GET"])
        self.app.add_api_route("/v1/completions", self.openai_completion, methods=["POST"])
        self.app.add_api_route("/v1/chat/completions", self.openai_chat, methods=["POST"])
        self.app.add_api_route("/v1/responses", self.openai_responses, methods=["POST"])
        self.app.add_api_route("/v1/responses/{response_id}", self.openai_responses_get_response, methods=["GET"])
        self.app.add_api_route("/v1/messages", self.anthropic_messages, methods=["POST"])
        self.app.add_api_route("/v1/messages/count_tokens", self.anthropic_count_tokens, methods=["POST"])
        self.app.add_api_route("/v1/messages/batches", self.anthropic_create_batch, methods=["POST"])
        self.app.add_api_route("/v1/messages/batches", self.anthropic_list_batches, methods=["GET"])
        self.app.add_api_route("/v1/messages/batches/{batch_id}", self.anthropic_get_batch, methods=["GET"])
        self.app.add_api_route("/version", self.version, methods=["GET"])
        self.app.add_api_route("/v1/models", self.get_model, methods=["GET"])
        self.app.add_api_route("/metrics", self.get_iteration_stats, methods=["GET"])
        self.app.add_api_route("/server_info", self.get_server_info, methods=["GET"])
        if os.getenv("TRTLLM_ENABLE_RENDER_ENDPOINTS", "0") == "1":
            self.app.add_api_route("/v1/chat/completions/render", self.render_chat, methods=["POST"])
            self.app.add_api_route("/v1/completions/render", self.render_completion, methods=["POST"])
        # Of the stand-in: what the engine was given, in the order in which it began.
        self.app.add_api_route("/stand_in", self.stand_in, methods=["GET"])

    async def health(self) -> Response:
        return Response(status_code=200)

    async def version(self) -> JSONResponse:
        return JSONResponse({"version": "stand-in"})

    async def get_model(self) -> JSONResponse:
        return JSONResponse(
            {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "tensorrt_llm"}]}
        )

    async def get_iteration_stats(self) -> JSONResponse:
        return JSONResponse([])

    async def get_server_info(self) -> JSONResponse:
        return JSONResponse({"max_batch_size": self.generator.args.max_batch_size, "tokens_per_block": 32})

    async def render_chat(self, request: ChatCompletionRequest) -> JSONResponse:
        return JSONResponse({"token_ids": _token_ids(request.messages[-1]["content"])})

    async def render_completion(self, request: CompletionRequest) -> JSONResponse:
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        return JSONResponse([{"token_ids": _token_ids(prompt)} for prompt in prompts])

    async def stand_in(self) -> JSONResponse:
        reported = {"served": self.generator.served, "aborted": self.generator.aborted, "pid": os.getpid()}
        return JSONResponse(reported)

    @staticmethod
    def create_error_response(message: str, err_type: str = "BadRequestError", status_code: int = 400) -> JSONResponse:
        content = {"object": "error", "message": message, "type": err_type, "param": None, "code": status_code}
        return JSONResponse(content=content, status_code=status_code)

    async def await_disconnected(self, raw_request: Request, promise):
        while not await raw_request.is_disconnected() and not promise.finished:
            await asyncio.sleep(1)
        if not promise.finished:
            promise.abort()

    def _promise(self, raw_request: Request, inputs: Any, most: int | None, streaming: bool, **more: Any):
        promise = self.generator.generate_async(
            inputs=inputs, sampling_params={"max_tokens": most or 8}, streaming=streaming, trace_headers=None, **more
        )
        asyncio.create_task(self.await_disconnected(raw_request, promise))
        return promise

    @staticmethod
    def _priority(request) -> dict[str, float]:
        if not HAS_FIELD:
            return {}
        return {"priority": request.priority if request.priority is not None else DEFAULT_REQUEST_PRIORITY}

    async def openai_chat(self, request: ChatCompletionRequest, raw_request: Request) -> Response:
        try:
            most = request.max_completion_tokens
            prompt = request.messages[-1]["content"]
            promise = self._promise(raw_request, prompt, most, request.stream, **self._priority(request))
            if request.stream:
                return _stream(promise, lambda text: {"choices": [{"index": 0, "delta": {"content": text}}]})
            text = await _text(promise)
            return JSONResponse({"choices": [{"index": 0, "message": {"content": text}}], "usage": _usage(promise)})
        except Exception as e:
            return self.create_error_response(str(e))

    async def openai_completion(self, request: CompletionRequest, raw_request: Request) -> Response:
        try:
            single = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
            prompts = [request.prompt] if single else request.prompt
            promises = [
                self._promise(raw_request, prompt, request.max_tokens, request.stream, **self._priority(request))
                for prompt in prompts
            ]
            if request.stream:
                return _stream(promises[0], lambda text: {"choices": [{"index": 0, "text": text}]})
            texts = await asyncio.gather(*map(_text, promises))
            choices = [{"index": index, "text": text} for index, text in enumerate(texts)]
            return JSONResponse({"choices": choices, "usage": _usage(*promises)})
        except Exception as e:
            return self.create_error_response(str(e))

    async def openai_responses(self, request: ResponsesRequest, raw_request: Request) -> Response:
        try:
            promise = self._promise(raw_request, request.input, request.max_output_tokens, request.stream)
            if request.stream:
                return _stream(promise, lambda text: {"type": "response.output_text.delta", "delta": text})
            text = await _text(promise)
            return JSONResponse({"output": [{"content": [{"text": text}]}], "usage": _usage(promise)})
        except Exception as e:
            return self.create_error_response(str(e))

    async def anthropic_messages(self, request: AnthropicMessagesRequest, raw_request: Request) -> Response:
        # anthropic_adapter.py converts to a chat request, and sets no priority.
        chat = ChatCompletionRequest(
            messages=request.messages, model=request.model, max_tokens=request.max_tokens, stream=request.stream
        )
        return await self.openai_chat(chat, raw_request)

    async def openai_responses_get_response(self, response_id: str) -> Response:
        if not response_id.startswith("resp_"):
            message = f"Invalid 'response_id': '{response_id}'. Expected an ID that begins with 'resp'."
            return self.create_error_response(message, "InvalidRequestError")
        return self.create_error_response(f"Response with id '{response_id}' not found.", "InvalidRequestError", 404)

    async def anthropic_count_tokens(self, request: AnthropicCountTokensRequest) -> JSONResponse:
        return JSONResponse({"input_tokens": len(_token_ids(request.messages[-1]["content"]))})

    async def anthropic_create_batch(self, request: AnthropicCreateBatchRequest) -> JSONResponse:
        """Answers at once; the requests run on without a client, and at the default priority."""
        batch = {"id": f"msgbatch_{uuid.uuid4().hex}", "type": "message_batch", "processing_status": "in_progress"}
        self.batches[batch["id"]] = batch
        promises = [
            self.generator.generate_async(
                inputs=item.params.messages[-1]["content"],
                sampling_params={"max_tokens": item.params.max_tokens},
                streaming=False,
                trace_headers=None,
            )
            for item in request.requests
        ]
        task = asyncio.create_task(self._run_batch(batch, promises))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JSONResponse(batch)

    @staticmethod
    async def _run_batch(batch: dict[str, Any], promises: list[Any]) -> None:
        await asyncio.gather(*map(_text, promises))
        batch["processing_status"] = "ended"

    async def anthropic_list_batches(self) -> JSONResponse:
        return JSONResponse({"data": list(self.batches.values()), "has_more": False})

    async def anthropic_get_batch(self, batch_id: str) -> JSONResponse:
        if batch_id not in self.batches:
            return anthropic_error_response(f"Batch {batch_id} not found", "not_found_error", 404)
        return JSONResponse(self.batches[batch_id])

    async def __call__(self, host, port, sockets: list[socket.socket] | None = None):
        config = uvicorn.Config(self.app, host=host, port=port, log_level="info", timeout_keep_alive=TIMEOUT_KEEP_ALIVE)
        await uvicorn.Server(config).serve(sockets=sockets)


def anthropic_error_response(message: str, error_type: str, status_code: int) -> JSONResponse:
    content = {"type": "error", "error": {"type": error_type, "message": message}}
    return JSONResponse(content=content, status_code=status_code)


def _token_ids(prompt: Any) -> list[int]:
    return prompt if isinstance(prompt, list) else list(range(max(1, len(str(prompt)) // 4)))


def _stream(promise, chunk) -> StreamingResponse:
    async def events():
        async for text in promise:
            yield f"data: {json.dumps(chunk(text))}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def _text(promise) -> str:
    return "".join([token async for token in promise])


def _usage(*promises) -> dict[str, int]:
    prompt = sum(len(promise.prompt_token_ids) for promise in promises)
    output = sum(promise.tokens for promise in promises)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
