"""Sampler of a pool: the documents that pages show, read in the pool's event loop for each reader of the metrics."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.cluster.document import EngineStatus, PoolFigures, TierShare, TierWaits
from sidecar.cluster.report import is_alone, tier_shares, tier_waits
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.engines.view import Amount, EngineDocument
from sidecar.events import Received
from sidecar.figures import readings
from sidecar.lengths.estimator import EngineSizesDocument
from sidecar.policy.choices import Mode
from sidecar.policy.model import Policy
from sidecar.pools import Grant, Pool
from sidecar.tasks import running_loop
from sidecar.telemetry.dry_run import DryRunReport
from sidecar.telemetry.metrics.instruments import CHANGES, TENANT_TOKENS_HELD, Counters, PoolSample
from sidecar.telemetry.metrics.tenants import TenantCounts, TenantHolding
from sidecar.telemetry.recent import Recent
from sidecar.telemetry.request_record import EventHandlers, RequestRecord

# -- Sources of a process's figures: the overview and the metrics read the same ones.


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the overview and the metrics get a pool's figures. All are called in the event loop, a few times a second.

    `policy` is the one in force. `tenants` are those that hold or wait for something in this process; `refusals` the
    last requests that were refused, at most so many, newest first; `notices` are for the operator;
    `observed` what enforcing would have done, of at most so many tenants; `engine` is None where it is not looked at.
    `oldest` are the pool's oldest waits that began under the mode in force. `engines` is None in a pool of one.
    `lease_sizes` are those of this process's leases, empty where no output length is learned. `engine_speeds` are empty
    where no service gain is measured. `aborting` are the requests and tokens that are held for requests that have
    ended, `engine_up` is 1, 0, or None where the engine is not looked at, `policies_rejected` counts changed policies
    that could not be used, and `loop_blocked_s` is for how long the event loop stood still.
    """

    policy: Callable[[], Policy]
    pool: Pool
    recent: Recent
    tenants: Callable[[], Mapping[str, TenantHolding]]
    refusals: Callable[[int], Sequence[RequestRecord]]
    notices: Callable[[], Sequence[str]]
    oldest: Callable[[], Sequence[Grant | None]]
    observed: Callable[[int], DryRunReport | None] = lambda _: None
    engine: Callable[[], EngineStatus | None] = lambda: None
    engines: Callable[[], Sequence[EngineDocument] | None] = lambda: None
    lease_sizes: Callable[[], Sequence[EngineSizesDocument]] = tuple
    engine_speeds: Callable[[], Sequence[EngineSpeedDocument]] = tuple
    aborting: Callable[[], tuple[int, int]] = lambda: (0, 0)
    engine_up: Callable[[], int | None] = lambda: None
    policies_rejected: Callable[[], int] = lambda: 0
    loop_blocked_s: Callable[[], float] = lambda: 0.0


KINDS = (PoolFigures, TierShare, TierWaits, EngineDocument, EngineSizesDocument, EngineSpeedDocument)
"""The documents whose figures are metrics."""
FIGURES = (
    *(reading.figure for kind in (*KINDS, Counters, TenantCounts) for reading in readings(kind)),
    TENANT_TOKENS_HELD,
    CHANGES,
)
"""All metrics but the histograms."""
WITHIN_S = 0.5
"""Longest wait of an exporter for a busy event loop; then it uses the last sample: the loop may be waiting for it."""
MOST_ENGINES = 64
_TIER, _ENGINE = "admission.tier", "admission.engine"


class PoolSampler:
    """Takes a `PoolSample` in the pool's event loop, from any thread.

    It is a listener: each request says which loop that is. `generations` is how many different policies the pool's
    replicas run, `wanted` how many times the pool's room is wanted.
    """

    def __init__(
        self,
        sources: Sources,
        generations: Callable[[], int] = lambda: 1,
        wanted: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._sources = sources
        self._generations, self._wanted = generations, wanted
        self._loop: asyncio.AbstractEventLoop | None = None
        self._latest: PoolSample | None = None
        self.handlers: EventHandlers = {Received: self._note_loop}

    def _note_loop(self, _: RequestRecord, __: Received) -> None:
        """The event loop that serves requests; it stays until it is closed."""
        if self._loop is None or self._loop.is_closed():
            self._loop = running_loop()

    def __call__(self) -> PoolSample | None:
        """The pool as it stands; as it last stood where its loop has no time; None where that is not known."""
        loop = self._loop
        if loop is None or not loop.is_running() or loop is running_loop():
            return self._take()  # nothing else can be changing it
        taking = self._take_on_loop()
        try:
            return asyncio.run_coroutine_threadsafe(taking, loop).result(WITHIN_S)
        except concurrent.futures.TimeoutError:
            return self._latest
        except RuntimeError:  # the loop has ended since
            taking.close()
            return self._latest

    async def _take_on_loop(self) -> PoolSample:
        return self._take()

    def _take(self) -> PoolSample:
        self._latest = list(self._documents())
        return self._latest

    def _documents(self) -> Iterator[tuple[Mapping[str, str], object]]:
        sources, policy = self._sources, self._sources.policy()
        state: Mapping[str, Any] = sources.pool.state()
        yield {}, self._pool(policy, state)
        for share, waits in zip(tier_shares(policy, state), tier_waits(state, sources.oldest()), strict=True):
            yield {_TIER: share.tier}, share
            yield {_TIER: share.tier}, waits
        for engine in latest_incarnations(sources.engines() or ())[:MOST_ENGINES]:
            yield {_ENGINE: engine.name}, engine
        measured: list[EngineSizesDocument | EngineSpeedDocument] = []
        measured += [*sources.lease_sizes()[:MOST_ENGINES], *sources.engine_speeds()[:MOST_ENGINES]]
        for of_engine in measured:
            yield {} if of_engine.engine is None else {_ENGINE: of_engine.engine}, of_engine

    def _pool(self, policy: Policy, state: Mapping[str, Any]) -> PoolFigures:
        sources = self._sources
        requests, tokens = sources.aborting()
        return PoolFigures(
            policy.generation,
            Amount(**state["capacity"]),
            wanted=self._wanted(),
            aborting=Amount(tokens, requests),
            replicas=state.get("store", {}).get("replicas"),
            generations=self._generations() if "store" in state else None,
            is_passing=policy.mode is Mode.PASS,
            is_store_available=not is_alone(state) if "store" in state else None,
            engine_up=sources.engine_up(),
            policies_rejected=sources.policies_rejected(),
            no_engine_fits_s=state.get("no_engine_fits_s"),
            loop_blocked_s=sources.loop_blocked_s(),
        )


def latest_incarnations(documents: Sequence[EngineDocument]) -> Sequence[EngineDocument]:
    """One for each name: the latest incarnation, with what earlier ones still hold. Those that are gone come last."""
    by_name: dict[str, list[EngineDocument]] = {}
    for document in documents:
        by_name.setdefault(document.name, []).append(document)
    found = [_with_earlier(same) for same in by_name.values()]
    return sorted(found, key=lambda engine: engine.state == "gone")


def _with_earlier(same: Sequence[EngineDocument]) -> EngineDocument:
    return msgspec.structs.replace(
        same[-1],
        held=Amount(sum(it.held.tokens or 0 for it in same), sum(it.held.requests or 0 for it in same)),
        unprefilled_tokens=sum(it.unprefilled_tokens for it in same),
        in_flight=sum(it.in_flight for it in same),
    )
