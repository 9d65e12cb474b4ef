"""The pools of leases: in one process, in a store that many share, or as large as the engine says."""

from sidecar.pools.base import Ask, EnginePool, Grant, Lease, Merge, PeerReport, PeerReports, Pool, StoreError
from sidecar.pools.engine_size import EngineSize
from sidecar.pools.ledger_pool import LedgerPool

__all__ = [
    "Ask",
    "EnginePool",
    "EngineSize",
    "Grant",
    "Lease",
    "LedgerPool",
    "Merge",
    "PeerReport",
    "PeerReports",
    "Pool",
    "StoreError",
]
