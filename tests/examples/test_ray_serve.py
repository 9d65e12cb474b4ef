"""examples/ray_serve in a real Ray: two replicas, one pool in a real store, real HTTP requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.redis_servers import RedisServer, first_binary, free_port, until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_serve"
POLICY = yaml.safe_load((EXAMPLE / "policy.yaml").read_text())
READY_WITHIN_S = 180.0
"""Ray has been seen to take 47 s on two busy cores."""
pytestmark = pytest.mark.ray


@dataclass(frozen=True)
class Deployment:
    """The example as Ray serves it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def serving(folder: Path, policy: Path, **variables: str) -> Iterator[Deployment]:
    """`serve run` of the example, on a free port. Its home is empty, because Ray writes a token there."""
    port, log = free_port(), folder / "ray.log"
    application = {"name": "default", "import_path": "examples.ray_serve.app:app", "route_prefix": "/"}
    config = folder / "serve.yaml"
    config.write_text(
        yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]})
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR_", "RAY_"))}
    own = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "SIDECAR_POLICY": str(policy)}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**kept, **own, **variables}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Deployment(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with suppress(ProcessLookupError):  # what Ray has left of its own
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("ray")
    with (
        RedisServer(first_binary(), folder) as store,
        serving(folder, EXAMPLE / "policy.yaml", SIDECAR_STORE=store.url) as started,
    ):
        # Ray's proxy answers as soon as there is one.
        until(lambda: len(replicas_of(started)) == 2, "both replicas serve", READY_WITHIN_S)
        yield started


def replicas_of(deployment: Deployment) -> set[int]:
    """The replicas that answer four requests at once; none while Ray starts."""
    assert deployment.process.poll() is None, deployment.log.read_text()
    with ThreadPoolExecutor(4) as clients, suppress(OSError):
        return {each["ran"]["replica"] for each in clients.map(lambda _: chat(deployment.url, 10), range(4))}
    return set()


def sent(url: str, tokens: int, tier: str) -> urllib.request.Request:
    body = {"model": "m", "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"content-type": "application/json", "x-priority": tier}
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)


def chat(url: str, tokens: int, tier: str = "interactive") -> Any:
    """Sends one request; the answer, with its `tier`."""
    with urllib.request.urlopen(sent(url, tokens, tier), timeout=60) as response:
        return {**json.load(response), "tier": response.headers["x-admission-tier"]}


def most_at_once(ran: list[Any]) -> int:
    """The largest number of requests that ran at the same time, in all replicas: they have one clock."""
    events = sorted([(each["began"], 1) for each in ran] + [(each["ended"], -1) for each in ran])
    running = [0]
    for _, change in events:
        running.append(running[-1] + change)
    return max(running)


def test_replicas_without_a_store_do_not_start(tmp_path: Path) -> None:
    # First, so that one Ray runs at a time: two would need more than the two processors of a small machine.
    policy = tmp_path / "policy.yaml"
    text = (EXAMPLE / "policy.yaml").read_text()
    policy.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("store:")))
    assert policy.read_text() != text
    with serving(tmp_path, policy) as started:
        until(
            lambda: "2 server processes share this engine" in started.log.read_text(),
            "Ray says why no replica starts",
            READY_WITHIN_S,
        )


def test_both_replicas_admit_into_one_pool(deployment: Deployment) -> None:
    with ThreadPoolExecutor(24) as clients:
        ran = [each["ran"] for each in clients.map(lambda _: chat(deployment.url, 50), range(24))]
    assert len({each["replica"] for each in ran}) == 2
    assert most_at_once(ran) == POLICY["capacity"]["requests"]


def test_a_flood_of_batch_is_in_no_queue_before_an_interactive_request(deployment: Deployment) -> None:
    with ThreadPoolExecutor(40) as clients:
        flood = [clients.submit(chat, deployment.url, 50, "batch") for _ in range(40)]
        until(lambda: any(each.done() for each in flood), "the flood runs", 30)
        began = time.monotonic()
        answer = chat(deployment.url, 1)
        took_s = time.monotonic() - began
        waiting = sum(not each.done() for each in flood)
        assert answer["tier"] == "interactive"
        # 3 of 4 run for half a second each: 20 that wait are more than three seconds, in Ray's own queue too
        assert waiting > 20
        assert took_s < 2
        assert {each.result()["tier"] for each in flood} == {"batch"}


def test_a_client_that_disconnects_gives_its_room_back(deployment: Deployment) -> None:
    host, _, port = deployment.url.removeprefix("http://").partition(":")
    connections = []
    for _ in range(POLICY["capacity"]["requests"]):
        request = sent(deployment.url, 100_000, "interactive")
        connection = socket.create_connection((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(request.data)}\r\n\r\n".encode() + request.data)
        connections.append(connection)
    time.sleep(1)  # they run: each would for a quarter of an hour
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(sent(deployment.url, 1, "interactive"), timeout=2)
    for connection in connections:
        connection.close()
    assert chat(deployment.url, 1)["tier"] == "interactive"
