"""Overview of the pool as one document: shown by the live page, its event stream and `sidecar top`.

JSON names are the field names. Times that end in `_s` are seconds; those called `at_s` and `t_s` are seconds since
1970. A value without a bound is None.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sidecar.engines.speed import EngineSpeedDocument
from sidecar.engines.view import Amount
from sidecar.figures import REQUESTS, SECONDS, TOKENS, Over, amounts, counter, gauge
from sidecar.lengths.estimator import EngineSizesDocument
from sidecar.telemetry import semconv
from sidecar.telemetry.recent import Bucket, Overtakings


class OldestWaiter(msgspec.Struct, frozen=True):
    """How the oldest that waits in a tier has waited so far. `served_ahead`: tokens admitted meanwhile, by tier."""

    wait_s: Annotated[
        float,
        gauge(
            "admission.queue.oldest_wait",
            "How long the oldest waiting request of this process has waited. Not of those with a deadline.",
            SECONDS,
            missing=0.0,
        ),
    ]
    starvation_s: Annotated[
        float,
        gauge(
            "admission.queue.longest_starvation",
            "How long ago that one was first overtaken.",
            SECONDS,
            missing=0.0,
        ),
    ]
    served_ahead: dict[str, int]
    replica: str


class TierWaits(msgspec.Struct, frozen=True):
    """Requests of one tier that wait in one process.

    `is_at_limit` where others pass its requests because the tier has all that its own `limit` allows.
    """

    tier: str
    queued: Annotated[
        Amount,
        amounts("admission.queue", "waiting in this process.", Over.SUM),
    ]
    oldest: OldestWaiter | None = None
    is_at_limit: bool = False


class Promised(msgspec.Struct, frozen=True):
    """The promises of a tier; None where there is none."""

    ttft_s: Annotated[
        float | None, gauge("admission.slo.ttft", "The time to first token that the policy promises.", SECONDS)
    ] = None
    queue_wait_s: Annotated[
        float | None, gauge("admission.slo.queue_wait", "The queue wait that the policy promises.", SECONDS)
    ] = None
    starvation_s: Annotated[
        float | None, gauge("admission.slo.starvation", "The longest starvation that the policy promises.", SECONDS)
    ] = None
    tpot_s: float | None = None
    hold: Annotated[
        float | None, gauge("admission.slo.hold", "The share of requests that must meet both `ttft` and `tpot`.")
    ] = None


class TierGuard(msgspec.Struct, frozen=True):
    """How full less important tiers may make the pool beside a tier whose SLO is held (`hold`).

    `requests` counts those of this process since it began, by `met` and `missed`.
    """

    share: Annotated[
        float,
        gauge(
            "admission.guard.share",
            "The share of the pool up to which less important requests are admitted, beyond their reserves.",
        ),
    ]
    held: Annotated[float, gauge("admission.guard.held", "The share of the pool that less important tiers hold.")]
    total: Annotated[float, gauge("admission.guard.total", "The share of the pool that all tiers hold.")]
    requests: Annotated[
        dict[str, int],
        counter(
            "admission.guard.requests",
            "Requests by which the guard decides, `met` or `missed`: what less important work can have made late.",
            REQUESTS,
            labels=(semconv.ADMISSION_SLO,),
        ),
    ]
    is_in_vain: Annotated[
        bool,
        gauge(
            "admission.guard.in_vain",
            "1 while the SLO is missed though less important tiers hold no more than their reserves, else 0.",
        ),
    ]


class TierShare(msgspec.Struct, frozen=True):
    """Room of the pool that one tier holds, and may hold."""

    tier: str
    held: Annotated[Amount, amounts("admission.held", "held by leases.")]
    reserve: Annotated[
        Amount,
        amounts("admission.reserve", "reserved for the tier."),
    ]
    limit: Annotated[
        Amount,
        amounts("admission.limit", "that the tier may hold at most."),
    ]
    borrowed_tokens: Annotated[
        int,
        gauge(
            "admission.borrowed.tokens",
            "Tokens held above the tier's reserve, out of what other tiers have reserved.",
            TOKENS,
        ),
    ]
    lent_tokens: Annotated[
        int, gauge("admission.lent.tokens", "Tokens of the tier's reserve that other tiers hold.", TOKENS)
    ]
    slo: Promised
    guard: TierGuard | None = None


class TierView(TierShare, frozen=True, kw_only=True):
    """One tier: what it holds and has waiting in the pool. `recent` and `overtaken_by` are this process's last five
    minutes.

    `is_at_limit` where others pass its oldest request because the tier has all that its own `limit` allows: it does not
    starve. `guarded` is half a sentence about a tier whose SLO is held; empty for others.
    """

    level: int
    queued: Amount
    oldest: OldestWaiter | None
    recent: list[Bucket]
    overtaken_by: dict[str, Overtakings]
    is_at_limit: bool = False
    guarded: str = ""


class PoolFigures(msgspec.Struct, frozen=True):
    """A pool and its policy, as metrics show them. None is unbounded, or not known here.

    `replicas`, `generations` and `is_store_available` are None where the pool is not shared, `no_engine_fits_s` in a
    pool of one engine. The counters count since the process began.
    """

    generation: Annotated[
        str,
        gauge(
            "admission.policy.info",
            "1, labeled with the digest of the policy in force.",
            labels=("admission.policy.generation",),
        ),
    ]
    capacity: Annotated[
        Amount,
        amounts("admission.capacity", "that the pool has room for."),
    ]
    wanted: Annotated[
        float | None,
        gauge(
            "admission.capacity.wanted",
            "How many times the room of the ready engines is wanted, of the whole pool and smoothed over a minute.",
        ),
    ] = None
    aborting: Annotated[
        Amount,
        amounts(
            "admission.aborting", "held after an early end in this process, until the engine has aborted it.", Over.SUM
        ),
    ] = Amount(0, 0)
    replicas: Annotated[int | None, gauge("admission.replicas", "Processes that share the pool.", "{replica}")] = None
    generations: Annotated[
        int | None,
        gauge(
            "admission.policy.generations",
            "Different policies that the pool's processes run.",
            "{policy}",
        ),
    ] = None
    is_passing: Annotated[
        bool, gauge("admission.passing", "1 while every request passes untouched (mode: pass), else 0.")
    ] = False
    is_store_available: Annotated[
        bool | None,
        gauge("admission.store.available", "1 while the shared pool's store decides, else 0.", "", Over.LEAST),
    ] = None
    engine_up: Annotated[
        int | None,
        gauge("admission.engine.up", "1 while the engine that the policy names answers, else 0.", "", Over.LEAST),
    ] = None
    policies_rejected: Annotated[
        int,
        counter(
            "admission.policy.rejected",
            "Changed policies that could not be used; the one before stayed in force.",
            "{policy}",
            Over.MOST,
        ),
    ] = 0
    no_engine_fits_s: Annotated[
        float | None,
        counter(
            "admission.no_engine_fits",
            "For how long a request that fitted the pool waited for an engine.",
            SECONDS,
            Over.MOST,
        ),
    ] = None
    loop_blocked_s: Annotated[
        float,
        counter("admission.event_loop.blocked", "For how long the event loop stood still under requests.", SECONDS),
    ] = 0.0


class TenantView(msgspec.Struct, frozen=True):
    """A tenant by what it holds now in this process."""

    tenant: str
    tokens_held: int
    leases: int
    waiting: int


class RefusalView(msgspec.Struct, frozen=True):
    """A request that this process refused. `tier` and `tenant` are None where it was refused before they were known.

    `status` is None where the client had disconnected. `preempted` is how often it was admitted and lost its room.
    """

    at_s: float
    tier: str | None
    tenant: str | None
    code: str
    status: int | None
    message: str
    request_id: str
    waited_s: float
    replica: str
    preempted: int = 0
    key: str | None = None


class EngineStatus(msgspec.Struct, frozen=True):
    """The engine as one process sees it: `up`, `down`, or `mismatch` where another engine than the policy's answers.

    `reason` says why it cannot be used, and is empty while it is up. `for_s` is how long it has been so.
    """

    state: str
    reason: str = ""
    for_s: float = 0.0


class ReplicaView(msgspec.Struct, frozen=True):
    """One process of the pool, as it was `seen_s_ago`; `generation` is the policy that it ran, empty if not known.

    `engine` is None where the process does not look at its engine.
    """

    replica: str
    host: str
    leases: int
    waiting: int
    seen_s_ago: float
    generation: str = ""
    engine: EngineStatus | None = None


class EngineRow(msgspec.Struct, frozen=True):
    """One incarnation of an engine of a pool of several, as this process sees it; see `EngineDocument`.

    `in_flight` are the requests of all replicas that have reported. `elsewhere` says which of them see the engine
    otherwise; empty where none does.
    """

    name: str
    id: str
    state: str
    reason: str
    capacity: Amount
    held: Amount
    unprefilled_tokens: int
    claims: int
    in_flight: int
    hit_rate: float | None = None
    is_measured: bool = False
    elsewhere: str = ""


class Overview(msgspec.Struct, frozen=True):
    """The pool as `replica` knows it: its sums, what waits in it now, and its replicas. `mode` is `local` or `shared`.
    The tiers' last minutes, the tenants, the refusals, the leases and the speeds are this process's own.

    `starving` is the tier whose oldest request starves most, None where none does; `headline` says it in a sentence,
    unless `lacks_engine`: then it says which replicas cannot use their engine, and why. `engines` are those of a pool
    of several; empty in a pool of one. `lease_sizes` are empty where no output length is learned,
    `engine_speeds` where no service gain is measured.
    """

    replica: str
    pool: str
    engine: str
    generation: str
    at_s: float
    mode: str
    starving: str | None
    headline: str
    capacity: Amount
    held: Amount
    free: Amount
    tiers: list[TierView]
    tenants: list[TenantView]
    refusals: list[RefusalView]
    replicas: list[ReplicaView]
    store: dict[str, Any] | None
    notices: list[str]
    lacks_engine: bool = False
    engines: list[EngineRow] = []
    lease_sizes: list[EngineSizesDocument] = []
    engine_speeds: list[EngineSpeedDocument] = []
