"""KV events of the emulated engine: which blocks of tokens its prefix cache gains and loses, as they happen.

`/_emulator/kv_events` is a stream of lines. Each is a JSON list of changes in their order: `["stored", block, parent]`
(parent null for a prompt's first block), `["removed", block]`. Blocks are named by their hashes in hex. The first line
is an empty list: from then on nothing is missed. These are the events of vLLM's `--kv-events-config`
(`vllm/distributed/kv_events.py`: BlockStored, BlockRemoved), which it sends over ZMQ. A router that follows an engine's
cache needs them; see `dynamo_worker.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sidecar.tools.emulator.engine import EmulatedEngine
from sidecar.tools.step_model.kv_cache import BlockHash

Change: TypeAlias = "tuple[str | None, ...]"
LOOK_EVERY_S = 0.5
"""How late a stream notices that the engine stops: it must not keep the server from closing."""


class KvEvents:
    """Passes the changes of one engine's cache on to all who listen. Without listeners it does nothing."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine
        self._listeners: set[asyncio.Queue[Change]] = set()
        engine.core.cache.on_change = self._tell

    def _tell(self, kind: str, block: BlockHash, parent: BlockHash | None) -> None:
        """See `kv_cache.PrefixChange`."""
        of = (None if parent is None else parent.hex(),) if kind == "stored" else ()
        for listener in self._listeners:
            listener.put_nowait((kind, block.hex(), *of))

    async def respond(self, request: Request) -> Response:
        """The stream, until the client leaves or the engine stops."""
        del request
        return StreamingResponse(self._lines(), media_type="application/x-ndjson")

    async def _lines(self) -> AsyncIterator[bytes]:
        changes: asyncio.Queue[Change] = asyncio.Queue()
        self._listeners.add(changes)
        try:
            yield b"[]\n"
            while not self._engine.is_stopping:
                try:
                    line = [await asyncio.wait_for(changes.get(), LOOK_EVERY_S)]
                except asyncio.TimeoutError:
                    continue
                while not changes.empty():
                    line.append(changes.get_nowait())
                yield msgspec.json.encode(line) + b"\n"
        finally:
            self._listeners.discard(changes)
