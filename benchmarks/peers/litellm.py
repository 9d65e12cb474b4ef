"""LiteLLM's proxy as a peer: one deployment, with the limits and the queue that its documentation has.

Beyond `max_parallel_requests` of a deployment a request is answered with 429 at once; `retry_policy` makes the proxy
try it again, after a pause that grows. That is the nearest it has to waiting in line. The request's `priority` is that
of its beta queue (https://docs.litellm.ai/docs/scheduler), which orders requests only while no deployment is healthy.
`itpm` and `otpm` are enforced by the pre-call check `enforce_model_rate_limits`. Shares of a rate by priority
(`priority_reservation`) need a license, limits of a key a PostgreSQL: both are left out. So it was read in the
package's own sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers import real
from benchmarks.peers.running import Command, free_ports, started
from benchmarks.peers.setting import KEY, MODEL, PRIORITIES, Gateway, Peer, Setting
from tests.support.redis_servers import RedisServer, first_binary

PACKAGE, VERSION = "litellm", "1.109.1"
LOOSENED = ("certifi", "litellm-proxy-extras")
"""Its exact versions may be missing in a mirror. The second has the tables of a database that is not used here."""
RETRIES = 1_000
ENVIRONMENT = {
    "LITELLM_MASTER_KEY": KEY,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "NO_DOCS": "True",
}
"""No download of prices, and no log line for a request: what its page on production recommends."""


def install() -> Path:
    """Installs it where it is not yet, which takes two minutes. Raises NotInstalled."""
    return real.install_package(real.environment_of(PACKAGE, VERSION), f"{PACKAGE}[proxy]", VERSION, loosened=LOOSENED)


def configuration(setting: Setting | None, engine: str, store_port: int | None = None) -> str:
    """`config.yaml` of a setting, or of a proxy that only passes on."""
    lines = ["model_list:", f"  - model_name: {MODEL}", "    litellm_params:"]
    lines += [f"      model: openai/{MODEL}", f"      api_base: {engine}/v1", "      api_key: none"]
    router = ["num_retries: 0"]
    if setting is not None:
        lines.append(f"      max_parallel_requests: {setting.most_requests}")
        router = [f"retry_policy: {{RateLimitErrorRetries: {RETRIES}}}", f"num_retries: {RETRIES}"]
        if setting.tokens_per_minute:
            lines += [f"      {key}: {setting.tokens_per_minute}" for key in ("itpm", "otpm")]
            router = ["num_retries: 0", "optional_pre_call_checks: [enforce_model_rate_limits]"]
        if store_port:
            router += ["redis_host: 127.0.0.1", f"redis_port: {store_port}"]
        lines += ["general_settings:", "  cancel_on_disconnect: true"]
    lines += ["router_settings:", *(f"  {line}" for line in router)]
    lines += ["litellm_settings:", "  request_timeout: 600", "  telemetry: false", "  set_verbose: false"]
    return "\n".join(lines) + "\n"


def limited(setting: Setting, engine: str, files: Path, running: ExitStack) -> Sequence[Gateway]:
    """LiteLLM with the setting's bounds; several share a Valkey or Redis."""
    store_port = None
    if setting.gateways > 1:
        (files / "store").mkdir()
        store_port = running.enter_context(RedisServer(first_binary(), files / "store")).port
    file = files / "config.yaml"
    file.write_text(configuration(setting, engine, store_port))
    return [_launch(file, running) for _ in range(setting.gateways)]


def passing(setting: Setting, engine: str, files: Path, running: ExitStack) -> Sequence[Gateway]:
    """LiteLLM without limits, for the cost of a request."""
    del setting
    file = files / "config.yaml"
    file.write_text(configuration(None, engine))
    return [_launch(file, running)]


def _launch(configured: Path, running: ExitStack) -> Gateway:
    [port] = free_ports(1)
    line = [str(install() / "bin" / "litellm"), "--config", str(configured)]
    line += ["--host", "127.0.0.1", "--port", str(port)]
    log = configured.with_name(f"log-{port}.txt")
    return started(running, Command(line, port, "/health/readiness", log, ENVIRONMENT))


def mark(tier: str) -> tuple[Mapping[str, str], Mapping[str, object]]:
    """The field of its queue; lower is more important."""
    return {}, {"priority": PRIORITIES[tier]}


LITELLM = Peer("litellm", "LiteLLM", VERSION, limited, mark, is_heavy=True)
LITELLM_PASSING = Peer("litellm", "LiteLLM as it comes", VERSION, passing, mark)
