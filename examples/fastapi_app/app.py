"""Admission mounted into a FastAPI app. The app stands for your own; see README.md for how to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI

from sidecar import AdmissionMiddleware, granted

POLICIES = Path(__file__).parents[2] / "policies"

app = FastAPI()
app.add_middleware(AdmissionMiddleware, policy=POLICIES)


@app.post("/v1/chat/completions")
async def chat(body: dict[str, Any]) -> dict[str, Any]:
    """Runs only once the request was admitted; `body` has the priority that the engine should hear."""
    grant = granted()
    assert grant is not None, "every request of a guarded endpoint has a grant"
    answer = f"tier {grant.tier}, tenant {grant.tenant}, engine priority {body['priority']}"
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]}
