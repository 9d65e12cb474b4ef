"""The examples of leases, as their README starts them: a batch driver, and a Celery worker beside HTTP traffic."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import command
from tests.support.http import fetch
from tests.support.redis_servers import RedisServer, until
from tests.support.shared_pools import begun_store

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "leases"
CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.long


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    with begun_store(tmp_path) as server:
        yield server


@pytest.fixture
def policy(tmp_path: Path, store: RedisServer) -> Path:
    path = tmp_path / "policy.yaml"
    text = (EXAMPLE / "policy.yaml").read_text()
    assert text.count("redis://127.0.0.1:6379/0") == 1
    path.write_text(text.replace("redis://127.0.0.1:6379/0", store.url))
    return path


@pytest.fixture
def engine() -> Iterator[str]:
    with command("emulate", "--engine", "vllm", "--port", "0", "--max-num-seqs", "16") as (url,):
        yield url


def chat(url: str, tokens: int) -> dict[str, str]:
    """Sends one request; the answer's headers."""
    body = {"model": "emulated", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
    answer = fetch(f"{url}{CHAT}", body)
    assert answer.status == 200, answer.text
    return dict(answer.headers)


def test_the_batch_driver_answers_all_and_leaves_the_pool(tmp_path: Path, policy: Path, engine: str) -> None:
    bodies = [
        {"model": "m", "messages": [{"role": "user", "content": f"text {each}"}], "max_tokens": 5} for each in range(40)
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    line = [sys.executable, str(EXAMPLE / "nightly.py"), str(requests), "--engine", engine, "--policy", str(policy)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(answer) for answer in done.stdout.splitlines()]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [5] * 40
    with command("serve", "--upstream", engine, "--policy", str(policy), "--port", "0", "--admin-port", "0") as (
        url,
        admin,
    ):
        chat(url, 1)
        pool = state(admin)
    assert (pool["store"]["replicas"], pool["leases"], pool["waiting"]) == (1, 0, 0)  # nothing of the driver is left


def test_a_request_that_fails_is_said_and_the_others_are_answered(tmp_path: Path, policy: Path, engine: str) -> None:
    requests = tmp_path / "requests.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    requests.write_text("".join(json.dumps({**body, "max_tokens": most}) + "\n" for most in (10**6, 5)))
    line = [sys.executable, str(EXAMPLE / "nightly.py"), str(requests), "--engine", engine, "--policy", str(policy)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert "failed: ClientResponseError" in done.stderr


@contextlib.contextmanager
def worker(broker: str, policy: Path, engine: str, log: Path) -> Iterator[dict[str, str]]:
    """A Celery worker with two processes, and the environment in which its tasks can be sent."""
    environment = {**os.environ, "CELERY_BROKER_URL": broker, "SIDECAR_POLICY": str(policy), "ENGINE_URL": engine}
    line = [sys.executable, "-m", "celery", "-A", "examples.leases.celery_app", "worker", "--concurrency", "2"]
    with (
        log.open("w") as written,
        subprocess.Popen(line, cwd=ROOT, env=environment, stderr=written, stdout=written) as process,
    ):
        try:
            yield environment
        finally:
            process.terminate()
            process.wait(30)


SEND = """
import sys
from examples.leases.celery_app import summarize
sent = [summarize.delay(f"text {each}") for each in range(6)]
for each in sent:
    print(each.get(timeout=60), flush=True)
"""


def test_a_celery_worker_and_http_traffic_share_one_pool(
    tmp_path: Path, policy: Path, store: RedisServer, engine: str
) -> None:
    """With one place in the pool, tasks and requests take turns: each waits for the others."""
    policy.write_text(policy.read_text().replace("requests: 16", "requests: 1"))
    broker = store.url.rsplit("/", 1)[0] + "/1"
    serve = ("serve", "--upstream", engine, "--policy", str(policy), "--port", "0", "--admin-port", "0")
    log = tmp_path / "worker.log"
    with command(*serve) as (url, admin), worker(broker, policy, engine, log) as environment:
        sending = subprocess.Popen(
            [sys.executable, "-c", SEND], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        with sending:
            first = sending.stdout.readline()
            assert first.strip(), log.read_text()
            waits = [int(chat(url, 5)["x-admission-wait-ms"]) for _ in range(3)]
            rest = sending.stdout.read().splitlines()
        assert len(rest) == 5, log.read_text()
        until(lambda: state(admin)["leases"] == 0, "all leases are given back")
        assert state(admin)["store"]["replicas"] == 3  # the server, and those of the worker
    assert "Traceback" not in log.read_text()
    assert max(waits) > 0  # a task was in the one place


def state(admin: str) -> dict[str, Any]:
    """The pool's state, as the server knows it."""
    return fetch(f"{admin}/state").json["pool"]
