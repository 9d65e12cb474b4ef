"""What is soaked: two replicas of `sidecar serve` that share a pool in Redis, before one emulated engine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import addresses, start
from tests.support.redis_servers import RedisServer, first_binary, free_port

SLOTS, STEP_MS, MEAN_OUTPUT_TOKENS = 16, 40, 20
PER_S = SLOTS / (MEAN_OUTPUT_TOKENS * STEP_MS / 1000)
"""Requests a second that the engine can do."""
REPLICAS = 2
POOL = "soak"


@dataclass(frozen=True, slots=True)
class Traffic:
    """One tenant's. `share` is its part of the load, `streams` the part of its requests that stream.

    `limits` is in the words of its file. One that is `removable` is taken out of the policy now and then, and put back:
    meanwhile its key is answered with 401. Its clients never disconnect, so that its tier is always known.
    """

    tenant: str
    tier: str
    share: float
    streams: float
    limits: str = ""
    removable: bool = False

    @property
    def key(self) -> str:
        """Its clients' API key."""
        return f"sk-soak-{self.tenant}"

    def file(self) -> str:
        """Its file in the policy."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        lines = [f"tenant: {self.tenant}", f'keys: ["sha256:{digest}"]', f"tier: {self.tier}"]
        return "\n".join([*lines, *([f"limits: {self.limits}"] if self.limits else [])]) + "\n"


TRAFFIC = (
    Traffic("alerts", "critical", 0.03, 1.0),
    Traffic("chat", "high", 0.30, 0.9),
    Traffic("tools", "normal", 0.20, 0.5),
    Traffic("metered", "normal", 0.10, 0.5, "{requests_per_minute: 60, concurrent_requests: 4, burst: 10s}"),
    Traffic("guests", "low", 0.10, 0.7),
    Traffic("trial", "low", 0.05, 0.5, removable=True),
    Traffic("nightly", "batch", 0.17, 0.0),
    Traffic("reports", "batch", 0.05, 0.0, "{tokens_per_minute: 5k, max_output_tokens: 60}"),
)
TIERS = ("critical", "high", "normal", "low", "batch")


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a valid change of the policy changes."""

    requests: int = SLOTS
    low_places: int = 20
    batch_limit: int = 60
    without: frozenset[str] = frozenset()


def pool_file(knobs: Knobs) -> str:
    """The pool's file."""
    return f"""\
engine: vllm
pool: {POOL}
capacity: {{requests: {knobs.requests}}}
aging: {{promote_after: 10s, ceiling: normal}}
keep_alive: 1s
max_preemptions: 2
tiers:
  critical: {{reserve: 10%, preempt_after: 50ms}}
  high: {{reserve: 25%, lend: 50%, preempt_after: 100ms}}
  normal: {{reserve: 15%, queue: {{max_requests: 40, max_wait: 10s}}}}
  low: {{reserve: 5%, queue: {{max_requests: {knobs.low_places}, max_wait: 8s}}}}
  batch: {{reserve: 5%, limit: {knobs.batch_limit}%, preemptible: true, queue: {{max_requests: 60, max_wait: 20s}}}}
default_tier: low
anonymous: deny
sources: [key]
endpoints:
  /v1/chat/completions: {{}}
tenants: tenants/*.yaml
"""


@dataclass(slots=True)
class Setting:
    """Everything that runs. `proxies` and `admins` are addresses, of each replica in turn."""

    folder: Path
    redis: RedisServer
    engine_port: int
    engine: subprocess.Popen[str]
    replicas: Sequence[subprocess.Popen[str]] = ()
    proxies: Sequence[str] = ()
    admins: Sequence[str] = ()
    knobs: Knobs = field(default_factory=Knobs)

    @property
    def policy(self) -> Path:
        """The folder of its policy."""
        return self.folder / "policy"

    def write(self, knobs: Knobs) -> None:
        """A policy that is in order, file by file as an editor would leave it."""
        self.knobs = knobs
        for traffic in TRAFFIC:
            path = self.policy / "tenants" / f"{traffic.tenant}.yaml"
            if traffic.tenant in knobs.without:
                path.unlink(missing_ok=True)
            else:
                _replace(path, traffic.file())
        _replace(self.policy / "policy.yaml", pool_file(knobs))

    def break_policy(self, text: str) -> None:
        """Leaves something in the pool's file that is no policy."""
        _replace(self.policy / "policy.yaml", text)

    def kill_engine(self) -> None:
        """As if its machine had gone."""
        self.engine.kill()
        self.engine.wait()

    def start_engine(self) -> None:
        """It comes back where it was."""
        self.engine = _engine(self.engine_port)

    def hang_up(self) -> None:
        """SIGHUP to all replicas: they look at their files at once."""
        for replica in self.replicas:
            replica.send_signal(signal.SIGHUP)


@contextmanager
def running(folder: Path) -> Iterator[Setting]:
    """Starts everything, and ends it. Raises RuntimeError where something did not start."""
    with RedisServer(first_binary(), folder) as redis:
        port = free_port()
        setting = Setting(folder, redis, port, _engine(port))
        (setting.policy / "tenants").mkdir(parents=True)
        setting.write(Knobs())
        processes: list[subprocess.Popen[str]] = []
        try:
            processes += (_replica(setting, number) for number in range(REPLICAS))
            setting.replicas = tuple(processes)
            setting.proxies, setting.admins = zip(*(addresses(process, 2) for process in processes), strict=True)
            yield setting
        finally:
            for process in [*processes, setting.engine]:
                process.kill()
                process.wait()


def _engine(port: int) -> subprocess.Popen[str]:
    words = ("--max-num-seqs", str(SLOTS), "--step-ms", str(STEP_MS), "--port", str(port))
    process = start("emulate", "--engine", "vllm", *words)
    addresses(process, 1)
    return process


def _replica(setting: Setting, number: int) -> subprocess.Popen[str]:
    words = ("--upstream", f"http://127.0.0.1:{setting.engine_port}", "--policy", str(setting.policy))
    log = (setting.folder / f"replica-{number}.log").open("w")
    variables = {"SIDECAR_STORE": setting.redis.url, "SIDECAR_LOG_LEVEL": "warning"}
    with log:
        return start("serve", *words, "--port", "0", "--admin-port", "0", stderr=log, **variables)


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def errors(folder: Path) -> Mapping[str, int]:
    """What the replicas logged as a defect of their own, or not as a log line at all, and how often."""
    found: Counter[str] = Counter()
    for log in folder.glob("replica-*.log"):
        for line in log.read_text().splitlines():
            if not line.startswith("{"):
                found[line[:80]] += 1
            elif (said := json.loads(line))["event"] == "defect":
                found[said["message"][:80]] += 1
    return found
