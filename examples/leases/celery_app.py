"""Celery tasks that call the engine themselves, in the pool of the HTTP traffic.

celery -A examples.leases.celery_app worker --concurrency 4
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown

import sidecar
from sidecar.leases import ThreadAdmission

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/1")
ENGINE = os.environ.get("ENGINE_URL", "http://127.0.0.1:8001")
POLICY = os.environ.get("SIDECAR_POLICY", str(Path(__file__).parent / "policy.yaml"))

app = Celery("nightly", broker=BROKER, backend=BROKER)
_admissions: list[ThreadAdmission] = []  # of this worker process


@worker_process_init.connect  # type: ignore[untyped-decorator]
def connect(**_: object) -> None:
    """Each worker process joins the pool by itself, after the fork."""
    _admissions.append(sidecar.connect_threads(policy=POLICY))


@worker_process_shutdown.connect  # type: ignore[untyped-decorator]
def close(**_: object) -> None:
    """The worker process leaves the pool."""
    while _admissions:
        _admissions.pop().close()


@app.task  # type: ignore[untyped-decorator]
def summarize(text: str) -> str:
    """A summary of a text, as soon as the pool has room for it."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Summarize: {text}"}], "max_tokens": 64}
    with _admissions[0].lease(tier="nightly", tokens=len(text) // 4 + 64) as lease:
        body["priority"] = lease.priority
        request = urllib.request.Request(f"{ENGINE}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=600) as response:
            found = json.load(response)
        lease.used(found["usage"]["total_tokens"])
    answer: str = found["choices"][0]["message"]["content"]
    return answer
