"""A real overload for a real Prometheus to scrape: all that our metrics can tell of happens in it.

An emulated engine with four slots; before it `sidecar serve`, a process of its own, whose pool is in a real Valkey; and
clients of every kind: batch work beyond its queue, interactive work that overtakes it, and those that ask for too much,
hang up, or have no key.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from sidecar.policy.compiler import shipped_policies
from tests.otel.files import RULES
from tests.support.prometheus import Prometheus, prometheus
from tests.support.redis_servers import HOST, ends_with_parent, free_port, is_free, until
from tests.support.shared_pools import begun_store

SLOTS, STEP_MS = 4, 10
REFUSED_PAUSE_S = 0.1
START_S, PATIENCE_S = 60.0, 60.0
"""At most: both are done in some seconds, on a machine that is not busy."""
KNOWN_AFTER_S = 1.0
"""What Prometheus knows of a moment is complete by then: what is scraped bears the time at which that began."""
LOG_SHOWN = 4000
POOL = "overload"
POLICY = f"""\
engine: vllm
capacity: {{tokens: 4000, requests: {SLOTS}}}
pool: {POOL}
aging: {{promote_after: 5m, ceiling: normal}}
tiers:
  critical: {{limit: 50%, always_first: true}}
  high: {{reserve: 25%, slo: {{ttft: 20ms, queue_wait: 5ms, starvation: 1m}}}}
  normal: {{}}
  batch:
    reserve: 25%
    limit: 90%
    queue: {{max_requests: 6, max_wait: 500ms, max_deadline: 2s}}
    slo: {{starvation: 20ms}}
default_tier: normal
anonymous: normal
endpoints:
  /v1/completions: {{}}
tenants: tenants/*.yaml
"""
BATCH, HIGH, STANDARD, NOBODY = "sk-demo-research", "sk-demo-interactive", "sk-demo-standard", "sk-nobody"
LIMITED = "sk-limited"
LIMITED_TENANT = f"""\
tenant: limited
keys: ["sha256:{hashlib.sha256(LIMITED.encode()).hexdigest()}"]
tier: normal
limits: {{requests_per_minute: 1}}
over_limit: {{downgrade: batch}}
"""


@dataclass(frozen=True)
class Client:
    """Asks again and again, `pause_s` after an answer, later after a refusal. Hangs up after `patience_s`."""

    key: str
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = True
    patience_s: float = 10.0
    pause_s: float = 0.01


CLIENTS = [
    *[Client(BATCH)] * 12,
    *[Client(BATCH, stream=False)] * 2,
    *[Client(HIGH)] * 2,
    Client(HIGH, stream=False),
    *[Client(STANDARD, {"x-priority": "critical"})] * 4,  # are clamped
    *[Client(BATCH, patience_s=0.05)] * 3,  # leave while they wait
    *[Client(STANDARD, {"x-priority": "batch", "x-admission-deadline": "1s"})] * 3,  # rise as it comes near
    Client(NOBODY),
    *[Client(LIMITED, pause_s=0.2)] * 2,  # the second is downgraded
]

STORE_LOST = "AdmissionStoreLost"
CALLED_FOR = {
    ("AdmissionQueueWaitOverSlo", "high"),
    ("AdmissionTtftOverSlo", "high"),
    ("AdmissionTierStarves", "batch"),
    ("AdmissionTierStarved", "batch"),
    ("AdmissionClampsRise", "high"),
    ("AdmissionPolicyRejected", ""),
}
"""The alerts that this overload must raise, each with its tier. It goes on until they fire."""


NOW_AND_THEN = (
    "admission_abandoned_total",
    "admission_clamped_total",
    "admission_downgraded_total",
    "admission_risen_total",
)


@dataclass(frozen=True)
class Overloaded:
    """What saw it. As Unix time: when it was at its height, and when the store had been lost for a while."""

    prometheus: Prometheus
    at_s: float
    lost_s: float


ENGINE_KILLED_AFTER_S = 3.0
"""By then it has requests again."""


@contextmanager
def overloaded(folder: Path) -> Iterator[Overloaded]:
    """Brings it about, which takes some seconds; Prometheus lives on for the block."""
    policy = folder / "policies"
    policy.mkdir()
    (policy / "policy.yaml").write_text(POLICY)
    shutil.copytree(shipped_policies() / "tenants", policy / "tenants")
    (policy / "tenants" / "limited.yaml").write_text(LIMITED_TENANT)
    engine, sidecar, admin = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        store = stack.enter_context(begun_store(folder, POOL))
        emulate = ("emulate", "--engine", "vllm", "--step-ms", str(STEP_MS), "--max-num-seqs", str(SLOTS))
        processes = [stack.enter_context(_running(folder / "engine.log", *emulate, "--port", str(engine)))]
        serve = ("serve", "--upstream", f"http://{HOST}:{engine}", "--policy", str(policy))
        ports = ("--port", str(sidecar), "--admin-port", str(admin))
        # The console is an exporter as any other: with one, spans are recorded, and exemplars lead to them.
        variables = {"SIDECAR_STORE": store.url, "OTEL_TRACES_EXPORTER": "console"}
        processes += [stack.enter_context(_running(folder / "sidecar.log", *serve, *ports, **variables))]
        server = stack.enter_context(prometheus(folder, [f"{HOST}:{admin}"], [hurried(RULES, folder)]))

        def is_ready() -> bool:
            has_ended = any(process.poll() is not None for process in processes)
            return has_ended or (not is_free(engine) and server.scraped())

        until(is_ready, "the engine is there, the sidecar scraped", START_S)
        assert all(process.poll() is None for process in processes), "a process has ended"
        (policy / "policy.yaml").write_text("tiers: {")  # is rejected, and the sidecar goes on
        url = f"http://{HOST}:{sidecar}/v1/completions"

        def is_at_its_height(now_s: float) -> bool:
            return fired(server, now_s) >= CALLED_FOR and is_up(server, now_s) and has_had_its_way(server, now_s)

        at_s = asyncio.run(_load(url, is_at_its_height))

        def has_failed_some(now_s: float) -> bool:
            if now_s > at_s + ENGINE_KILLED_AFTER_S:
                processes[0].kill()  # what it runs fails, and what comes is held
            return bool(server.query("admission_failed_total", now_s))

        asyncio.run(_load(url, has_failed_some))
        store.kill()
        lost_s = asyncio.run(_load(url, lambda now_s: (STORE_LOST, "") in fired(server, now_s)))
        yield Overloaded(server, at_s, lost_s)


def fired(server: Prometheus, at_s: float) -> set[tuple[str, str]]:
    """The alerts that have fired until a Unix time, each with its tier."""
    found = server.query('last_over_time(ALERTS{alertstate="firing"}[5m])', at_s)
    return {(sample.labels["alertname"], sample.labels.get("admission_tier", "")) for sample in found}


def has_had_its_way(server: Prometheus, at_s: float) -> bool:
    """Whether what happens only now and then has been scraped twice: a rate is known."""
    return all(server.query(f"rate({name}[3s])", at_s) for name in NOW_AND_THEN)


def is_up(server: Prometheus, at_s: float) -> bool:
    """Whether the last scrape before a Unix time was answered: on a busy machine one is late now and then."""
    return [sample.value for sample in server.query("up", at_s)] == [1]


def hurried(rules: Path, folder: Path) -> Path:
    """The rules with seconds in place of minutes, and minutes in place of hours; what must last, lasts a second."""
    text = rules.read_text(encoding="utf-8")
    text = re.sub(r"\bfor: \d+m", "for: 1s", text)
    # Names of recording rules end in their range and must stay as they are.
    text = re.sub(r"(\[|offset )(\d+)m", r"\1\2s", text)
    text = re.sub(r"(\[|offset )(\d+)h", r"\1\2m", text)
    written = folder / "rules.yaml"
    written.write_text(text, encoding="utf-8")
    return written


@contextmanager
def _running(log: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sidecar ...` as a process that writes to a file, which an error of the block shows."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **variables},
            preexec_fn=ends_with_parent(),  # noqa: PLW1509 - it takes no lock that a thread may hold
        )
    try:
        yield process
    except AssertionError as error:
        raise AssertionError(f"{error}\nsidecar {arguments[0]}: {log.read_text()[:LOG_SHOWN]}") from None
    finally:
        process.kill()
        process.wait()


async def _load(url: str, is_done: Callable[[float], bool]) -> float:
    """Asks until it is done, at most for `PATIENCE_S`. `is_done` gets a Unix time; the last one is returned."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        enough = asyncio.Event()
        asking = [asyncio.create_task(_ask(session, url, client, enough)) for client in CLIENTS]
        begun_s = time.time()
        at_s = begun_s - KNOWN_AFTER_S
        while at_s - begun_s < PATIENCE_S and not await asyncio.to_thread(is_done, at_s):
            await asyncio.sleep(0.1)
            at_s = time.time() - KNOWN_AFTER_S
        enough.set()
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
    failures = [each for each in ended if each is not None and not isinstance(each, asyncio.CancelledError)]
    assert not failures, failures
    return at_s


async def _ask(session: aiohttp.ClientSession, url: str, client: Client, enough: asyncio.Event) -> None:
    headers = {"authorization": f"Bearer {client.key}", **client.headers}
    body = {"model": "emulated", "prompt": "hello " * 50, "max_tokens": 15, "stream": client.stream}
    timeout = aiohttp.ClientTimeout(total=client.patience_s)
    while not enough.is_set():  # a cancellation that meets a timeout is lost in it
        try:
            async with session.post(url, json=body, headers=headers, timeout=timeout) as answer:
                await answer.read()
                pause_s = client.pause_s if answer.ok else REFUSED_PAUSE_S
        # A stream that its engine leaves breaks off; in Python 3.10 TimeoutError is not yet the builtin.
        except (asyncio.TimeoutError, aiohttp.ClientPayloadError):
            pause_s = client.pause_s
        await asyncio.sleep(pause_s)
