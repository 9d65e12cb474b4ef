"""Admission controller: everything that the requests of one process share. It holds nothing of a single request."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.types import ASGIApp, Scope

from sidecar.admission.attempt import EngineRouting
from sidecar.admission.background import BackgroundResponses
from sidecar.admission.dry_run.engine_times import EngineTimes, Room
from sidecar.admission.dry_run.shadow import ShadowRegistry
from sidecar.admission.engine_pages import EnginePages
from sidecar.admission.intake import SizedRequest
from sidecar.admission.pending_aborts import PendingAborts
from sidecar.admission.policy_snapshot import PolicySnapshot, policy_snapshot
from sidecar.admission.request_gain import GainMeter
from sidecar.admission.slo import GuardWatch
from sidecar.admission.watchdog import Watchdog
from sidecar.engines.base import Engine
from sidecar.engines.discovery import is_engine_server
from sidecar.engines.view import PoolEngines
from sidecar.engines.watch import EngineCheck, EngineHealth, EngineWatch
from sidecar.events import ObservedObserver, Observer, UnguardedObserver
from sidecar.identity.tokens import Identities
from sidecar.lengths.estimator import LengthEstimator
from sidecar.lengths.histogram import OutputRatios
from sidecar.lengths.lease_size import LeaseSizes
from sidecar.lengths.token_estimates import Estimator
from sidecar.policy.choices import Mode, Unguarded
from sidecar.policy.model import Policy
from sidecar.pools import Pool
from sidecar.tenants.tenant_usage import TenantUsage
from sidecar.version import version_document

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

LONGEST_INTERVAL_S = 1.0
"""The longest interval of the watchdog: a body's timeout or a disconnect may be noticed so much later."""
SHORTEST_INTERVAL_S = 0.05
SOONEST_MISS_S = 0.25
"""The shortest interval at which a guarded tier's requests are looked at for a first token that is overdue."""
REFUSED_BEFORE_END_S = 1.0
"""Enough to answer thousands of requests that wait."""
DRY_RUN_DRAIN_S = 5.0
"""How long the dry run still takes requests while it drains: until load balancers have noticed."""
_UVICORN_CUTS = "Task cancelled, timeout graceful shutdown exceeded"
"""Uvicorn's message when it cancels the requests that outlast its grace (`server.py`, 0.22 to 0.54)."""
OBSERVES = "mode: observe: requests pass at once, the pool shows what enforcing would do"
PASSES = "mode: pass: every request passes untouched; nothing is checked, held, counted or limited"
KEEPS_ROOM = (
    "preemptible: requests of %s keep their room until they end, because the app's handlers would run a second time; "
    "AdmissionMiddleware(..., retry_handlers=True) says that they may"
)

_log = logging.getLogger("sidecar.policy")
_unguarded_log = logging.getLogger("sidecar.unguarded")


class Monitor:
    """A monitor of a controller: it observes requests, follows the policy, and adds to the state and the notices.

    This one has observers alone: `observed` gets the requests that pass in `mode: observe`, `unguarded` those on paths
    that the policy does not guard. The server's start and end call `open` and `close`; `routes` are for the admin port.
    """

    def __init__(
        self,
        observer: Observer | None = None,
        observed: ObservedObserver | None = None,
        unguarded: UnguardedObserver | None = None,
    ) -> None:
        self.observer, self.observed, self.unguarded = observer, observed, unguarded
        self.routes: Sequence[BaseRoute] = ()

    async def open(self) -> None:
        """Begins to look."""

    async def close(self) -> None:
        """Ends that."""

    def change_policy(self, policy: Policy) -> None:
        """The controller uses another policy from now on."""

    def notices(self) -> Sequence[str]:
        """See `AdmissionController.notices`."""
        return ()

    def generations(self) -> Mapping[str, Sequence[str]]:
        """The pool's replicas by the generation of their policy; empty where the pool is not shared."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The collaborators of a controller, all of them there before it.

    `app` serves the requests. It is a reverse proxy where it `is_proxied`, and the engine another process. `repeats`
    says that it may be called twice for one request, the first time being preempted. `engine_key` is the engine's own
    API key: it replaces the tenant's. `unguarded` applies to other paths where the policy does not say; None lets the
    app decide, at its first request. `engine_watch` knows whether the engine can be used; None: it always can.
    `routing` is there where the pool has several engines, behind the app, and `engines` shows them. `pages` are those
    of an app in this process, to be told of the first scope. `usage` counts what the tenants use, None where that is
    not kept. `watchdog` and `identities` may be those of several controllers; both use the same keys of an issuer then.
    `monitor` makes the controller's monitor.
    """

    app: ASGIApp
    pool: Pool
    dialect: Engine
    estimator: Estimator
    is_proxied: bool = False
    repeats: bool = True
    engine_key: str | None = None
    unguarded: Unguarded | None = Unguarded.GENERATING
    engine_watch: EngineHealth | None = None
    routing: EngineRouting | None = None
    engines: PoolEngines | None = None
    pages: EnginePages | None = None
    usage: TenantUsage | None = None
    watchdog: Watchdog = field(default_factory=Watchdog)
    identities: Identities = field(default_factory=Identities)
    monitor: Callable[[AdmissionController], Monitor] = lambda _: Monitor()


class AdmissionController:
    """Decides on requests to the app of its services, by a policy that may change.

    Nothing is set on it from outside. What changes while it serves has a method: the policy, the app, the drain, the
    server's lifespan. `server` is the task of that lifespan, None before it begins. `self_views` are what tenants were
    last shown of themselves, by name and level, and when (`self_view`). `controllers` are those of models that have
    pools of their own, behind this one, and `counts_apart` says that each counts the tenants' limits by itself.
    """

    controllers: Mapping[str, AdmissionController] = MappingProxyType({})
    counts_apart: bool = False

    def __init__(self, services: Services, policy: Policy) -> None:
        self.app = services.app
        pool = services.pool
        self.pool: Final = pool
        self.engine_watch: Final = services.engine_watch or EngineWatch(
            EnginePages(services.app), policy.engine, check=EngineCheck.OFF
        )
        self.routing: Final = services.routing
        self.engines: Final = services.engines
        self.pages: Final = services.pages
        self.usage: Final = services.usage
        self.engine_key: Final = None if services.engine_key is None else services.engine_key.encode("ascii")
        self.is_proxied: Final = services.is_proxied
        self._repeats = services.repeats
        self._reported_unpreempted: Sequence[str] = ()
        self.identities: Final = services.identities
        self.dialect: Final = services.dialect
        self.estimator: Final = services.estimator
        self.output_ratios: Final = OutputRatios()
        self.snapshot = self._new_snapshot(policy)
        self.lease_sizes: Final = LeaseSizes(
            policy.learn, pool.now_us, LengthEstimator(), lambda: self._room().replicas
        )
        self.gain: Final = GainMeter(pool.now_us, self.lease_sizes, lambda: self._room().replicas, pool.note_slo)
        self._unguarded = services.unguarded
        self._followers: list[Callable[[], None]] = []
        self.background: Final = BackgroundResponses()
        self.shadows: Final = ShadowRegistry()
        self.engine_times: Final = EngineTimes(self._room)
        self.pending_aborts: Final = PendingAborts(pool.now_us)
        self.watchdog: Final = services.watchdog
        self.watchdog.interval_s = _interval_s(policy)
        self._guard_watch = GuardWatch(pool, lambda: not self.passes_all)
        self.watchdog.on_armed += [self.pending_aborts.follow, self._guard_watch.look]
        self.is_draining = False
        self.self_views: Final[dict[tuple[str, int], tuple[int, bytes]]] = {}
        self.server: asyncio.Task[object] | None = None
        self.engine_watch.on_change.append(self._pause_without_engine)
        self.monitor: Final = services.monitor(self)
        self.observer: Final = self._observer(self.monitor)

    @property
    def policy(self) -> Policy:
        """The policy of new requests."""
        return self.snapshot.policy

    def controller_for(self, request: SizedRequest) -> AdmissionController:  # noqa: ARG002  # a front of models asks it
        """The controller of the pool that a request enters: this one."""
        return self

    @property
    def is_observing(self) -> bool:
        """True if new requests pass, and the pool shows what enforcing would do with them (`mode: observe`)."""
        return self.snapshot.is_observing

    @property
    def is_passing(self) -> bool:
        """True if new requests pass, and those that wait leave the queue and pass, too (`mode: pass`)."""
        return self.snapshot.is_passing

    @property
    def passes_all(self) -> bool:
        """True if new requests pass, whatever the policy would do with them."""
        return self.snapshot.policy.mode is not Mode.ENFORCE

    def change_policy(self, policy: Policy) -> None:
        """Uses another policy from the next request on. Requests under way keep the policy that they came under.

        `policy.diff.needs_restart` says why one cannot replace another. Raises, and changes nothing, where this one
        cannot; but `mode: pass` is in force in any case.
        """
        was_observing, was_passing = (self.is_observing, self.policy.generation), self.is_passing
        snapshot = self._new_snapshot(policy)
        if snapshot.is_passing:  # first, so that nothing that fails here keeps requests from passing
            self.snapshot = snapshot
            self.watchdog.give_up()
        if self.routing is not None:
            self.routing.change_policy(policy)
        self.pool.change_policy(policy)
        self.lease_sizes.change_learn(policy.learn)
        self.snapshot = snapshot
        self.watchdog.interval_s = _interval_s(policy)
        if not self.is_observing:
            self.shadows.end_unreal()
        elif was_observing != (True, policy.generation):
            self.engine_times.begin_period(self.pool.now_us())
        if self.usage is not None:
            self.usage.change_policy(policy)
        self.monitor.change_policy(policy)
        self.report_passing(was_passing=was_passing)
        for follow in self._followers:
            follow()

    def call_at_change(self, follow: Callable[[], None]) -> None:
        """Calls a function after every change of the policy."""
        self._followers.append(follow)

    def use_app(self, app: ASGIApp) -> None:
        """Sends new requests to another app: one that stands for those of several middlewares."""
        self.app = app

    def begin_lifespan(self) -> None:
        """The server's lifespan begins in this task."""
        if self.server is None or self.server.done():
            self.server = asyncio.current_task()

    def unguarded_mode(self, scope: Scope) -> Unguarded:
        """The treatment of unguarded paths: the policy's, or else the one that fits the app."""
        chosen = self.policy.unguarded
        if chosen is not None:
            return chosen
        if self._unguarded is None:
            is_engines = is_engine_server(scope.get("app"))
            self._unguarded = Unguarded.DENY if is_engines else Unguarded.GENERATING
            what = "an engine's own server" if is_engines else "an app with routes of its own"
            message = "unguarded: %s, because the policy does not say otherwise, and this is %s"
            _unguarded_log.info(message, self._unguarded.value, what, extra={"event": "unguarded"})
        return self._unguarded

    def report_passing(self, *, was_passing: bool) -> None:
        """Logs that every request passes from now on, or no longer does."""
        if self.is_passing != was_passing:
            text = PASSES if self.is_passing else f"mode: {self.policy.mode.value}: requests no longer pass untouched"
            _log.warning("%s", text, extra={"event": "passing" if self.is_passing else "passing_ended"})

    def report_unpreempted(self) -> None:
        """Logs which tiers are preemptible by the policy, and keep their room in this app. An engine's own server may
        be called twice for one request: it ends the first call, and does nothing else for its client.
        """
        host = None if self.pages is None else self.pages.host
        if self._unpreempted() and is_engine_server(host):
            self._repeats = True
            self.snapshot = self._new_snapshot(self.policy)
        names, reported = self._unpreempted(), self._reported_unpreempted
        self._reported_unpreempted = names
        if names and names != reported and not self.is_passing:
            _log.warning(KEEPS_ROOM, ", ".join(names), extra={"event": "not_preempted"})

    def _unpreempted(self) -> Sequence[str]:
        rules, repeats = self.policy.rules, self._repeats
        return [tier.name for tier in self.policy.tiers if rules.is_preemptible(tier.level) and not repeats]

    def _observer(self, monitor: Monitor) -> Observer | None:
        return monitor.observer

    def _new_snapshot(self, policy: Policy) -> PolicySnapshot:
        tokens = self.identities.verifier(policy.jwt)
        return policy_snapshot(
            policy,
            self.dialect,
            self.estimator,
            self.engine_key,
            is_proxied=self.is_proxied,
            repeats=self._repeats,
            tokens=tokens,
        )

    def _room(self) -> Room:
        """The pool's size, for the dry run."""
        state: Mapping[str, Any] = self.pool.state()
        replicas = state["store"].get("replicas") if "store" in state else None
        return Room(state["capacity"]["tokens"], state["capacity"]["requests"], replicas or 1)

    def drain(self, within_s: float | None = None) -> None:
        """Refuses every new request from now on; requests that wait or run are served to their end.

        With `within_s` the requests that still wait shortly before that time are refused: else the server would cut
        them. The dry run refuses no request: it only reports that it is not ready.
        """
        self.is_draining = True
        if within_s is not None:
            left_s = max(within_s / 2, within_s - REFUSED_BEFORE_END_S)
            asyncio.get_running_loop().call_later(left_s, self.watchdog.give_up)

    def _pause_without_engine(self) -> None:
        """Called at each change of the engine's state. In the dry run the pool shows what enforcing would do."""
        watch = self.engine_watch
        self.gain.engine_changed(is_usable=watch.is_usable)
        self.pool.pause(None if watch.is_usable else f"no request can be sent to the engine: {watch.reason}")

    def is_stopping(self, canceled: asyncio.CancelledError) -> bool:
        """True if a request was canceled because the server stops, and not by an app around the middleware.

        A server that is not ours ends its lifespan before its last requests, or cancels both, or says what it does.
        Python 3.10 does not report that a task is being canceled: there the answer is no, and the server answers 500.
        """
        if self.is_draining or _UVICORN_CUTS in canceled.args:
            return True
        server = self.server
        return server is not None and (server.done() or (sys.version_info >= (3, 11) and server.cancelling() > 0))

    async def drained(self) -> None:
        """Returns when no request is under way; where every request passes after `DRY_RUN_DRAIN_S` at the latest.

        The server then closes its port and serves running requests to their end.
        """
        if not self.passes_all:
            await self.watchdog.emptied()
            await self.background.emptied()
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.watchdog.emptied(), DRY_RUN_DRAIN_S)

    @property
    def under_way(self) -> int:
        """The number of requests that wait, are served, or run on in the background."""
        return len(self.watchdog) + len(self.background)

    def readiness(self) -> Sequence[str]:
        """Reasons why this process should get no traffic; empty when it should.

        Where every request passes, the states of the engine and of the store are notices.
        """
        return [*(["draining"] if self.is_draining else []), *(() if self.passes_all else self.not_ready())]

    def mode_notice(self) -> str:
        """Where every request passes: how."""
        return PASSES if self.is_passing else OBSERVES

    def not_ready(self) -> Sequence[str]:
        """Why no request can be served now by the policy; empty where they can."""
        return [*self.engine_watch.readiness(), *self.pool.readiness()]

    def notices(self) -> Sequence[str]:
        """Problems that do not keep this process from serving."""
        return [
            *([self.mode_notice(), *self.not_ready()] if self.passes_all else []),
            *self.engine_watch.notices(),
            *self.pool.notices(),
            *self._guard_watch.notices(),
            *self.identities.notices(),
            *self.monitor.notices(),
        ]

    def state(self) -> Mapping[str, object]:
        """The controller's state, for people and dashboards: JSON types only."""
        generations, hours = self.monitor.generations(), self.policy.as_written.hours_at(time.time())
        of_policy = {"generation": self.policy.generation, "engine": self.policy.engine.name}
        return {
            "version": version_document(),
            "policy": {**of_policy, **({} if hours is None else {"hours": hours._asdict()})},
            "mode": self.policy.mode.value,
            "engine": self.engine_watch.document(),
            "draining": self.is_draining,
            "under_way": self.under_way,
            "shadows": len(self.shadows),
            "aborting": self.pending_aborts.held()._asdict(),
            "background": len(self.background),
            "pool": self.pool.state(),
            "lease_sizes": msgspec.to_builtins(self.lease_sizes.document()),
            **({"gain": msgspec.to_builtins(self.gain.document())} if self.snapshot.objectives else {}),
            **({"generations": generations} if generations else {}),
        }


def _interval_s(policy: Policy) -> float:
    """The watchdog's interval for a policy, in seconds."""
    of_engine = (tier.timeouts.shortest_s for tier in policy.tiers)
    guarded = (max(SOONEST_MISS_S, tier.slo.ttft_s) for tier in policy.tiers if tier.hold and tier.slo.ttft_s)
    shortest_s = min(LONGEST_INTERVAL_S, policy.body_timeout_s, policy.disconnect_grace_s, *of_engine, *guarded)
    return max(SHORTEST_INTERVAL_S, shortest_s)
