"""Our proxy as a peer: `sidecar serve` with a policy for the setting, and the proxy alone without admission."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.running import ending
from benchmarks.peers.setting import BULK, DEFAULT, INTERACTIVE, KEY, Gateway, Peer, Setting
from benchmarks.processes import addresses, start
from sidecar import __version__
from sidecar.policy.compiler import shipped_policies
from tests.support.redis_servers import RedisServer, first_binary

PREEMPT_AFTER = "100ms"
ABORT_LATENCY = "250ms"
"""The emulated engine aborts a request at once. Without this line the room is kept for the 4.5 s of a real SGLang."""


def policy(setting: Setting, store: str | None = None) -> str:
    """`policy.yaml` of a setting."""
    capacity = [f"requests: {setting.places}", *([f"tokens: {setting.tokens}"] if setting.tokens else [])]
    lines = [
        "engine: sglang",
        f"abort_latency: {ABORT_LATENCY}",
        f"capacity: {{{', '.join(capacity)}}}",
        *([f"store: {store}"] if store else []),
        "tiers:",
    ]
    for name in (INTERACTIVE, DEFAULT, BULK):
        keys = [f"reserve: {setting.reserves.get(name, 0.0):.0%}"]
        keys += [] if setting.lends else ["lend: 0%"] if name == INTERACTIVE else []
        if setting.preempts:
            keys += (
                [f"preempt_after: {PREEMPT_AFTER}", "always_first: true", "limit: 75%"] if name == INTERACTIVE else []
            )
            keys += ["preemptible: true"] if name == BULK else []
        lines.append(f"  {name}: {{{', '.join(keys)}}}")
    lines += [f"default_tier: {DEFAULT}", "anonymous: deny", "sources: [header]"]
    lines += ["endpoints: {/v1/chat/completions: {}}", "tenants: tenant.yaml"]
    return "\n".join(lines) + "\n"


def tenant(setting: Setting) -> str:
    """The one tenant's file."""
    limit = f"limits: {{tokens_per_minute: {setting.tokens_per_minute}}}\n" if setting.tokens_per_minute else ""
    return f'tenant: benchmark\nkeys: ["sha256:{_digest()}"]\ntier: {DEFAULT}\nmax_tier: {INTERACTIVE}\n{limit}'


def serve(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """One `sidecar serve`, or several that share a pool in a Valkey or Redis."""
    store = None
    if setting.gateways > 1:
        (folder / "store").mkdir()
        store = running.enter_context(RedisServer(first_binary(), folder / "store")).url
    (folder / "policy.yaml").write_text(policy(setting, store))
    (folder / "tenant.yaml").write_text(tenant(setting))
    return [_serve(engine, folder, running) for _ in range(setting.gateways)]


def shipped(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """`sidecar serve` with the policy that we ship, for the cost of a request."""
    del setting
    shutil.copytree(shipped_policies(), folder, dirs_exist_ok=True)
    file = folder / "policy.yaml"
    file.write_text(file.read_text().replace("engine: tensorrt-llm", "engine: sglang"))
    tenant_file = folder / "tenants" / "standard.yaml"
    tenant_file.write_text(re.sub("sha256:[0-9a-f]+", f"sha256:{_digest()}", tenant_file.read_text()))
    return [_serve(engine, folder, running)]


def alone(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """The reverse proxy without admission, in the same server."""
    del setting, folder
    return [_started(running, engine, module="benchmarks.peers.proxy_alone")]


def _serve(engine: str, folder: Path, running: ExitStack) -> Gateway:
    words = ["serve", "--upstream", engine, "--policy", str(folder), "--port", "0", "--admin-port", "0"]
    return _started(running, *words, module="sidecar.cli")


def _started(running: ExitStack, *words: str, module: str) -> Gateway:
    process = start(*words, module=module)
    running.enter_context(ending(process))
    return Gateway(addresses(process, 2)[0], process)


def _digest() -> str:
    return hashlib.sha256(KEY.encode()).hexdigest()


def mark(tier: str) -> tuple[Mapping[str, str], Mapping[str, object]]:
    """The header that names a tier."""
    return {"x-priority": tier}, {}


OURS = Peer("ours", "admission-sidecar", __version__, serve, mark)
"""With admission, by a policy for each scenario."""
OURS_SHIPPED = Peer("ours", "our proxy with admission", __version__, shipped, mark)
OURS_ALONE = Peer("ours-alone", "our proxy alone", __version__, alone, mark)
