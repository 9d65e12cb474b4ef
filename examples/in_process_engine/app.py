"""A server that calls its engine itself, in the same process, and passes on the priority that was granted.

Nothing is forwarded in the request here, so nothing needs to be read back from it: `granted()` says what the engine
should hear, already in the engine's own range and direction.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse

from sidecar import AdmissionMiddleware, granted

POLICIES = Path(__file__).parents[2] / "policies"
MODEL = os.environ.get("MODEL", "TinyLlama/TinyLlama-1.1B-Chat-v1.0")


def engine_classes() -> tuple[Any, Any]:
    """TensorRT-LLM's `LLM` and `SamplingParams`, or the stand-ins where it cannot be imported."""
    try:
        engine = importlib.import_module("tensorrt_llm")
    except ImportError:
        from examples.in_process_engine.stand_in import StandInLLM, StandInSamplingParams

        return StandInLLM, StandInSamplingParams
    return engine.LLM, engine.SamplingParams


LLM, SamplingParams = engine_classes()
# Without this TensorRT-LLM takes requests as they come, and warns about every priority.
llm = LLM(MODEL, scheduler_config={"waiting_queue_policy": "priority"})

app = FastAPI()
app.add_middleware(AdmissionMiddleware, policy=POLICIES)


@app.post("/v1/completions")
async def completions(body: dict[str, Any]) -> Response:
    """Text completions, in one piece or streamed."""
    grant = granted()
    # With `mode: observe` every request passes without a grant: then TensorRT-LLM's own default is right.
    priority = 0.5 if grant is None else grant.engine_priority
    streams = bool(body.get("stream", False))
    request = llm.generate_async(
        body["prompt"],
        SamplingParams(max_tokens=body.get("max_tokens", 16)),
        streaming=streams,
        priority=priority,
    )
    if streams:
        return StreamingResponse(_events(request), media_type="text/event-stream")
    output = await request
    return JSONResponse({"object": "text_completion", "choices": [{"index": 0, "text": output.outputs[0].text}]})


async def _events(request: Any) -> AsyncIterator[str]:
    async for output in request:
        piece = {"object": "text_completion", "choices": [{"index": 0, "text": output.outputs[0].text_diff}]}
        yield f"data: {json.dumps(piece)}\n\n"
    yield "data: [DONE]\n\n"
