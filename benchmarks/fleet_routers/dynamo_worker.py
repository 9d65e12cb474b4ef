"""Worker of Dynamo in front of one emulated engine: registers it with Dynamo's runtime, and passes requests on.

Dynamo's router knows no workers by URL: a worker is a process that registers with its runtime, and gets prompts as
token ids. This one runs in Dynamo's own environment, one for each engine, and is started by `dynamo.py`:

    python dynamo_worker.py --engine URL --model-path DIR

It sends the ids to the engine's /v1/completions, reports the engine's usage, and ends when the engine's process ends,
as Dynamo's own workers do: the engine is a part of them. The engine's KV events (`kv_events.py`)
become Dynamo's, which needs the tokens of each block: the worker hashes the prompts that it sends as the engine does.
What an engine generates is in no prompt of its, and is left out.
The protocol: `GenerateRequest` and `GenerateChunk` in `dynamo/common/backend/engine.py` of ai-dynamo 1.6.1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import aiohttp
import msgspec
from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import HttpError
from dynamo.runtime import Context, DistributedRuntime

ENDPOINT = "dynamo.backend.generate"
LEAST_BLOCK_TOKENS = 16
"""As vLLM has. SGLang's pages of one token would be an event for each token."""
PREFILL_TOKENS = 512
"""Prompt tokens of a step of the emulated engine: what the router's queue compares its load with."""
WORD = 256
"""The token that stands for each word that the engine generates: the first word of `four_byte_tokenizer`."""


class Blocks:
    """The blocks of the prompts that were sent, by the engine's hash of each: what its KV events mean to Dynamo.

    The hashes are those of `Chain` in `sidecar/tools/emulator/prompt_blocks.py` for a prompt of token ids.
    """

    def __init__(self, model: str, block_tokens: int) -> None:
        self._root = msgspec.json.encode([True, model, None, None]) + b"0:3:ids"
        self._size = block_tokens
        self._tokens: dict[str, list[int]] = {}

    def sent(self, prompt: Sequence[int]) -> None:
        """Learns a prompt's full blocks."""
        before = self._root
        for start in range(0, len(prompt) - self._size + 1, self._size):
            tokens = list(prompt[start : start + self._size])
            before = blake2b(before + array("I", tokens).tobytes(), digest_size=16).digest()
            self._tokens[before.hex()] = tokens

    def publish(self, changes: Sequence[Sequence[str]], publisher: KvEventPublisher) -> None:
        """Passes the changes on in their order, blocks that follow one another as one event."""
        run: list[str] = []
        parent: str | None = None
        for kind, *names in changes:
            known = kind == "stored" and names[0] in self._tokens
            if run and not (known and names[1] == run[-1]):
                self._publish_run(run, parent, publisher)
                run = []
            if known:
                parent = parent if run else names[1]
                run.append(names[0])
            elif kind == "removed" and self._tokens.pop(names[0], None) is not None:
                publisher.publish_removed([_number(names[0])])
        if run:
            self._publish_run(run, parent, publisher)

    def _publish_run(self, run: Sequence[str], parent: str | None, publisher: KvEventPublisher) -> None:
        publisher.publish_stored(
            [token for name in run for token in self._tokens[name]],
            [self._size] * len(run),
            [_number(name) for name in run],
            None if parent is None else _number(parent),
        )


def _number(name: str) -> int:
    """A block's name as Dynamo writes it: 64 bits with a sign."""
    return int.from_bytes(bytes.fromhex(name)[:8], "big", signed=True)


async def follow(session: aiohttp.ClientSession, url: str, blocks: Blocks, publisher: KvEventPublisher) -> None:
    """Passes the engine's KV events on until it ends."""
    async with session.get(f"{url}/_emulator/kv_events") as response:
        response.raise_for_status()
        async for line in response.content:
            blocks.publish(json.loads(line), publisher)


class Engine:
    """The emulated engine behind this worker."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, blocks: Blocks) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._blocks = blocks

    async def generate(self, request: Mapping[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        """One request. Raises HttpError with the engine's own status where it refuses."""
        prompt = list(request["token_ids"])
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": (request.get("stop_conditions") or {}).get("max_tokens"),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._blocks.sent(prompt)
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
        config.enable_local_indexer = config.kv_event_publishing_enabled = True
        endpoint = runtime.endpoint(ENDPOINT)
        publisher = KvEventPublisher(endpoint, kv_block_size=block_tokens, enable_local_indexer=True)
        blocks = Blocks(model, block_tokens)
        following = asyncio.ensure_future(follow(session, args.engine, blocks, publisher))
        following.add_done_callback(lambda _: os._exit(1))
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
        await endpoint.serve_endpoint(Engine(session, args.engine, model, blocks).generate)


if __name__ == "__main__":
    asyncio.run(main())
