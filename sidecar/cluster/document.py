"""Overview of the pool as one document: shown by the live page, its event stream and `sidecar top`.

JSON names are the field names. Times that end in `_s` are seconds; those called `at_s` and `t_s` are seconds since
1970. A value without a bound is None.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sidecar.engines.view import Amount
from sidecar.gain.engine_speed import EngineSpeedDocument
from sidecar.lengths.lease_size import EngineSizesDocument
from sidecar.telemetry.recent import Bucket, Overtakings


class OldestWaiter(msgspec.Struct, frozen=True):
    """How the oldest that waits in a tier has waited so far. `served_ahead`: tokens admitted meanwhile, by tier."""

    wait_s: float
    starvation_s: float
    served_ahead: dict[str, int]
    replica: str


class Promised(msgspec.Struct, frozen=True):
    """The promises of a tier; None where there is none."""

    ttft_s: float | None = None
    queue_wait_s: float | None = None
    starvation_s: float | None = None
    tpot_s: float | None = None


class TierView(msgspec.Struct, frozen=True):
    """One tier: what it holds and has waiting in the pool. `recent` and `overtaken_by` are this process's last five
    minutes.

    `is_at_limit` where others pass its requests because it has all that its own `limit` allows: it does not starve.
    """

    tier: str
    level: int
    held: Amount
    reserve: Amount
    limit: Amount
    queued: Amount
    borrowed_tokens: int
    lent_tokens: int
    oldest: OldestWaiter | None
    slo: Promised
    recent: list[Bucket]
    overtaken_by: dict[str, Overtakings]
    is_at_limit: bool = False


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
