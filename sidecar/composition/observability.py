"""Observability of one admission controller: its observers, its samples for metrics, its admin pages, policy reload."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sidecar.admission.controller import AdmissionController, Monitor
from sidecar.admission.policy_snapshot import objective_for
from sidecar.cluster.document import EngineStatus
from sidecar.cluster.overview import Generations, PoolOverview
from sidecar.cluster.sampler import KINDS, PoolSampler, Sources
from sidecar.engines import NoPriorityEngine
from sidecar.events import ShadowHolds
from sidecar.policy.choices import Mode, UsageInTraces
from sidecar.policy.model import Policy
from sidecar.pools import Grant, Pool
from sidecar.pools.base import QueueMark
from sidecar.telemetry.dispatch import EventDispatcher, Fanout, Listener
from sidecar.telemetry.dry_run import DryRunStats
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.logs.request_log import RequestLog, access_log
from sidecar.telemetry.metrics import PoolMetrics, RequestMetrics
from sidecar.telemetry.metrics.tenants import shown_tenants
from sidecar.telemetry.recent import Recent
from sidecar.telemetry.request_record import RequestRecord
from sidecar.telemetry.setup import MetricsEndpoint
from sidecar.telemetry.spans.links import LongWaits, WaitFinder
from sidecar.telemetry.spans.tracer import RequestTracer
from sidecar.tenants.tenant_usage import TenantUsage

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from sidecar.policy.reload import FollowedHours, PolicyFiles, PolicyReloader, ReloadSignal, UsesPolicy
    from sidecar.tenants.registry import StoredTenantsRegistry
    from sidecar.tenants.stored import TenantRecords

UNCOUNTED = (
    "tokens_per_day and tokens_per_month do nothing here: the tenants' use is not counted (no store, or usage_days: 0)"
)
_WRITES_USAGE = {UsageInTraces.ONCE: None, UsageInTraces.ALWAYS: True, UsageInTraces.NEVER: False}


class Observability(Monitor):
    """One per admission controller. `files` are the policy's, None where it came from no file; `is_shared` says the
    pool is in a store.

    `is_shown` says that `routes` are served. Without them, and without an SDK, no more is done than to log failures.
    `records` are the tenants in the store, None where the policy has none there. `usage` counts what tenants use.
    `scrape` is for `configure_from_environment`. Without `open` the pages show this process alone, and `close` comes
    before the pool's end. Raises ValueError for an environment that cannot be.
    """

    def __init__(
        self,
        controller: AdmissionController,
        policy: Policy,
        pool: Pool,
        files: PolicyFiles | None,
        environment: Mapping[str, str],
        *,
        is_shared: bool,
        is_shown: bool,
        records: TenantRecords | None = None,
        usage: TenantUsage | None = None,
    ) -> None:
        super().__init__()
        self.scrape = MetricsEndpoint()
        self._policy = policy
        self._hours: FollowedHours | None = None
        self._registry: StoredTenantsRegistry | None = None
        self._watch: PolicyReloader | None = None
        self._hangup: ReloadSignal | None = None
        self._follow(controller, files, records)
        self._log = RequestLog(access=access_log(environment))
        is_looked_at = is_shown or is_shared  # the pages of other replicas show the requests of this one
        journal, recent = Journal(), Recent()
        self._pool, self._recent, self._waits = pool, recent, ModeWaits(pool)
        names = [tier.name for tier in policy.tiers]
        measured = [tier.name for tier in policy.tiers if objective_for(tier) is not None]
        metrics = RequestMetrics(policy.pool, tiers=names, measured=measured, tenants_shown=shown_tenants(environment))
        self._dry_run, generations = self._dry_run_stats(controller), Generations()
        sources = self._sources(controller, metrics, journal)
        self._live = PoolOverview(sources, generations=generations)
        sampler = PoolSampler(sources, lambda: generations.count(self._policy.generation), self._live.wanted)
        self._gauges = PoolMetrics(policy.pool, sampler, KINDS)  # its gauges are read for as long as it lives
        waits = WaitFinder(journal, names, is_shared, partial(_place, pool, names))
        self._long_waits = LongWaits(policy.trace_waits_s, waits.so_far)
        self._spans = _tracer(controller, policy, waits, self._long_waits)
        listeners: list[Listener] = [metrics, journal, self._log, sampler]
        if is_looked_at:
            self.observer = EventDispatcher(self._spans, [*listeners, recent])
        else:
            self.observer = EventDispatcher(self._spans, listeners, failure_log=self._log)
        self.observed = Fanout([self._dry_run.note, metrics.note_observed, self._log.note_observed])
        self.unguarded = Fanout([metrics.note_unguarded, self._log.note_unguarded])
        controller.engine_watch.on_change.append(self._live.share_now)
        self._usage = usage
        self._ending: list[Callable[[], None]] = []
        if is_shown:
            self.routes = self._routes(controller, journal, names, is_shared=is_shared)

    def _follow(
        self, controller: AdmissionController, files: PolicyFiles | None, records: TenantRecords | None
    ) -> None:
        """Follows the policy's files, the tenants in the store, and the hours of both, where there are any.

        A policy that is what it is at all hours, and cannot become another, has none: that of a model, whose front
        follows them.
        """
        governed: UsesPolicy = controller
        if files is not None or records is not None or self._policy.as_written is not self._policy:
            from sidecar.policy.reload import FollowedHours

            governed = self._hours = FollowedHours(controller)
        if records is not None:
            from sidecar.tenants.registry import StoredTenantsRegistry

            self._registry = StoredTenantsRegistry(governed, records)
        if files is not None:
            from sidecar.policy.reload import PolicyReloader, ReloadSignal

            self._watch, self._hangup = PolicyReloader(files, self._registry or governed), ReloadSignal(self.reload)

    def _routes(
        self, controller: AdmissionController, journal: Journal, names: Sequence[str], *, is_shared: bool
    ) -> Sequence[BaseRoute]:
        from sidecar.admin.engine_routes import EngineRoutes
        from sidecar.admin.routes import LivePages, metrics_routes, story_routes
        from sidecar.admin.tenant_routes import TenantRoutes, UsageRoutes
        from sidecar.explain.builder import ExplanationBuilder

        pages, engines = LivePages(self._live), EngineRoutes(lambda: controller.engines)
        self._ending += [engines.close, pages.stream.close]
        builder = ExplanationBuilder(journal, lambda: names, self._policy.pool, is_shared)
        stories = story_routes(builder, self._live.overview)
        tenants = [*TenantRoutes(self._registry).routes(), *UsageRoutes(self._usage).routes()]
        return [*pages.routes(), *engines.routes(), *metrics_routes(self.scrape), *stories, *tenants]

    async def open(self) -> None:
        """Begins to look."""
        if self._hours is not None:
            self._hours.start()
        if self._registry is not None:
            await self._registry.start()
        if self._usage is not None:
            await self._usage.start()
        await self._live.open()
        if self._watch is not None:
            await self._watch.start()
        if self._hangup is not None:
            self._hangup.take()

    async def close(self) -> None:
        """Ends that, and logs what was only counted so far."""
        if self._hangup is not None:
            self._hangup.let_go()
        if self._watch is not None:
            await self._watch.stop()
        if self._registry is not None:
            await self._registry.stop()
        if self._hours is not None:
            self._hours.stop()
        if self._usage is not None:
            await self._usage.stop()
        for end in self._ending:
            end()
        await self._live.close()
        self._log.flush()

    def change_policy(self, policy: Policy) -> None:
        """Another policy is in force: pages, metrics and marks follow it. Hours of one policy are one period."""
        is_another = policy.as_written is not self._policy.as_written
        if is_another:
            self._dry_run.end()
        if policy.mode is not self._policy.mode:
            self._waits.begin_anew()
            self._recent.begin_anew(time.time_ns())
        self._policy = policy
        if policy.mode is Mode.OBSERVE and is_another:
            self._dry_run.begin(policy.generation, self._pool.now_us())
        self._spans.change(_starvation_limits_s(policy), _WRITES_USAGE[policy.usage_in_traces])
        self._long_waits.change_interval(policy.trace_waits_s)
        self._live.share_now()

    def _sources(self, controller: AdmissionController, metrics: RequestMetrics, journal: Journal) -> Sources:
        """Where the live page and the gauges get their figures."""
        return Sources(
            policy=lambda: self._policy,
            pool=self._pool,
            recent=self._recent,
            tenants=metrics.held,
            refusals=journal.refusals,
            notices=lambda: _notices(controller),
            observed=self._dry_run.read,
            engine=lambda: _engine_view(controller),
            oldest=self._waits.oldest,
            engines=lambda: None if controller.engines is None else controller.engines.documents(),
            lease_sizes=controller.lease_sizes.documents,
            engine_speeds=lambda: controller.gain.document().engines if controller.snapshot.objectives else (),
            aborting=controller.pending_aborts.held,
            engine_up=lambda: controller.engine_watch.up,
            policies_rejected=lambda: 0 if self._watch is None else self._watch.rejections,
            loop_blocked_s=lambda: controller.watchdog.blocked_s,
        )

    def _dry_run_stats(self, controller: AdmissionController) -> DryRunStats:
        """The dry run's figures; a period has begun where the policy observes."""
        stats = DryRunStats(time.time, controller.shadows.waiting, lambda: self._holds(controller))
        if self._policy.mode is Mode.OBSERVE:
            stats.begin(self._policy.generation, self._pool.now_us())
        return stats

    def _holds(self, controller: AdmissionController) -> Mapping[str, ShadowHolds]:
        """The dry run's own counts, by the tier's name."""
        names = [tier.name for tier in self._policy.tiers]
        counted = controller.engine_times.counted()
        return {names[level]: holds for level, holds in counted.items() if level < len(names)}

    def reload(self) -> None:
        """Reads the policy's files at once."""
        if self._watch is not None:
            self._watch.look_at_once()

    def notices(self) -> Sequence[str]:
        """Notices for the operator about the policy's files, and about replicas that run another policy."""
        has_budgets = any(tenant.has_budgets for tenant in self._policy.named.values())
        uncounted = (UNCOUNTED,) if has_budgets and self._usage is None else ()
        following = [part for part in (self._watch, self._registry, self._usage) if part is not None]
        return [*(notice for part in following for notice in part.notices()), *uncounted, *self._live.notices()]

    def generations(self) -> Mapping[str, Sequence[str]]:
        """The pool's replicas by the generation of the policy that they run; empty where the pool is not shared."""
        return self._live.generations()


def _notices(controller: AdmissionController) -> Sequence[str]:
    """Notices of the live page, whose first sentence is about the engine already."""
    of_engine = controller.engine_watch.readiness()
    return [notice for notice in (*controller.readiness(), *controller.notices()) if notice not in of_engine]


def _tracer(controller: AdmissionController, policy: Policy, waits: WaitFinder, long_waits: LongWaits) -> RequestTracer:
    return RequestTracer(
        starvation_limits_s=_starvation_limits_s(policy),
        provider_name=None if policy.engine is NoPriorityEngine else policy.engine.name,
        find_links=waits.ended,
        served_by="engine" if controller.is_proxied else "app",
        writes_usage=_WRITES_USAGE[policy.usage_in_traces],
        long_waits=long_waits,
    )


def _place(pool: Pool, tiers: Sequence[str], record: RequestRecord) -> int | None:
    """How many requests are before one that waits, as its client sees it; not known once it was preempted."""
    mark = None if record.queued is None else record.queued.mark
    if mark is None or record.tier not in tiers:
        return None
    return pool.standing(tiers.index(record.tier), QueueMark(*mark)).ahead


def _engine_view(controller: AdmissionController) -> EngineStatus | None:
    watch = controller.engine_watch
    return None if watch.up is None else EngineStatus(watch.state.value, watch.reason or "", watch.for_s)


def _starvation_limits_s(policy: Policy) -> Mapping[str, float]:
    return {tier.name: tier.slo.starvation_s for tier in policy.tiers if tier.slo.starvation_s is not None}


class ModeWaits:
    """The waits that began under the mode in force: neither shadows among real requests, nor the reverse."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._since_us = 0

    def begin_anew(self) -> None:
        """The mode has changed."""
        self._since_us = self._pool.now_us()

    def oldest(self) -> Sequence[Grant | None]:
        """See `Pool.oldest`. A wait that began before is left out."""
        since_us, oldest = self._since_us, self._pool.oldest()
        return [wait if wait is not None and wait.at_us - wait.queue_wait_us >= since_us else None for wait in oldest]
