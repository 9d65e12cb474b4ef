"""Admission mounted into the replicas of a Ray Serve deployment. The app stands for your own; see README.md."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve

from sidecar import AdmissionMiddleware, granted

POLICY = os.environ.get("SIDECAR_POLICY") or Path(__file__).parent / "policy.yaml"
REPLICAS = 2
MOST_AT_ONCE = 1000
"""Requests that Ray gives a replica at once. Its default is 5, and a request that waits for admission counts: the sixth
would wait in Ray's own queue, which knows no tier. So it is above all that may run and wait in the pool."""
SECONDS_PER_TOKEN = 0.01
"""Of the stand-in for an engine."""


def build_app() -> FastAPI:
    """The app of one replica. Ray calls this in the replica, with its own environment; an app would be pickled."""
    app = FastAPI()
    app.add_middleware(AdmissionMiddleware, policy=POLICY)

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        """Runs only once the request was admitted. The times are for the test: how many ran at once in all replicas."""
        grant = granted()
        began = time.time()
        await asyncio.sleep(body["max_tokens"] * SECONDS_PER_TOKEN)  # your engine: an AsyncLLM, a client, a handle
        answer = {"role": "assistant", "content": f"tier {grant.tier}" if grant is not None else "not granted"}
        ran = {"replica": os.getpid(), "began": began, "ended": time.time()}
        return {"model": body.get("model"), "choices": [{"index": 0, "message": answer}], "ran": ran}

    return app


ingress = serve.deployment(
    serve.ingress(build_app)(),
    name="ingress",
    num_replicas=REPLICAS,
    max_ongoing_requests=MOST_AT_ONCE,
    # A replica is a process that no server's options tell of: with this, a policy without a store fails the start.
    ray_actor_options={"runtime_env": {"env_vars": {"SIDECAR_PROCESSES": str(REPLICAS)}}},
)
app = ingress.bind()
