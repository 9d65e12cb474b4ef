"""The pools of leases: in one process, in a store that many share, or as large as the engine says."""

from sidecar.events import Grant
from sidecar.pools.base import Ask, Lease, PeerReport, StoreError
from sidecar.pools.engine_reports import EngineSize
from sidecar.pools.pool import Pool

__all__ = [
    "Ask",
    "EngineSize",
    "Grant",
    "Lease",
    "PeerReport",
    "Pool",
    "StoreError",
]
