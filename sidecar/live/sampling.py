"""Samples of a pool for its metrics, which are read in threads that the pool knows nothing of."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidecar.events import Received
from sidecar.policy.policy import Policy, Tier
from sidecar.pools import Grant, Pool
from sidecar.telemetry.metrics import PoolSample, TierSample
from sidecar.telemetry.telemetry import Trace

WITHIN_S = 0.5
"""So long an exporter waits for a busy event loop, and tells what it knows then: the loop may be waiting for it."""


class PoolSampler:
    """Takes a `PoolSample` in the event loop that the pool lives in, whoever asks. It is `metrics.Sample`.

    It is also a `Listener` to requests, which is how it knows the loop. `policy` is the one in force, `rejected` how
    many changed ones could not be used so far, `generations` how many different ones the pool's replicas run,
    `aborting` the requests and tokens that are held for requests that have ended.
    """

    def __init__(
        self,
        pool: Pool,
        policy: Callable[[], Policy],
        rejected: Callable[[], int] = lambda: 0,
        generations: Callable[[], int] = lambda: 1,
        aborting: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._rejected = rejected
        self._generations = generations
        self._aborting = aborting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._latest: PoolSample | None = None

    def begin(self, received: Received, trace: Trace | None) -> None:  # noqa: ARG002
        """See `Listener.begin`. No request is of interest, but where it is served."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()

    def __call__(self) -> PoolSample | None:
        """The pool as it stands; as it last stood where its loop has no time; None where that is not known."""
        loop = self._loop
        if loop is None or not loop.is_running() or loop is _running_loop():
            return self._take()  # nothing else can be changing it
        taking = self._taken()
        try:
            return asyncio.run_coroutine_threadsafe(taking, loop).result(WITHIN_S)
        except concurrent.futures.TimeoutError:
            return self._latest
        except RuntimeError:  # the loop has ended since
            taking.close()
            return self._latest

    async def _taken(self) -> PoolSample:
        return self._take()

    def _take(self) -> PoolSample:
        policy, state = self._policy(), self._pool.state()
        sample = pool_sample(policy, state, self._pool.oldest(), self._rejected(), self._generations())
        requests, tokens = self._aborting()
        self._latest = replace(sample, aborting_requests=requests, aborting_tokens=tokens)
        return self._latest


def pool_sample(
    policy: Policy, state: Mapping[str, Any], oldest: Sequence[Grant | None], rejected: int = 0, generations: int = 1
) -> PoolSample:
    """The sample of a pool whose `state()` and `oldest()` are these."""
    tiers = zip(policy.tiers, state["tiers"], oldest, strict=True)
    return PoolSample(
        tiers=[_tier_sample(*tier) for tier in tiers],
        generation=policy.generation,
        capacity_tokens=state["capacity"]["tokens"],
        capacity_requests=state["capacity"]["requests"],
        replicas=state.get("store", {}).get("replicas"),
        policies_rejected=rejected,
        generations=generations if "store" in state else None,
    )


def _tier_sample(tier: Tier, state: Mapping[str, Any], oldest: Grant | None) -> TierSample:
    return TierSample(
        tier=tier.name,
        queued_requests=state["queued"]["requests"],
        queued_tokens=state["queued"]["tokens"],
        oldest_wait_s=0.0 if oldest is None else oldest.queue_wait_us / 1e6,
        longest_starvation_s=0.0 if oldest is None else oldest.starvation_us / 1e6,
        held_tokens=state["held"]["tokens"],
        held_requests=state["held"]["requests"],
        reserve_tokens=state["reserve"]["tokens"],
        reserve_requests=state["reserve"]["requests"],
        limit_tokens=state["limit"]["tokens"],
        limit_requests=state["limit"]["requests"],
        borrowed_tokens=state["borrowed"],
        lent_tokens=state["lent"],
        slo_ttft_s=tier.slo.ttft_s,
        slo_queue_wait_s=tier.slo.queue_wait_s,
        slo_starvation_s=tier.slo.starvation_s,
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
