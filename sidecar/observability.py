"""Observability of one admission controller: its observers, its samples for metrics, its admin pages, policy reload."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.admission.controller import AdmissionController
from sidecar.admission.policy_snapshot import objective_of
from sidecar.cluster.document import EngineView
from sidecar.cluster.learned_lengths import LengthExchange
from sidecar.cluster.overview import Generations, PoolOverview
from sidecar.cluster.report import Sources
from sidecar.engines import NoEngine
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.engines.view import EngineDocument
from sidecar.events import Received, ShadowHolds
from sidecar.lengths.lease_size import EngineSizesDocument
from sidecar.policy.model import Mode, Policy, Tier, UsageInTraces
from sidecar.pools import Grant, Pool
from sidecar.pools.base import QueueMark
from sidecar.telemetry.dispatch import EventDispatcher, Fanout, Listener
from sidecar.telemetry.dry_run import DryRunLog, DryRunMetrics, DryRunStats
from sidecar.telemetry.journal import Journal
from sidecar.telemetry.logs.request_log import RequestLog, UnguardedLog, access_log
from sidecar.telemetry.metrics import PoolMetrics, PoolSample, RequestMetrics, TierSample
from sidecar.telemetry.metrics.engine_speeds import EngineSpeedSample
from sidecar.telemetry.metrics.engines import EngineSample
from sidecar.telemetry.metrics.lease_sizes import LeaseSizeSample
from sidecar.telemetry.metrics.tenants import shown_tenants
from sidecar.telemetry.recent import Recent
from sidecar.telemetry.request_record import EventHandlers, RequestRecord
from sidecar.telemetry.setup import MetricsEndpoint
from sidecar.telemetry.spans.links import WaitFinder
from sidecar.telemetry.spans.long_waits import LongWaits
from sidecar.telemetry.spans.tracer import RequestTracer
from sidecar.tenants.records import StoredRecords
from sidecar.tenants.tenant_usage import TenantUsage

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from sidecar.policy.reload import PolicyFiles, PolicyReloader, ReloadSignal
    from sidecar.tenants.registry import StoredTenantsRegistry

UNCOUNTED = (
    "tokens_per_day and tokens_per_month do nothing here: the tenants' use is not counted (no store, or usage_days: 0)"
)
_WRITES_USAGE = {UsageInTraces.ONCE: None, UsageInTraces.ALWAYS: True, UsageInTraces.NEVER: False}


class Observability:
    """One per admission controller. `files` are the policy's, None where it came from no file; `is_shared` says the
    pool is in a store.

    `is_shown` says that `routes` are served. Without them, and without an SDK, no more is done than to log failures.
    `records` are the tenants in the store, None where the policy has none there. `usage` counts what tenants use.
    `observer` and `observed` are the controller's, `routes` are for the admin port, and `scrape` is for
    `configure_from_environment`. `open` belongs to the server's start and `close` to its end, before the pool ends;
    without them the pages show this process alone. Raises ValueError for an environment that cannot be.
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
        records: StoredRecords | None = None,
        usage: TenantUsage | None = None,
    ) -> None:
        self.scrape = MetricsEndpoint()
        self._policy = policy
        self._registry: StoredTenantsRegistry | None = None
        self._watch: PolicyReloader | None = None
        self._hangup: ReloadSignal | None = None
        self._follow(controller, files, records)
        self._log = RequestLog(access=access_log(environment))
        is_looked_at = is_shown or is_shared  # the pages of other replicas show the requests of this one
        journal, recent = Journal(), Recent()
        self._pool, self._recent, self._waits = pool, recent, ModeWaits(pool)
        names = [tier.name for tier in policy.tiers]
        metrics = RequestMetrics(
            policy.pool, tiers=names, measured=_measured(policy), tenants_shown=shown_tenants(environment)
        )
        self._dry_run, generations = self._dry_run_stats(controller), Generations()
        sampler = PoolSampler(
            pool,
            lambda: self._policy,
            lambda: 0 if self._watch is None else self._watch.rejections,
            lambda: generations.count(self._policy.generation),
            controller.pending_aborts.held,
            engine_up=lambda: controller.engine_watch.up,
            oldest=self._waits.oldest,
            engines=lambda: () if controller.engines is None else controller.engines.documents(),
            lease_sizes=controller.lease_sizes.documents,
            engine_speeds=lambda: _engine_speeds(controller),
            loop_blocked_s=lambda: controller.watchdog.blocked_s,
        )
        self._gauges = PoolMetrics(policy.pool, sampler)  # its gauges are read for as long as it lives
        waits = WaitFinder(journal, names, is_shared, partial(_place, pool, names))
        self._long_waits = LongWaits(policy.trace_waits_s, waits.so_far)
        self._spans = _tracer(controller, policy, waits, self._long_waits)
        listeners: list[Listener] = [metrics, journal, self._log, sampler]
        if is_looked_at:
            self.observer = EventDispatcher(self._spans, [*listeners, recent])
        else:
            self.observer = EventDispatcher(self._spans, listeners, failure_log=self._log)
        self.observed = Fanout([self._dry_run.note, DryRunMetrics(metrics).note, DryRunLog(self._log).note])
        self.unguarded = Fanout([metrics.note_unguarded, UnguardedLog(self._log).note])
        lengths = LengthExchange(controller.lease_sizes.estimator)
        self._live = PoolOverview(self._sources(controller, metrics, journal), generations=generations, lengths=lengths)
        controller.engine_watch.on_change.append(self._live.share_now)
        self._usage = usage
        self._ending: list[Callable[[], None]] = []
        self.routes: Sequence[BaseRoute] = ()
        if is_shown:
            self.routes = self._routes(controller, journal, names, is_shared=is_shared)

    def _follow(
        self, controller: AdmissionController, files: PolicyFiles | None, records: StoredRecords | None
    ) -> None:
        """Follows the policy's files, and the tenants in the store, where there are any."""
        if records is not None:
            from sidecar.tenants.registry import StoredTenantsRegistry

            self._registry = StoredTenantsRegistry(controller, records)
        if files is not None:
            from sidecar.policy.reload import PolicyReloader, ReloadSignal

            self._watch, self._hangup = PolicyReloader(files, self._registry or controller), ReloadSignal(self.reload)

    def _routes(
        self, controller: AdmissionController, journal: Journal, names: Sequence[str], *, is_shared: bool
    ) -> Sequence[BaseRoute]:
        from sidecar.admin.engine_routes import EngineRoutes
        from sidecar.admin.routes import LivePages, metrics_routes, story_routes
        from sidecar.admin.tenant_routes import TenantRoutes
        from sidecar.admin.usage_routes import UsageRoutes
        from sidecar.explain.builder import ExplanationBuilder

        pages, engines = LivePages(self._live), EngineRoutes(lambda: controller.engines)
        self._ending += [engines.close, pages.stream.close]
        builder = ExplanationBuilder(journal, lambda: names, self._policy.pool, is_shared)
        stories = story_routes(builder, self._live.overview)
        tenants = [*TenantRoutes(self._registry).routes(), *UsageRoutes(self._usage).routes()]
        return [*pages.routes(), *engines.routes(), *metrics_routes(self.scrape), *stories, *tenants]

    async def open(self) -> None:
        """Begins to look."""
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
        if self._usage is not None:
            await self._usage.stop()
        for end in self._ending:
            end()
        await self._live.close()
        self._log.flush()

    def change_policy(self, policy: Policy) -> None:
        """Another policy is in force: pages, metrics and marks follow it."""
        self._dry_run.end()
        if policy.mode is not self._policy.mode:
            self._waits.begin_anew()
            self._recent.begin_anew(time.time_ns())
        self._policy = policy
        if policy.mode is Mode.OBSERVE:
            self._dry_run.begin(policy.generation, self._pool.now_us())
        self._spans.change(_starvation_limits_s(policy), _WRITES_USAGE[policy.usage_in_traces])
        self._long_waits.change_interval(policy.trace_waits_s)
        self._live.share_now()

    def _sources(self, controller: AdmissionController, metrics: RequestMetrics, journal: Journal) -> Sources:
        """Where the live page gets its figures."""
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
            engine_speeds=lambda: _engine_speeds(controller),
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
        uncounted = () if self._usage is not None or not _has_budgets(self._policy) else (UNCOUNTED,)
        following = [part for part in (self._watch, self._registry, self._usage) if part is not None]
        return [*(notice for part in following for notice in part.notices()), *uncounted, *self._live.notices()]

    def generations(self) -> Mapping[str, Sequence[str]]:
        """The pool's replicas by the generation of the policy that they run; empty where the pool is not shared."""
        return self._live.generations()


def _notices(controller: AdmissionController) -> Sequence[str]:
    """Those of the live page, whose first sentence is about the engine already."""
    of_engine = controller.engine_watch.readiness()
    return [notice for notice in (*controller.readiness(), *controller.notices()) if notice not in of_engine]


def _tracer(controller: AdmissionController, policy: Policy, waits: WaitFinder, long_waits: LongWaits) -> RequestTracer:
    return RequestTracer(
        starvation_limits_s=_starvation_limits_s(policy),
        provider_name=None if policy.engine is NoEngine else policy.engine.name,
        find_links=waits.ended,
        served_by="engine" if controller.is_proxied else "app",
        writes_usage=_WRITES_USAGE[policy.usage_in_traces],
        long_waits=long_waits,
    )


def _place(pool: Pool, tiers: Sequence[str], record: RequestRecord) -> int | None:
    """How many requests are before one that waits, as its client is told; not known once it was preempted."""
    mark = None if record.queued is None else record.queued.mark
    if mark is None or record.tier not in tiers:
        return None
    return pool.standing(tiers.index(record.tier), QueueMark(*mark)).ahead


def _measured(policy: Policy) -> Sequence[str]:
    """The tiers whose service gain is measured."""
    return [tier.name for tier in policy.tiers if objective_of(tier) is not None]


def _engine_speeds(controller: AdmissionController) -> Sequence[EngineSpeedDocument]:
    return controller.gain.document().engines if controller.snapshot.objectives else ()


def _engine_view(controller: AdmissionController) -> EngineView | None:
    watch = controller.engine_watch
    return None if watch.up is None else EngineView(watch.state.value, watch.reason or "", watch.for_s)


def _has_budgets(policy: Policy) -> bool:
    return any(tenant.limits.have_budgets for tenant in policy.named.values())


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


WITHIN_S = 0.5
"""Longest wait of an exporter for a busy event loop; then it uses the last sample: the loop may be waiting for it."""


class PoolSampler:
    """Takes a `PoolSample` in the pool's event loop, from any thread. It is `metrics.Sample`.

    It is a listener: each request says which loop that is. `policy` is the one in force, `rejected` how
    many changed ones could not be used so far, `generations` how many different ones the pool's replicas run,
    `aborting` the requests and tokens that are held for requests that have ended, `engine_up` whether the engine can be
    used (1, 0, or None where that is not known), `oldest` the pool's oldest waits, `engines` those of a pool of
    several, `lease_sizes` the leases by engine where output lengths are learned, `engine_speeds` the engines' speeds
    where service gain is measured, `loop_blocked_s` for how long the event loop stood still.
    """

    def __init__(
        self,
        pool: Pool,
        policy: Callable[[], Policy],
        rejected: Callable[[], int] = lambda: 0,
        generations: Callable[[], int] = lambda: 1,
        aborting: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        engine_up: Callable[[], int | None] = lambda: None,
        oldest: Callable[[], Sequence[Grant | None]] | None = None,
        engines: Callable[[], Sequence[EngineDocument]] = tuple,
        lease_sizes: Callable[[], Sequence[EngineSizesDocument]] = tuple,
        engine_speeds: Callable[[], Sequence[EngineSpeedDocument]] = tuple,
        loop_blocked_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._rejected = rejected
        self._generations = generations
        self._aborting = aborting
        self._engine_up = engine_up
        self._oldest = pool.oldest if oldest is None else oldest
        self._engines = engines
        self._lease_sizes = lease_sizes
        self._engine_speeds = engine_speeds
        self._loop_blocked_s = loop_blocked_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._latest: PoolSample | None = None
        self.handlers: EventHandlers = {Received: self._note_loop}

    def _note_loop(self, _: RequestRecord, __: Received) -> None:
        """The event loop that serves requests; it stays until it is closed."""
        if self._loop is None or self._loop.is_closed():
            self._loop = _running_loop()

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
        policy = self._policy()
        state: Mapping[str, Any] = self._pool.state()
        tiers = zip(policy.tiers, state["tiers"], self._oldest(), strict=True)
        aborting_requests, aborting_tokens = self._aborting()
        self._latest = PoolSample(
            tiers=[_tier_sample(*tier) for tier in tiers],
            generation=policy.generation,
            capacity_tokens=state["capacity"]["tokens"],
            capacity_requests=state["capacity"]["requests"],
            replicas=state.get("store", {}).get("replicas"),
            policies_rejected=self._rejected(),
            passing=int(policy.mode is Mode.PASS),
            loop_blocked_s=self._loop_blocked_s(),
            generations=self._generations() if "store" in state else None,
            aborting_requests=aborting_requests,
            aborting_tokens=aborting_tokens,
            engine_up=self._engine_up(),
            engines=engine_samples(self._engines()),
            no_engine_fits_s=state.get("no_engine_fits_s"),
            lease_sizes=[_lease_size_sample(sizes) for sizes in self._lease_sizes()],
            engine_speeds=[_engine_speed_sample(speed) for speed in self._engine_speeds()],
        )
        return self._latest


def _lease_size_sample(sizes: EngineSizesDocument) -> LeaseSizeSample:
    return LeaseSizeSample(
        engine=sizes.engine,
        held_tokens=sizes.held_tokens,
        expected_tokens=sizes.expected_tokens,
        used_tokens=sizes.used_tokens,
        overlap=sizes.overlap,
        quantile=sizes.quantile,
        is_raised=int(sizes.is_raised),
        preemptions=sizes.preemptions,
    )


def _engine_speed_sample(speed: EngineSpeedDocument) -> EngineSpeedSample:
    return EngineSpeedSample(
        engine=speed.engine,
        prefill_token_s=speed.prefill_ns / 1e9,
        output_token_s=speed.output_ns / 1e9,
        between_tokens_s=speed.token_us / 1e6,
        first_error=speed.first_error,
        token_error=speed.token_error,
    )


def engine_samples(rows: Sequence[EngineDocument]) -> Sequence[EngineSample]:
    """One for each name: the latest incarnation, with what earlier ones still hold. Those that are gone come last."""
    by_name: dict[str, list[EngineDocument]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    found = [_engine_sample(same) for same in by_name.values()]
    return sorted(found, key=lambda sample: sample.state == "gone")


def _engine_sample(same: Sequence[EngineDocument]) -> EngineSample:
    latest = same[-1]
    capacity = latest.capacity
    return EngineSample(
        name=latest.name,
        state=latest.state,
        capacity_tokens=None if capacity is None else capacity.tokens,
        capacity_requests=None if capacity is None else capacity.requests,
        held_tokens=sum(row.held.tokens or 0 for row in same),
        held_requests=sum(row.held.requests or 0 for row in same),
        unprefilled_tokens=sum(row.unprefilled_tokens for row in same),
        claims=latest.claims,
        in_flight=sum(row.in_flight for row in same),
        prompt_tokens=latest.prompt_tokens,
        predicted_tokens=latest.predicted_tokens,
        measured_tokens=latest.measured_tokens,
        ejections=latest.ejections,
        replays=latest.replays,
    )


def _tier_sample(tier: Tier, state: Mapping[str, Any], oldest: Grant | None) -> TierSample:
    amounts = {f"{part}_{name}": state[part][name] for part in _PARTS for name in ("tokens", "requests")}
    return TierSample(
        tier=tier.name,
        oldest_wait_s=0.0 if oldest is None else oldest.queue_wait_us / 1e6,
        longest_starvation_s=0.0 if oldest is None else oldest.starvation_us / 1e6,
        borrowed_tokens=state["borrowed"],
        lent_tokens=state["lent"],
        slo_ttft_s=tier.slo.ttft_s,
        slo_queue_wait_s=tier.slo.queue_wait_s,
        slo_starvation_s=tier.slo.starvation_s,
        **amounts,
    )


_PARTS = ("queued", "held", "reserve", "limit")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
