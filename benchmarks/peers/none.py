"""No gateway at all: the clients talk to the engine, which serves in the order of arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.running import no_process
from benchmarks.peers.setting import Gateway, Peer, Setting


def straight(setting: Setting, engine: str, folder: Path, running: ExitStack) -> Sequence[Gateway]:
    """The engine's own address."""
    del folder
    return [Gateway(engine, running.enter_context(no_process()))] * setting.gateways


def mark(tier: str) -> tuple[Mapping[str, str], Mapping[str, object]]:
    """The engine knows no tiers where the client names none."""
    del tier
    return {}, {}


NONE = Peer("none", "no gateway", "", straight, mark)
