"""Ground of a scenario: one peer before one emulated engine, and what scenarios do there."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.running import engine, state
from benchmarks.peers.setting import Figure, Gateway, Peer, Setting
from sidecar.tools.loadgen import Planned, Seen, play, quantile

TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.05
_STARTING = threading.Lock()
"""Ports are free until they are taken: one ground is started at a time."""


@dataclass(frozen=True, slots=True)
class Ground:
    """A peer's gateways and the engine."""

    peer: Peer
    gateways: Sequence[Gateway]
    engine: str

    @property
    def url(self) -> str:
        """Address of the first gateway."""
        return self.gateways[0].url

    def most(self, name: str) -> int:
        """The most that the engine ever had of something: `requests`, `tokens` or `running`."""
        found: int = state(self.engine)["most"][name]
        return found

    def running(self) -> int:
        """Requests that run in the engine now."""
        found: int = state(self.engine)["now"]["running"]
        return found

    async def until(self, is_so: Callable[[int], bool], within_s: float) -> float | None:
        """Seconds until the number of running requests is so; None where it does not come to that."""
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < within_s:
            if is_so(await asyncio.to_thread(self.running)):
                return passed_s
            await asyncio.sleep(LOOK_EVERY_S)
        return None


@contextlib.contextmanager
def ground(peer: Peer, setting: Setting, *, step_ms: int, options: Sequence[str] = ()) -> Iterator[Ground]:
    """Starts the engine and the peer, and ends them."""
    with ExitStack() as running:
        words = [*peer.engine, "--max-num-seqs", str(setting.places), "--step-ms", str(step_ms), *options]
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        with _STARTING:
            [address] = running.enter_context(engine(*words))
            gateways = peer.start(setting, address, folder, running)
        yield Ground(peer, gateways, address)


async def played(url: str, plan: Sequence[Planned]) -> list[Seen]:
    """Plays one plan to its end."""
    return await play([url], plan, timeout_s=TIMEOUT_S)


def of_tier(seen: Sequence[Seen], tier: str) -> list[Seen]:
    """The requests of a tier."""
    return [one for one in seen if one.planned.label == tier]


def ttft(seen: Sequence[Seen], tier: str) -> list[Figure]:
    """Median and 95th percentile of a tier's time to first token."""
    values = [one.ttft_s for one in of_tier(seen, tier) if one.ttft_s is not None]
    return [
        Figure(f"{tier} TTFT p{part * 100:.0f}", quantile(values, part) if values else None) for part in (0.5, 0.95)
    ]


def last_end(seen: Sequence[Seen], tier: str) -> Figure:
    """When the last request of a tier had its answer."""
    ends = [one.end_s for one in of_tier(seen, tier) if one.is_complete]
    return Figure(f"all {tier} answered after", max(ends) if ends else None)


def refusals_and_failures(seen: Sequence[Seen]) -> list[Figure]:
    """Answers with a 4xx, and requests without a complete answer otherwise."""
    broken = [one for one in seen if not one.is_complete]
    refused = sum(one.status is not None and 400 <= one.status < 500 for one in broken)
    return [Figure("refused (4xx)", refused, ""), Figure("failed", len(broken) - refused, "")]
