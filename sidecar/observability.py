"""Everything that looks at one door, put together: its observer, the admin port's pages, and what begins and ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.admin import routes
from sidecar.admin.metrics import metrics_routes
from sidecar.admin.routes import LivePages
from sidecar.cluster.generations import Generations
from sidecar.cluster.report import Sources
from sidecar.events import Received
from sidecar.middleware.controller import AdmissionController
from sidecar.policy.model import EngineName, Policy, Tier
from sidecar.policy.reload import PolicyFiles, PolicyReloader, ReloadSignal
from sidecar.pools import Grant, Pool
from sidecar.telemetry import SpanObserver, Telemetry
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.logs.request_log import RequestLog
from sidecar.telemetry.metrics import (
    ObservedMetrics,
    PoolMetrics,
    PoolSample,
    RequestMetrics,
    TierSample,
    UnguardedMetrics,
)
from sidecar.telemetry.observed import Listeners, ObservedLog, ToldOfObserved
from sidecar.telemetry.quiet import Quiet
from sidecar.telemetry.recent import Recent
from sidecar.telemetry.scrape import Scrape
from sidecar.telemetry.spans.predecessors import predecessors_in
from sidecar.telemetry.tallies import Tallies
from sidecar.telemetry.telemetry import Listener, Tell, Trace
from sidecar.telemetry.tenants import shown_tenants
from sidecar.telemetry.unguarded import UnguardedLog

TOLD_WITHIN_S = 0.05
"""So late metrics, journal and log hear of a request, unless somebody asks before."""


class Observability:
    """One per door. `files` are the policy's, None where it came from no file; `is_shared` says the pool is in a store.

    `is_shown` says that somebody serves `routes`. Where nobody does, no more is kept of a request than its spans need.
    `observer` and `observed` are the door's, `routes` are for the admin port beside the door's own, and `scrape` is for
    `configure_from_environment`. `open` belongs to the server's start and `close` to its end, before the pool ends;
    without them the pages show this process alone. Raises ValueError for an environment that cannot be.
    """

    def __init__(
        self,
        door: AdmissionController,
        policy: Policy,
        pool: Pool,
        files: PolicyFiles | None,
        environment: Mapping[str, str],
        *,
        is_shared: bool,
        is_shown: bool,
    ) -> None:
        self.scrape = Scrape()
        self._policy = policy
        self._watch = None if files is None else PolicyReloader(files, door)
        self._hangup = ReloadSignal(self.reload)
        self._log = RequestLog()
        journal, recent = Journal(), Recent()
        metrics = RequestMetrics(
            policy.pool, tiers=[tier.name for tier in policy.tiers], tenants_shown=shown_tenants(environment)
        )
        generations = Generations()
        sampler = PoolSampler(
            pool,
            lambda: self._policy,
            self._rejections,
            lambda: generations.count(self._policy.generation),
            lambda: door.pending_aborts.held(),  # noqa: PLW0108  # the controller has them later
        )
        self._gauges = PoolMetrics(policy.pool, sampler)  # told for as long as it lives
        # In a shared pool the pages of other replicas show what this one tells.
        is_looked_at = is_shown or is_shared
        keeping = [journal, recent] if is_looked_at else [OnlySampled(journal)]
        listeners = (metrics, *keeping, self._log, sampler)
        self._spans = _spans(policy, journal)
        telemetry = Telemetry(self._spans, listeners, delay_s=TOLD_WITHIN_S)
        self.observer: Telemetry | Quiet = telemetry if is_looked_at else Quiet(telemetry, self._log)
        tallies = Tallies(lambda: self._policy.generation, time.time)
        self.observed = ToldOfObserved([tallies.note, ObservedMetrics(metrics).note, ObservedLog(self._log).note])
        unguarded = UnguardedMetrics(metrics), UnguardedLog(self._log)
        self.unguarded = Listeners([listener.note for listener in unguarded])
        self._pages = LivePages(
            Sources(
                policy=lambda: self._policy,
                pool=pool,
                recent=recent,
                tenants=metrics.held,
                refusals=journal.refusals,
                notices=lambda: [*door.readiness(), *door.notices()],
                observed=tallies.read,
            ),
            generations,
        )
        names = [tier.name for tier in policy.tiers]
        stories = routes.routes(journal, tiers=lambda: names, pool=policy.pool, is_shared=is_shared)
        pages = [*self._pages.routes(), *metrics_routes(self.scrape), *stories]
        up_to_date = Middleware(UpToDate, flush=self.observer.flush)
        self.routes: Sequence[BaseRoute] = [Mount("", routes=pages, middleware=[up_to_date])]

    async def open(self) -> None:
        """Begins to look."""
        await self._pages.open()
        if self._watch is not None:
            await self._watch.start()
            self._hangup.take()

    async def close(self) -> None:
        """Ends that, and logs what was only counted so far."""
        self._hangup.let_go()
        if self._watch is not None:
            await self._watch.stop()
        await self._pages.close()
        self.observer.flush()
        self._log.flush()

    def change_policy(self, policy: Policy) -> None:
        """The door goes by another: what is shown, measured and marked goes by it, too."""
        self._policy = policy
        self._spans.change_limits(_starvation_limits_s(policy))
        self._pages.live.tell()

    def reload(self) -> None:
        """Looks at the policy's files at once: somebody says that they are ready."""
        if self._watch is not None:
            self._watch.look_at_once()

    def notices(self) -> Sequence[str]:
        """What whoever is on call should know of the policy's files, and of replicas that run another one."""
        return [*(() if self._watch is None else self._watch.notices()), *self._pages.live.notices()]

    def generations(self) -> Mapping[str, Sequence[str]]:
        """The pool's replicas by the generation of the policy that they run; empty where the pool is not shared."""
        return self._pages.live.generations()

    def _rejections(self) -> int:
        return 0 if self._watch is None else self._watch.rejections


class UpToDate:
    """Around an app that tells of requests: what has happened so far is told before it answers."""

    def __init__(self, app: ASGIApp, flush: Callable[[], None]) -> None:
        self._app = app
        self._flush = flush

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._flush()
        await self._app(scope, receive, send)


class OnlySampled:
    """A listener to requests whose trace is recorded, and to no other."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def begin(self, received: Received, trace: Trace | None) -> Tell | None:
        """See `Listener.begin`."""
        return self._listener.begin(received, trace) if trace is not None and trace.is_sampled else None


def _starvation_limits_s(policy: Policy) -> Mapping[str, float]:
    return {tier.name: tier.slo.starvation_s for tier in policy.tiers if tier.slo.starvation_s is not None}


def _spans(policy: Policy, journal: Journal) -> SpanObserver:
    return SpanObserver(
        starvation_limits_s=_starvation_limits_s(policy),
        provider_name=None if policy.engine is EngineName.NONE else policy.engine.value,
        who_was_ahead=predecessors_in(journal),
    )


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
