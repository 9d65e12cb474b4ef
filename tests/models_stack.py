"""Two models with pools of their own behind one `sidecar serve`, before three emulated engines."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import address, command
from tests.support.http import fetch
from tests.support.in_process import emulated_engine
from tests.support.late import openai
from tests.support.ports import free_ports
from tests.support.waiting import until

KEY, LIMITED, BY_MODEL = "sk-alpha", "sk-limited", "sk-by-model"
LLAMA, QWEN, LORA = "meta/llama-70b", "qwen-7b", "my-lora"
POLICY = """\
engine: vllm
mode: {mode}
engines:
  static:
    - {{name: a, url: http://127.0.0.1:{a}}}
    - {{name: b, url: http://127.0.0.1:{b}}}
    - {{name: c, url: http://127.0.0.1:{c}}}
  capacity: {{tokens: 20k, requests: 2}}
  health: {{every: 500ms, fail: 2, rise: 1}}
  slow_start: 1s
models:
  meta/llama-70b: {{engines: [a, b], aliases: [llama, my-lora], cost: {{output: 4}}}}
  qwen-7b: {{engines: [c]}}
tiers:
  high: {{}}
  batch: {{reserve: 10%}}
default_tier: high
sources: [engine, body, header, endpoint, key]
engine_levels: {{high: -10, batch: 0}}
anonymous: deny
endpoints:
  /v1/chat/completions: {{}}
  /v1/responses: {{}}
  /v1/messages: {{}}
background: hold
tenants: tenants/*.yaml
"""
TENANTS = {
    "alpha": (KEY, ""),
    "limited": (LIMITED, "limits: {concurrent_requests: 1}\n"),
    "by-model": (
        BY_MODEL,
        "limits: {concurrent_requests: 2, models: {qwen-7b: {concurrent_requests: 1}, "
        "meta/llama-70b: {tokens_per_minute: 60k}}}\n",
    ),
}
ENGINES = {"a": "llama-70b", "b": "llama-70b", "c": QWEN}
_EMULATED = ("--engine", "vllm", "--step-ms", "10", "--max-num-seqs", "8", "--response-store")


@dataclass
class ModelsStack:
    """The sidecar, its policy's folder, and the ports of its engines by name."""

    folder: Path
    url: str
    admin_url: str
    ports: dict[str, int]
    sidecar: subprocess.Popen[str]

    def client(self, key: str = KEY) -> openai.AsyncOpenAI:
        """A client that shows what it is refused."""
        return openai.AsyncOpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, timeout=30)

    def admin(self, path: str) -> Any:
        """A JSON page of the admin port, whatever its status."""
        return fetch(self.admin_url + path).json

    def text(self, path: str) -> str:
        """A page of the admin port as text."""
        return fetch(self.admin_url + path).text

    def pool(self, model: str) -> Any:
        """The state of a model's pool."""
        return self.admin("/state")["models"][model]["pool"]

    def counts(self, model: str) -> tuple[int, int]:
        """(leases, waiting) of a model's pool."""
        pool = self.pool(model)
        return pool["leases"], pool["waiting"]

    async def write(self, policy: str) -> str:
        """Replaces the policy. Returns its generation as soon as it is in force."""
        before = self.admin("/state")["policy"]["generation"]
        (self.folder / "policy.yaml").write_text(policy)
        await until(lambda: self.admin("/state")["policy"]["generation"] != before)
        return str(self.admin("/state")["policy"]["generation"])

    def policy(self) -> str:
        """The policy as it stands."""
        return (self.folder / "policy.yaml").read_text()


def write_models_policy(folder: Path, ports: dict[str, int], mode: str = "enforce") -> Path:
    """The policy of the stack."""
    (folder / "policy.yaml").write_text(POLICY.format(mode=mode, **ports))
    (folder / "tenants").mkdir()
    for name, (key, more) in TENANTS.items():
        digest = hashlib.sha256(key.encode()).hexdigest()
        (folder / "tenants" / f"{name}.yaml").write_text(
            f'tenant: {name}\nkeys: ["sha256:{digest}"]\ntier: high\n{more}'
        )
    return folder


@contextmanager
def models_stack(folder: Path, mode: str = "enforce", **environment: str) -> Iterator[ModelsStack]:
    """All of it. `environment` is the sidecar's."""
    first = free_ports(3)
    ports = {name: first + number for number, name in enumerate(ENGINES)}
    write_models_policy(folder, ports, mode)
    with ExitStack() as running:
        stack = ModelsStack(folder, "", "", ports, None)  # type: ignore[arg-type]  # it is started last
        for name, port in ports.items():
            arguments = ("--port", str(port), "--model", ENGINES[name], *_EMULATED)
            running.enter_context(emulated_engine(*arguments))
        served = ("serve", "--policy", str(folder), "--port", "0", "--admin-port", "0")
        stack.sidecar = running.enter_context(command(*served, **environment))
        stack.url, stack.admin_url = address(stack.sidecar), address(stack.sidecar)
        yield stack
