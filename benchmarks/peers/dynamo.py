"""Dynamo as a peer: its frontend with the KV router, whose queue is as sensitive as it gets.

`--router-queue-threshold 0` queues a request while every engine has prompt tokens that are not computed, and
`strict_priority` orders that queue (https://docs.nvidia.com/dynamo/user-guides/agents/priority-scheduling). Its engine
is a vLLM with a prefix cache: a worker of ours registers it (`dynamo_worker.py`). The engine's own
priority is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers import real
from benchmarks.peers.running import free_ports
from benchmarks.peers.setting import PRIORITIES, Gateway, Peer, Setting

QUEUE = {"DYN_ROUTER_QUEUE_THRESHOLD": "0.0"}


def queued(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """Its frontend, and the worker before the engine."""
    del setting, folder
    [port] = free_ports(1)
    process = real.start("dynamo", [engine], port, variables=QUEUE)
    running.callback(real.stop, process)
    return [Gateway(f"http://127.0.0.1:{port}", process)]


def mark(tier: str) -> tuple[Mapping[str, str], Mapping[str, object]]:
    """The tier of its queue; higher is more important."""
    return {}, {"nvext": {"agent_hints": {"strict_priority": len(PRIORITIES) - 1 - PRIORITIES[tier]}}}


DYNAMO = Peer(
    "dynamo",
    "Dynamo, KV router",
    real.ROUTERS["dynamo"].version,
    queued,
    mark,
    engine=("--engine", "vllm", "--enable-prefix-caching", "--block-size", "16"),
)
