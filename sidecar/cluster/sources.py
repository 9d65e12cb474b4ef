"""Sources of a process's figures: the overview and the metrics read the same ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.cluster.document import EngineStatus
from sidecar.engines.speed import EngineSpeedDocument
from sidecar.engines.view import EngineDocument
from sidecar.lengths.documents import EngineSizesDocument
from sidecar.policy.model import Policy
from sidecar.pools import Grant, Pool
from sidecar.telemetry.dry_run import DryRunReport
from sidecar.telemetry.metrics.tenants import TenantHolding
from sidecar.telemetry.recent import Recent
from sidecar.telemetry.request_record import RequestRecord


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
