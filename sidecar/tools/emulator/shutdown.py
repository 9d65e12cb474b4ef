"""Shutdown of the emulated engine: what SIGTERM does to running requests, which differs from engine to engine.

| engine | new requests | running ones | by default for |
|---|---|---|---|
| vLLM | 500, while `/health` stays 200 | run on, then an error event; without time to run they end under a 200 | 0 s |
| SGLang | served; `/health` is 503 | run on | as long as they take |
| TensorRT-LLM | no connection | run on | as long as they take |
| Dynamo | no connection | run on, then the connection breaks | 5 s |

vLLM 0.32 was watched while it stopped, with --shutdown-timeout and without. SGLang:
`TokenizerManager.sigterm_watchdog`; it looks every five seconds, here at once. TensorRT-LLM: `OpenAIServer.__call__`
leaves signals to uvicorn.
Dynamo: DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS; how it breaks the streams was not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.engine import EmulatedEngine

DEFAULT_S: Mapping[type[Engine], float | None] = {TensorRtLlm: None, Vllm: 0.0, Sglang: None, Dynamo: 5.0}
"""How long each lets requests run after SIGTERM; None is without an end."""


def allowed_s(config: EmulatorConfig) -> float | None:
    """How long this engine lets them run."""
    return DEFAULT_S[config.engine] if config.shutdown_timeout_s is None else config.shutdown_timeout_s


async def drain(engine: EmulatedEngine) -> None:
    """Returns when the server may close: its listening sockets first, then every connection that has no request."""
    engine.is_stopping = True
    if engine.config.engine in (TensorRtLlm, Dynamo):
        return
    limit_s = allowed_s(engine.config)
    if limit_s == 0:
        engine.cut_all()
        return
    try:
        await asyncio.wait_for(engine.idle(), limit_s)
    except asyncio.TimeoutError:
        engine.fail_all()
