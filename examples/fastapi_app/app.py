"""Admission mounted into a FastAPI app. The app stands for your own; see README.md for how to run it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from sidecar import AdmissionMiddleware, granted

POLICIES = os.environ.get("SIDECAR_POLICY") or Path(__file__).parents[2] / "policies"

app = FastAPI()
app.add_middleware(AdmissionMiddleware, policy=POLICIES)


@app.post("/v1/chat/completions")
async def chat(body: dict[str, Any]) -> dict[str, Any]:
    """Runs only once the request was admitted. `body` is what the engine should get."""
    grant = granted()
    if grant is None:  # with `mode: observe` every request passes, and none is granted anything
        answer = "not granted"
    else:
        # Some engines read their priority from a header, so `body` does not always have one.
        answer = f"tier {grant.tier}, tenant {grant.tenant}, engine priority {grant.engine_priority}"
    return {"model": body.get("model"), "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]}
