"""Overview builder: one document of the pool's sums, this process's figures, and what waits in all replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sidecar.cluster.document import Overview, RefusalView, TenantView, TierShare, TierView, TierWaits
from sidecar.cluster.dry_run import ObservedReport, observed_report
from sidecar.cluster.phrases import (
    as_guarded,
    crowd,
    engine_headline,
    headline,
    sentence_for,
    starving,
    waits_at_its_limit,
)
from sidecar.cluster.report import (
    EngineLists,
    GuardHistory,
    PeerReports,
    ReceivedReport,
    ReplicaReport,
    engine_reports,
    engine_rows,
    is_alone,
    pack,
    read_peers,
    replica_views,
    sum_waits,
    tier_shares,
    tier_waits,
)
from sidecar.cluster.sampler import Sources
from sidecar.engines.view import Amount
from sidecar.events import Refused
from sidecar.policy.choices import Mode
from sidecar.pools import StoreError
from sidecar.pools.stats import SmoothedDemand
from sidecar.tasks import end, is_set_within
from sidecar.telemetry.request_record import RequestRecord

SHARE_EVERY_S = 2.0
RETRY_S = 0.5
"""While the store is not there: its return, and the very start, are noticed sooner."""
FORGET_AFTER_S = 10.0
"""Age of a replica's last report at which it is shown no longer. The pool takes it for dead, too."""
FRESH_S = 0.5
"""Age up to which callers get the same document, so that the cost does not grow with the viewers."""

LASTING_S = 5.0
"""Two reports of another replica, which come every two seconds, and some time on the way."""

_log = logging.getLogger("sidecar.cluster")


class Generations:
    """The policy that each other replica runs, and since when it differs from this process's.

    A roll-out changes replicas one after the other, and a report is a few seconds old. So a difference becomes a notice
    only when it lasts longer than that takes. The list of replicas shows it at once. Times are seconds on one calendar,
    `at_s` is now.
    """

    def __init__(self) -> None:
        self._others: dict[str, ReplicaReport] = {}
        self._differs: dict[str, tuple[str, str, float]] = {}  # replica -> both generations, and since when

    def compare(self, reports: Iterable[ReplicaReport], own: str, at_s: float) -> None:
        """The other replicas that are there, as they are now, without those that do not say what they run."""
        self._others = {report.replica: report for report in reports if report.generation}
        differs: dict[str, tuple[str, str, float]] = {}
        for replica, report in self._others.items():
            theirs, before = report.generation, self._differs.get(replica)
            if theirs != own:
                is_as_before = before is not None and before[:2] == (theirs, own)
                differs[replica] = before if before and is_as_before else (theirs, own, at_s)
        self._differs = differs

    def count(self, own: str) -> int:
        """How many different ones there are, `own` among them."""
        return len({own, *(report.generation for report in self._others.values())})

    def running(self, replica: str, own: str) -> Mapping[str, Sequence[str]]:
        """The replicas by what they run, `replica` itself among them."""
        found: dict[str, list[str]] = {own: [replica]}
        for name, report in sorted(self._others.items()):
            found.setdefault(report.generation, []).append(name)
        return found

    def notices(self, own: str, at_s: float) -> list[str]:
        """Differences that last, in a sentence for each generation that is not `own`."""
        lasting: dict[str, list[tuple[str, float]]] = {}
        for replica, (theirs, ours, since_s) in self._differs.items():
            if ours == own and at_s - since_s >= LASTING_S:
                lasting.setdefault(theirs, []).append((replica, at_s - since_s))
        return [self._notice(theirs, own, replicas) for theirs, replicas in sorted(lasting.items())]

    def _notice(self, theirs: str, own: str, replicas: Sequence[tuple[str, float]]) -> str:
        (first, _), *more = replicas
        who = f"replica {first[:8]} on {self._others[first].host}"
        verb = "runs" if not more else f"and {len(more)} more run"
        for_s = max(lasting_s for _, lasting_s in replicas)
        return f"{who} {verb} policy generation {theirs}, this one {own}, for {for_s:.0f} s"


MOST_TENANTS, MOST_REFUSALS, MOST_MESSAGE = 10, 20, 400
MOST_OBSERVED_TENANTS = 20


class PoolOverview:
    """Overview for the pages of the admin port. Use it from one event loop; it costs nothing per request.

    `open` begins to report to the other replicas every two seconds; `close` ends it. Without them
    it still answers, for this process alone. `generations` gets the policies that the others run; `now_s` is the
    calendar's clock.
    """

    def __init__(
        self, sources: Sources, now_s: Callable[[], float] = time.time, generations: Generations | None = None
    ) -> None:
        self._sources = sources
        self._generations = Generations() if generations is None else generations
        self._now_s = now_s
        self._news = asyncio.Event()
        self._engine_lists = EngineLists()
        self._guards = GuardHistory()
        self._demand = SmoothedDemand()
        self._wanted: float | None = None
        self._host = socket.gethostname()
        self._peers = PeerReports()
        self._trouble: str | None = None
        self._made: Overview | None = None
        self._sharing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begins. The server's start calls it."""
        if self._sharing is None:
            self._news = asyncio.Event()
            self._sharing = asyncio.get_running_loop().create_task(self._keep_sharing(), name="sidecar live")

    async def close(self) -> None:
        """Ends. The server's end calls it, before the pool's."""
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            await end(sharing)

    def share_now(self) -> None:
        """Reports to the other replicas at once. The next caller gets a new document."""
        self._made = None
        self._news.set()

    def notices(self) -> list[str]:
        """Notices for the operator about the other replicas."""
        at_s = self._now_s()
        return [*self._generations.notices(self._sources.policy().generation, at_s), *self._engine_lists.notices(at_s)]

    def generations(self) -> Mapping[str, Sequence[str]]:
        """The replicas of a shared pool by the generation of their policy; empty for a pool of one process."""
        state: Mapping[str, Any] = self._sources.pool.state()
        if "store" not in state:
            return {}
        return self._generations.running(state["store"]["replica"], self._sources.policy().generation)

    def overview(self) -> Overview:
        """The pool as it stands, at most half a second old."""
        at_s = self._now_s()
        if self._made is None or not 0 <= at_s - self._made.at_s < FRESH_S:
            self._made = self._overview(at_s)
        return self._made

    def wanted(self) -> float | None:
        """How many times the room of the pool's ready engines is wanted, smoothed. Asked for at each report, too.

        None while all requests pass: they take no room that is counted. While the store does not answer, as it was.
        """
        policy = self._sources.policy()
        if policy.mode is Mode.PASS:
            return None
        others = [it.report for it in self._others(self._now_s()) if it.report.mode == policy.mode.value]
        queued = [sum_waits(tier.name, others).queued for tier in policy.tiers]
        demand = self._sources.pool.demand([(it.tokens or 0, it.requests or 0) for it in queued])
        if demand is not None:
            self._wanted = self._demand.note(demand, self._sources.pool.now_us())
        return self._wanted

    def observed(self) -> ObservedReport:
        """The dry-run report of this process."""
        at_s = self._now_s()
        report = self._own(self._sources.pool.state(), at_s)
        return self._report_observed(report.replica, self._others(at_s), at_s)

    def _report_observed(self, replica: str, others: Iterable[ReceivedReport], at_s: float) -> ObservedReport:
        period = self._sources.observed(MOST_OBSERVED_TENANTS)
        not_counted = [it.report.replica for it in others if it.report.mode == Mode.OBSERVE.value]
        policy, guards = self._sources.policy(), self._sources.pool.guards()
        return observed_report(policy, period, replica, not_counted, at_s, guards)

    def _overview(self, at_s: float) -> Overview:
        sources, policy = self._sources, self._sources.policy()
        state: Mapping[str, Any] = sources.pool.state()
        own, mode = self._own(state, at_s), policy.mode
        # Without the store, `state` is this replica's own, and so is all the rest. The pool's notices say so.
        others = [] if is_alone(state) else self._others(at_s)
        trouble = [self._trouble] if self._trouble and not is_alone(state) else []
        unreadable = [] if is_alone(state) else [_unreadable(name) for name in self._peers.unreadable]
        # The waits of a replica that observes are those of shadow requests: they are not shown beside real ones.
        alike = [own, *(it.report for it in others if it.report.mode == mode.value)]
        tiers = [self._tier(share, sum_waits(share.tier, alike), at_s) for share in tier_shares(policy, state)]
        tenants, replicas = self._tenants(), replica_views([ReceivedReport(own, 0.0), *others])
        without_engine = engine_headline(replicas, sum(tier.queued.requests or 0 for tier in tiers), mode)
        sentence = headline(tiers, is_alone=not others) + crowd(tenants, is_alone=not others)
        capacity = Amount(**state["capacity"])
        held = Amount(sum(it.held.tokens or 0 for it in tiers), sum(it.held.requests or 0 for it in tiers))
        return Overview(
            replica=own.replica,
            pool=policy.pool,
            engine=policy.engine.name,
            generation=policy.generation,
            at_s=round(at_s, 3),
            mode="shared" if "store" in state else "local",
            starving=starving(tiers),
            headline=without_engine or sentence_for(mode, sentence),
            lacks_engine=without_engine is not None,
            capacity=capacity,
            held=held,
            free=_free(capacity, held),
            tiers=tiers,
            tenants=tenants[:MOST_TENANTS],
            refusals=[_refusal(record, own.replica) for record in sources.refusals(MOST_REFUSALS)],
            replicas=replicas,
            store=dict(state["store"]) if "store" in state else None,
            notices=[*sources.notices(), *self._doubts(own.replica, others, at_s), *trouble, *unreadable],
            engines=engine_rows(sources.engines() or (), [it.report for it in others]),
            lease_sizes=list(sources.lease_sizes()),
            engine_speeds=list(sources.engine_speeds()),
        )

    def _own(self, state: Mapping[str, Any], at_s: float) -> ReplicaReport:
        """The report of this process; `state` is its pool's."""
        sources, policy = self._sources, self._sources.policy()
        self._guards.note(tier_shares(policy, state), at_s)
        replica = state["store"]["replica"] if "store" in state else str(os.getpid())
        counts = state["store"]["own"] if "store" in state else state
        tiers = []
        for waits in tier_waits(state, sources.oldest(), replica):
            if waits.oldest is not None:  # a wait shows in the tier's last minutes before it has ended
                sources.recent.waits(waits.tier, at_s, waits.oldest.wait_s, waits.oldest.starvation_s)
            is_at_limit = waits_at_its_limit(sources.recent.read(waits.tier, at_s).overtaken_by)
            tiers.append(msgspec.structs.replace(waits, is_at_limit=is_at_limit))
        return ReplicaReport(
            replica,
            self._host,
            counts["leases"],
            counts["waiting"],
            generation=policy.generation,
            mode=policy.mode.value,
            engine=sources.engine(),
            engines=engine_reports(sources.engines()),
            tiers=tiers,
        )

    def _tier(self, share: TierShare, waits: TierWaits, at_s: float) -> TierView:
        level = self._sources.policy().level_for(share.tier)
        assert level is not None
        lately = self._sources.recent.read(share.tier, at_s)
        overtaken_by = dict(sorted(lately.overtaken_by.items(), key=lambda pair: -pair[1].requests))
        return TierView(
            **{name: getattr(share, name) for name in TierShare.__struct_fields__},
            level=level,
            queued=waits.queued,
            oldest=waits.oldest,
            recent=lately.buckets,
            overtaken_by=overtaken_by,
            is_at_limit=waits.is_at_limit,
            guarded=self._describe_guard(share),
        )

    def _describe_guard(self, share: TierShare) -> str:
        if share.guard is None or share.slo.hold is None or self._sources.policy().mode is not Mode.ENFORCE:
            return ""
        return as_guarded(share.guard, share.slo.hold, *self._guards.lately(share))

    def _tenants(self) -> list[TenantView]:
        """Tenants that hold most here, then those with most waiting."""
        found = [TenantView(name, *holding) for name, holding in self._sources.tenants().items()]
        return sorted(found, key=lambda one: (-one.tokens_held, -one.waiting, one.tenant))

    def _doubts(self, replica: str, others: Iterable[ReceivedReport], at_s: float) -> list[str]:
        """Why the figures of the dry run are not to be trusted; empty where they are, or where nothing is observed."""
        if self._sources.policy().mode is not Mode.OBSERVE:
            return []
        report = self._report_observed(replica, others, at_s)
        return [f"the dry run is not to be trusted at this load: {doubt.reason}" for doubt in report.doubts]

    def _others(self, at_s: float) -> list[ReceivedReport]:
        return self._peers.recent(at_s, FORGET_AFTER_S)

    async def _keep_sharing(self) -> None:
        while True:
            try:
                is_shared = await self._share()
                self.wanted()
            except Exception:
                is_shared = False
                self._report_defect()
            await is_set_within(self._news, SHARE_EVERY_S if is_shared else RETRY_S)

    async def _share(self) -> bool:
        """Sends this replica's report and reads the others'. False where the store cannot be reached."""
        self._news.clear()
        report = self._own(self._sources.pool.state(), self._now_s())
        try:
            peers = await self._sources.pool.share(pack(report))
        except StoreError as reason:
            is_shown = is_alone(self._sources.pool.state())
            self._trouble = None if is_shown else f"the other replicas are not shown: {reason}"
            self._compare(report)
            return False
        self._peers, self._trouble = read_peers(peers, self._now_s()), None
        self._compare(report)
        return True

    def _compare(self, own: ReplicaReport) -> None:
        """Notes what the others run, those that are still there."""
        at_s = self._now_s()
        reports = [one.report for one in self._others(at_s)]
        self._generations.compare(reports, self._sources.policy().generation, at_s)
        self._engine_lists.compare(reports, own, at_s)

    def _report_defect(self) -> None:
        """Logs the exception being handled, once for as long as it lasts."""
        trouble = "the other replicas are not shown: a defect, see the log"
        if self._trouble != trouble:
            _log.exception("a defect in the sidecar; the other replicas' figures are not shown")
        self._trouble = trouble


def _unreadable(replica: str) -> str:
    return f"replica {replica} is not shown: its version of the sidecar is another"


def _free(capacity: Amount, held: Amount) -> Amount:
    """The free amount; a pool that shrank may hold more than it has."""
    pairs = ((capacity.tokens, held.tokens), (capacity.requests, held.requests))
    return Amount(*(None if most is None else max(0, most - (used or 0)) for most, used in pairs))


def _refusal(record: RequestRecord, replica: str) -> RefusalView:
    refused = record.refused or _failure(record)
    return RefusalView(
        at_s=record.wall_s(refused.at_us),
        tier=record.tier,
        tenant=record.tenant,
        code=refused.code,
        status=refused.status,
        message=refused.message[:MOST_MESSAGE],
        request_id=record.request_id,
        waited_s=refused.queue_wait_us / 1e6,
        replica=replica,
        preempted=record.preemptions,
        key=record.key,
    )


def _failure(record: RequestRecord) -> Refused:
    """The proxy's answer to a request that the engine failed, after its wait."""
    settled, admitted = record.settled, record.admitted
    assert settled is not None
    wait_us = 0 if admitted is None else admitted.queue_wait_us
    return Refused(settled.at_us, settled.error or "", settled.message or "", settled.status, wait_us)
