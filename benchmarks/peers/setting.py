"""Words that the scenarios and the peers share: what a scenario asks of a gateway, and a gateway that runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.processor_time import processor_time_s
from sidecar.tools.loadgen import Planned

MODEL = "emulated"
KEY = "sk-benchmark-of-peers-4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""API key of the one tenant. LiteLLM refuses to start without a long one."""
INTERACTIVE, DEFAULT, BULK = "interactive", "default", "bulk"
"""Three tiers, most important first. The names are SMG's, which are fixed; the other peers take any."""
PRIORITIES = {INTERACTIVE: 0, DEFAULT: 1, BULK: 2}
"""The same as numbers, for LiteLLM: lower is more important."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Wishes of a scenario. Each peer does with its own means as much of it as it can.

    `places` is how many requests the engine runs at once, `tokens` what fits into its KV cache (None: no bound), and
    `request_tokens` the size of every request then, for peers that count requests.
    `reserves` are parts of the pool by tier, most important first. `lends` says whether idle reserves may be used by
    others, `preempts` whether room may be taken back from requests that have sent nothing. `tokens_per_minute` is
    a limit of the tenant. `gateways` processes share the pool.
    """

    places: int = 8
    tokens: int | None = None
    request_tokens: int = 1_000
    reserves: Mapping[str, float] = field(default_factory=lambda: {INTERACTIVE: 0.5, BULK: 0.25})
    lends: bool = True
    preempts: bool = False
    tokens_per_minute: int | None = None
    gateways: int = 1

    @property
    def most_requests(self) -> int:
        """The bound in requests that keeps within both bounds, where all requests have the same size."""
        return min(self.places, self.tokens // self.request_tokens) if self.tokens else self.places


@dataclass(frozen=True, slots=True)
class Gateway:
    """One running process of a peer, with the processes that it started."""

    url: str
    process: subprocess.Popen[bytes] | subprocess.Popen[str]

    def processor_time_s(self) -> float:
        """Processor time of all its processes so far."""
        return processor_time_s(self.process.pid)

    @property
    def port(self) -> int:
        """Port on loopback."""
        return int(self.url.rsplit(":", 1)[1])


Start = Callable[[Setting, str, Path, ExitStack], Sequence[Gateway]]
"""Starts the gateways of a setting before the engine of the address, with a folder for files. The stack ends them."""
Mark = Callable[[str], tuple[Mapping[str, str], Mapping[str, object]]]
"""Headers and fields of the body that put a request into a tier."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a scenario. `value` is None where it was not seen in the time; `unit` is empty for counts."""

    name: str
    value: float | None
    unit: str = "s"

    def __str__(self) -> str:
        if self.value is None:
            return "not seen"
        return f"{self.value:,.2f} s" if self.unit == "s" else f"{self.value:,.0f}{self.unit}"


@dataclass(frozen=True, slots=True)
class Peer:
    """One gateway of the comparison.

    `engine` is the emulated engine's dialect that it is played before.

    `is_heavy` says that it uses a processor for itself.
    """

    name: str
    title: str
    version: str
    start: Start
    mark: Mark
    engine: Sequence[str] = ("--engine", "sglang")
    is_heavy: bool = False

    def request(self, tier: str, at_s: float, tokens: int, *, stream: bool = True, prompt: str = "") -> Planned:
        """A chat request whose answer has `tokens` tokens. Its label is the tier."""
        headers, fields = self.mark(tier)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt or f"{tier}, sent at {at_s:.3f} s"}],
            "max_tokens": tokens,
            "stream": stream,
            **fields,
        }
        every = {"content-type": "application/json", "authorization": f"Bearer {KEY}", **headers}
        return Planned(at_s, "/v1/chat/completions", every, json.dumps(body).encode(), tier)
