"""Worker of Dynamo in front of one emulated engine: registers it with Dynamo's runtime, and passes requests on.

Dynamo's router knows no workers by URL: a worker is a process that registers with its runtime, and gets prompts as
token ids. This one runs in Dynamo's own environment, one for each engine, and is started by `dynamo.py`:

    python dynamo_worker.py --engine URL --model-path DIR

It sends the ids to the engine's /v1/completions, reports the engine's usage, and ends when the engine's process ends,
as Dynamo's own workers do: the engine is a part of them. It publishes no KV events: no two prompts of the scenarios
begin alike.
The protocol: `GenerateRequest` and `GenerateChunk` in `dynamo/common/backend/engine.py` of ai-dynamo 1.6.1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import HttpError
from dynamo.runtime import Context, DistributedRuntime

ENDPOINT = "dynamo.backend.generate"
LEAST_BLOCK_TOKENS = 16
"""As vLLM has. SGLang's pages of one token would be an event for each token."""
PREFILL_TOKENS = 512
"""Prompt tokens of a step of the emulated engine: what the router's queue compares its load with."""
WORD = 256
"""The token that stands for each word that the engine generates: the first word of `four_byte_tokenizer`."""


class Engine:
    """The emulated engine behind this worker."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def generate(self, request: Mapping[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        """One request. Raises HttpError with the engine's own status where it refuses."""
        body = {
            "model": self._model,
            "prompt": list(request["token_ids"]),
            "max_tokens": (request.get("stop_conditions") or {}).get("max_tokens"),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise HttpError(response.status, (await response.text())[:1_000])
            stopped = asyncio.ensure_future(_close_when_stopped(context, response))
            try:
                async for chunk in _chunks(response):
                    yield chunk
            finally:
                stopped.cancel()


async def _close_when_stopped(context: Context, response: aiohttp.ClientResponse) -> None:
    """The client has left: the engine sees a disconnect, and aborts."""
    await context.async_killed_or_stopped()
    response.close()


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The engine's events as Dynamo wants them; the last has the reason and the usage. Raises HttpError."""
    reason = "length"
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise HttpError(500, json.dumps(event["error"])[:1_000])
        for choice in event.get("choices", ()):
            words = len(choice["text"].split())
            if words:
                yield {"token_ids": [WORD] * words, "index": 0}
            reason = choice.get("finish_reason") or reason
        if usage := event.get("usage"):
            yield {"token_ids": [], "index": 0, "finish_reason": reason, "completion_usage": usage}


def end_with(process: int) -> None:
    """Ends this process at once, without a word to anyone, when that one has ended. Linux 5.3."""
    watched = os.pidfd_open(process)
    asyncio.get_running_loop().add_reader(watched, os._exit, 1)


async def main() -> None:
    """Serves until it is stopped, or its engine has ended."""
    parser = argparse.ArgumentParser(description="worker of Dynamo before an emulated engine")
    parser.add_argument("--engine", required=True, help="address of `sidecar emulate`")
    parser.add_argument("--model-path", required=True, help="folder with the tokenizer")
    args = parser.parse_args()
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.get(f"{args.engine}/_emulator") as response:
            state = await response.json()
        async with session.get(f"{args.engine}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        end_with(state["process"])
        block_tokens = state["prefix_cache"]["block_tokens"] if state["prefix_cache"] else 0
        if block_tokens < LEAST_BLOCK_TOKENS:
            raise SystemExit(
                f"start {args.engine} with --enable-prefix-caching --block-size {LEAST_BLOCK_TOKENS} or more"
            )
        config = ModelRuntimeConfig()
        config.total_kv_blocks = state["capacity"]["kv_tokens"] // block_tokens
        config.max_num_seqs = state["capacity"]["running"]
        config.max_num_batched_tokens = PREFILL_TOKENS
        endpoint = runtime.endpoint(ENDPOINT)
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            args.model_path,
            model,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=block_tokens,
            runtime_config=config,
            ignore_weights=True,
        )
        print(f"registered {args.engine}", flush=True)
        await endpoint.serve_endpoint(Engine(session, args.engine, model).generate)


if __name__ == "__main__":
    asyncio.run(main())
