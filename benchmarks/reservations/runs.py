"""One run: requests that always wait, a pool, and an engine whose KV cache is what binds."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reservations.engine import Engine, Hardware
from benchmarks.reservations.replica import Replica, Running
from benchmarks.reservations.traces import Asked
from sidecar.policy.compiler import load
from sidecar.policy.model import Policy
from sidecar.pools import Pool

POLICY = """\
engine: vllm
capacity: {{tokens: {tokens}, requests: 100000, learn: "{learn}"}}
tiers: {{all: {{reserve: 100%}}}}
default_tier: all
anonymous: all
endpoints: {{/v1/chat/completions: {{}}}}
"""
QUEUE = 32
"""Requests that wait in the pool at all times. They are sized when they enter it, so a longer queue has older sizes."""
COLD = 500
"""Answers after which the shares are measured. Preemptions count from the first request on."""
READING_S = 1.0
"""Virtual seconds between two readings of the engine's counter of preemptions."""


@dataclass(frozen=True)
class Point:
    """The state of a run at one moment; all but `at_s`, `quantile` and `used` add up."""

    at_s: float
    answers: int
    preemptions: int
    generated: int
    used_token_s: float
    steps: int
    quantile: float
    used: int


@dataclass
class Run:
    """One run. `points` are one for each virtual second, `warm` the one after 500 answers, `end` the last."""

    kv_tokens: int
    warm: Point
    end: Point
    points: list[Point] = field(default_factory=list)

    @property
    def used(self) -> float:
        """Tokens in the KV cache to its size, after the cold start."""
        return (self.end.used_token_s - self.warm.used_token_s) / self._seconds / self.kv_tokens

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, after the cold start."""
        return (self.end.generated - self.warm.generated) / self._seconds

    @property
    def tokens_per_step(self) -> float:
        """The running sequences of a step, after the cold start: output if a step took the same whatever runs."""
        return (self.end.generated - self.warm.generated) / (self.end.steps - self.warm.steps)

    @property
    def preempted_per_1000(self) -> float:
        """Engine preemptions for 1,000 answers, of the whole run."""
        return 1000 * self.end.preemptions / self.end.answers

    @property
    def cold_preemptions(self) -> int:
        """Those of them before the first 500 answers."""
        return self.warm.preemptions

    @property
    def _seconds(self) -> float:
        return self.end.at_s - self.warm.at_s


def policy_of(hardware: Hardware, learn: str) -> Policy:
    """A policy with one tier and the engine's size."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.yaml"
        file.write_text(POLICY.format(tokens=hardware.kv_tokens, learn=learn))
        return load(file)


def play(
    requests: Sequence[Asked], learn: str, hardware: Hardware, *, prefills: bool = False, replicas: int = 1
) -> Run:
    """Plays the requests with one mode of `learn`, until the last of them enters the queue."""
    return asyncio.run(_Player(requests, learn, hardware, prefills, replicas).play())


class _Player:
    def __init__(
        self, requests: Sequence[Asked], learn: str, hardware: Hardware, prefills: bool, replicas: int
    ) -> None:
        policy = policy_of(hardware, learn)
        self._hardware = hardware
        self._engine = Engine(hardware, prefills=prefills)
        self._pool = Pool(policy, self._now_us)
        self._replicas = [Replica(policy, self._pool) for _ in range(replicas)]
        self._requests = [one for one in requests if one.prompt + (one.max_tokens or one.output) <= hardware.kv_tokens]
        self._next = 0
        self._running: dict[object, tuple[Replica, Running]] = {}
        self._answers = 0
        self._read_s = 0.0

    def _now_us(self) -> int:
        return round(self._engine.now_s * 1e6)

    async def play(self) -> Run:
        points: list[Point] = []
        warm = None
        cold = min(COLD, len(self._requests) // 4)
        while await self._fill():
            self._step()
            if warm is None and self._answers >= cold:
                warm = self._point()
            if self._engine.now_s >= self._read_s:
                self._read_s = self._engine.now_s + READING_S
                self._read()
                points.append(self._point())
        await self._pool.close()
        assert warm is not None, "the run ended before its engine was full"
        return Run(self._hardware.kv_tokens, warm, self._point(), points)

    async def _fill(self) -> bool:
        """Keeps the pool's queue full; admitted requests go to the engine. False when no request is left."""
        while True:
            is_any = False
            for replica in self._replicas:
                for one in replica.granted():
                    is_any = True
                    self._running[one.sequence] = (replica, one)
                    self._engine.add(one.sequence)
            if self._next == len(self._requests):
                return False
            waiting = sum(len(replica.waiting) for replica in self._replicas)
            if waiting >= QUEUE and not is_any:
                return True
            if waiting < QUEUE:
                replica = self._replicas[self._next % len(self._replicas)]
                await replica.enter(self._requests[self._next])
                self._next += 1

    def _step(self) -> None:
        engine = self._engine
        step = engine.step()
        for sequence in step.reached:
            replica, one = self._running[sequence]
            again = replica.streamed(one, engine.length(sequence))
            if again is not None:
                engine.report_at(sequence, again)
        for sequence in step.finished:
            replica, one = self._running.pop(sequence)
            replica.ended(one)
            self._answers += 1

    def _read(self) -> None:
        now_us = self._now_us()
        for replica in self._replicas:
            replica.sizes.preempted(None, self._engine.preemptions, now_us)

    def _point(self) -> Point:
        engine = self._engine
        quantile = max((one.trust.quantile for one in self._replicas[0].sizes.engines()), default=0.0)
        return Point(
            engine.now_s,
            self._answers,
            engine.preemptions,
            engine.generated,
            engine.used_token_s,
            engine.steps,
            quantile,
            engine.used_tokens,
        )
