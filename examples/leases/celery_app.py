"""Celery tasks that call the engine themselves, in the pool of the HTTP traffic.

celery -A examples.leases.celery_app worker --concurrency 4
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_process_shutdown, worker_shutdown

import sidecar
from sidecar.leases import ThreadAdmission

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/1")
ENGINE = os.environ.get("ENGINE_URL", "http://127.0.0.1:8001")
POLICY = os.environ.get("SIDECAR_POLICY", str(Path(__file__).parent / "policy.yaml"))

app = Celery("nightly", broker=BROKER, backend=BROKER)
_admissions: dict[int, ThreadAdmission] = {}  # by the process: a fork takes along what it cannot use
_lock = threading.Lock()


def admission() -> ThreadAdmission:
    """This process's place in the pool. The first task joins it: after a fork, and in a worker of threads, too."""
    with _lock:
        if os.getpid() not in _admissions:
            _admissions[os.getpid()] = sidecar.connect_threads(policy=POLICY)
        return _admissions[os.getpid()]


@worker_process_shutdown.connect  # type: ignore[untyped-decorator]
@worker_shutdown.connect  # type: ignore[untyped-decorator]
def close(**_: object) -> None:
    """The process leaves the pool."""
    joined = _admissions.pop(os.getpid(), None)
    if joined is not None:
        joined.close()


@app.task  # type: ignore[untyped-decorator]
def summarize(text: str) -> str:
    """A summary of a text, as soon as the pool has room for it."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Summarize: {text}"}], "max_tokens": 64}
    prompt_tokens = len(text) // 4
    with admission().lease(tier="nightly", tokens=prompt_tokens + 64, prompt_tokens=prompt_tokens) as lease:
        body["priority"] = lease.priority
        request = urllib.request.Request(f"{ENGINE}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=600) as response:
            found = json.load(response)
        lease.used(found["usage"]["total_tokens"])
    answer: str = found["choices"][0]["message"]["content"]
    return answer
