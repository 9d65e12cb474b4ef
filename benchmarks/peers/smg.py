"""SMG as a peer: its default gate, and its priority scheduler with slots reserved as the setting asks.

The scheduler's capacity is what the engine reports (`max_running_requests`), and its classes are fixed. A class's
unused reservation is held back from lower classes and not lent. Its configuration's keys are those of 1.13, which
ends at the start where one is wrong or missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers import real
from benchmarks.peers.running import free_ports
from benchmarks.peers.setting import BULK, DEFAULT, INTERACTIVE, Gateway, Peer, Setting

QUEUE, TIMEOUT_S = 10_000, 600
STARVATION_S = {INTERACTIVE: 5, DEFAULT: 30, BULK: 120}
"""Its own defaults."""


def classes(setting: Setting) -> str:
    """Configuration of the priority scheduler: queues that hold a scenario's load, floors as the setting asks."""
    lines = ["classes:"]
    for name in ("system", INTERACTIVE, DEFAULT, BULK):
        floor = int(setting.reserves.get(name, 0.0) * setting.places)
        can_preempt = setting.preempts and name == INTERACTIVE
        lines.append(
            f"  {name}: {{reserved_floor: {floor}, queue_size: {QUEUE}, queue_timeout_secs: {TIMEOUT_S}, "
            f"starvation_threshold_secs: {STARVATION_S.get(name, 5)}, can_preempt: {str(can_preempt).lower()}}}"
        )
    return "\n".join(lines) + "\n"


def scheduled(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """SMG with its priority scheduler; several are joined by its mesh.

    The scheduler takes its capacity from the engine. Where tokens bind, its gate can be told how many requests fit.
    """
    if setting.tokens:
        gate = ["--max-concurrent-requests", str(setting.most_requests)]
        waiting = ["--queue-size", str(QUEUE), "--queue-timeout-secs", str(TIMEOUT_S)]
        return [_launch(engine, running, free_ports(1)[0], [*gate, *waiting])]
    (folder / "classes.yaml").write_text(classes(setting))
    options = ["--priority-scheduler-enabled", "--priority-scheduler-default-max-class", INTERACTIVE]
    options += ["--priority-scheduler-config", str(folder / "classes.yaml")]
    ports = free_ports(2 * setting.gateways)
    meshes = ports[setting.gateways :]
    gateways = []
    for number, (port, mesh) in enumerate(zip(ports, meshes, strict=False)):
        own = [*options]
        if len(meshes) > 1:
            own += ["--enable-mesh", "--mesh-server-name", f"smg-{number}", "--mesh-host", "127.0.0.1"]
            own += ["--mesh-port", str(mesh), "--mesh-peer-urls", *(f"127.0.0.1:{one}" for one in meshes[:number])]
        gateways.append(_launch(engine, running, port, own))
    return gateways


def default(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """SMG as it comes, for the cost of a request."""
    del setting, folder
    return [_launch(engine, running, free_ports(1)[0], [])]


def _launch(engine: str, running: ExitStack, port: int, options: Sequence[str]) -> Gateway:
    process = real.start("smg", [engine], port, options)
    running.callback(real.stop, process)
    return Gateway(f"http://127.0.0.1:{port}", process)


def mark(tier: str) -> tuple[Mapping[str, str], Mapping[str, object]]:
    """The header that names a class."""
    return {"x-smg-priority": tier}, {}


VERSION = real.ROUTERS["smg"].version
SMG = Peer("smg", "SMG, priority scheduler", VERSION, scheduled, mark)
SMG_SCHEDULED = Peer("smg", "SMG with its scheduler", VERSION, scheduled, mark)
SMG_DEFAULT = Peer("smg", "SMG as it comes", VERSION, default, mark)
