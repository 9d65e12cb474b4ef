"""Overview builder: one document of the whole pool, from this process's figures and the other replicas' reports."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sidecar.cluster import merge
from sidecar.cluster.document import Amount, Overview, Promised, TierView
from sidecar.cluster.dry_run import ObservedReport, observed_report
from sidecar.cluster.engine_speeds import engine_speed_rows
from sidecar.cluster.engines import EngineLists, engine_rows
from sidecar.cluster.learned_lengths import LengthExchange
from sidecar.cluster.lease_sizes import lease_size_rows
from sidecar.cluster.merge import ReceivedReport
from sidecar.cluster.phrases import crowd, engine_headline, headline, said_of, starving, waits_at_its_limit
from sidecar.cluster.pool_report import Heard, PoolMerge, heard
from sidecar.cluster.report import ReplicaReport, Sources, own_report, pack
from sidecar.events import StoreState
from sidecar.policy.model import Learn, Mode, Policy
from sidecar.pools import StoreError
from sidecar.tasks import end, is_set_within

SHARE_EVERY_S = 2.0
RETRY_S = 0.5
"""While the store is not there: its return, and the very start, are noticed sooner."""
FORGET_AFTER_S = 10.0
"""A replica that was not heard of for so long is dead to the pool, too."""
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

    def hear(self, reports: Iterable[ReplicaReport], own: str, at_s: float) -> None:
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


class PoolOverview:
    """Overview for the pages of the admin port. Use it from one event loop; it costs nothing per request.

    `open` begins to report to the other replicas every two seconds; `close` ends it. Without them
    it still answers, for this process alone. `generations` gets the policies that the others run, and `lengths` what
    they have learned of output lengths; `now_s` is the calendar's clock.
    """

    def __init__(
        self,
        sources: Sources,
        now_s: Callable[[], float] = time.time,
        generations: Generations | None = None,
        lengths: LengthExchange | None = None,
    ) -> None:
        self._sources = sources
        self._generations = Generations() if generations is None else generations
        self._lengths = lengths
        self._now_s = now_s
        self._news = asyncio.Event()
        self._engine_lists = EngineLists()
        self._host = socket.gethostname()
        self._heard = Heard()
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

    def observed(self) -> ObservedReport:
        """The dry-run report of all replicas that have reported."""
        at_s = self._now_s()
        report = self._own(self._sources.pool.state(), at_s)
        return observed_report(self._sources.policy(), self._all_heard(report, at_s), at_s)

    def _overview(self, at_s: float) -> Overview:
        state: Mapping[str, Any] = self._sources.pool.state()
        report = self._own(state, at_s)
        # Without the store, `state` is this replica's own, and so is all the rest. The pool's notices say so.
        trouble = [self._trouble] if self._trouble and not is_alone(state) else []
        all_heard = [ReceivedReport(report, 0.0)] if is_alone(state) else self._all_heard(report, at_s)
        unreadable = [] if is_alone(state) else [_unreadable(name) for name in self._heard.unreadable]
        policy = self._sources.policy()
        # The waits of a replica that observes are those of shadow requests: they are not shown beside real ones.
        alike = [one for one in all_heard if one.report.mode in ("", policy.mode.value)]
        tiers = [_tier(policy, tier, alike, at_s) for tier in state["tiers"]]
        tenants = merge.tenants(all_heard)
        replicas = merge.replicas(all_heard)
        without_engine = engine_headline(replicas, sum(tier.queued.requests or 0 for tier in tiers), policy.mode)
        capacity = Amount(**state["capacity"])
        held = Amount(*(sum(tier["held"][name] for tier in state["tiers"]) for name in ("tokens", "requests")))
        return Overview(
            replica=report.replica,
            pool=policy.pool,
            engine=policy.engine.name,
            generation=policy.generation,
            at_s=round(at_s, 3),
            mode="shared" if "store" in state else "local",
            starving=starving(tiers),
            headline=without_engine or said_of(policy.mode, headline(tiers) + crowd(tenants)),
            lacks_engine=without_engine is not None,
            capacity=capacity,
            held=held,
            free=_free(capacity, held),
            tiers=tiers,
            tenants=tenants,
            refusals=merge.refusals(all_heard),
            replicas=replicas,
            store=dict(state["store"]) if "store" in state else None,
            notices=[*self._sources.notices(), *_doubts(policy, all_heard, at_s), *trouble, *unreadable],
            engines=engine_rows(self._sources.engines() or (), all_heard[1:]),
            lease_sizes=lease_size_rows(one.report.lease_sizes for one in all_heard),
            engine_speeds=engine_speed_rows(one.report.engine_speeds for one in all_heard),
        )

    def _own(self, state: Mapping[str, Any], at_s: float) -> ReplicaReport:
        replica = state["store"]["replica"] if "store" in state else str(os.getpid())
        return own_report(self._sources, state, replica, self._host, at_s)

    def _all_heard(self, own: ReplicaReport, at_s: float) -> list[ReceivedReport]:
        """This replica's report first, and those of the others that are still there."""
        others = self._heard.still_there(at_s, FORGET_AFTER_S)
        return [ReceivedReport(self._heard.own(own) if others else own, 0.0), *others]

    async def _keep_sharing(self) -> None:
        while True:
            try:
                is_heard = await self._share()
            except Exception:
                is_heard = False
                self._report_defect()
            await is_set_within(self._news, SHARE_EVERY_S if is_heard else RETRY_S)

    async def _share(self) -> bool:
        """Sends this replica's report and reads the others'. False where the store cannot be reached."""
        self._news.clear()
        state: Mapping[str, Any] = self._sources.pool.state()
        report = self._own(state, self._now_s())
        try:
            packed = self._packed(report, is_heard="store" in state)
            peers = await self._sources.pool.share(packed, PoolMerge(report))
        except StoreError as reason:
            is_said = is_alone(self._sources.pool.state())
            self._trouble = None if is_said else f"the other replicas' waits and refusals are not shown: {reason}"
            self._hear(report)
            return False
        self._heard, self._trouble = heard(peers, but=report.replica, at_s=self._now_s()), None
        self._hear(report)
        if self._lengths is not None:  # not while the store is away: the others may be there all the same
            self._lengths.hear((one.report for one in self._heard.received), has_own=self._heard.has_own)
        return True

    def _packed(self, report: ReplicaReport, *, is_heard: bool) -> bytes:
        """The report as it travels: with what was learned, where anyone hears it."""
        if self._lengths is None or not is_heard or self._sources.policy().learn is Learn.OFF:
            return pack(report)
        return self._lengths.packed(report)

    def _hear(self, own: ReplicaReport) -> None:
        """Notes what the others run, those that are still there."""
        at_s = self._now_s()
        reports = [one.report for one in self._heard.still_there(at_s, FORGET_AFTER_S)]
        self._generations.hear(reports, self._sources.policy().generation, at_s)
        self._engine_lists.hear(reports, own, at_s)

    def _report_defect(self) -> None:
        """Logs the exception being handled, once for as long as it lasts."""
        said = "the other replicas are not shown: a defect, see the log"
        if self._trouble != said:
            _log.exception("a defect in the sidecar; the other replicas' figures are not shown")
        self._trouble = said


def _unreadable(replica: str) -> str:
    return f"replica {replica} is not shown: its version of the sidecar is another"


def is_alone(state: Mapping[str, Any]) -> bool:
    """Whether a pool's state is this replica's alone: the pool is shared, and its store does not decide."""
    return "store" in state and state["store"]["state"] != StoreState.SHARED.value


def _tier(policy: Policy, state: Mapping[str, Any], all_heard: list[ReceivedReport], at_s: float) -> TierView:
    name: str = state["tier"]
    level = policy.level_of(name)
    assert level is not None
    slo = policy.tiers[level].slo
    overtaken_by = merge.overtaken_by(name, all_heard)
    return TierView(
        tier=name,
        level=level,
        held=Amount(**state["held"]),
        reserve=Amount(**state["reserve"]),
        limit=Amount(**state["limit"]),
        queued=Amount(*merge.queued(name, all_heard)),
        borrowed_tokens=state.get("borrowed", 0),
        lent_tokens=state.get("lent", 0),
        oldest=merge.oldest(name, all_heard),
        slo=Promised(slo.ttft_s, slo.queue_wait_s, slo.starvation_s, slo.tpot_s),
        recent=merge.recent(name, all_heard, at_s),
        overtaken_by=overtaken_by,
        is_at_limit=waits_at_its_limit(overtaken_by),
    )


def _doubts(policy: Policy, all_heard: list[ReceivedReport], at_s: float) -> list[str]:
    """Why the figures of the dry run are not to be trusted; empty where they are, or where nothing is observed."""
    if policy.mode is not Mode.OBSERVE:
        return []
    report = observed_report(policy, all_heard, at_s)
    return [f"the dry run is not to be trusted at this load: {doubt.reason}" for doubt in report.doubts]


def _free(capacity: Amount, held: Amount) -> Amount:
    """The free amount; a pool that shrank may hold more than it has."""
    pairs = ((capacity.tokens, held.tokens), (capacity.requests, held.requests))
    return Amount(*(None if most is None else max(0, most - (taken or 0)) for most, taken in pairs))
