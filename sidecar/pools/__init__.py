"""The pools of leases: in one process, in a store that many share, or as large as the engine says."""

from sidecar.pools.base import Ask, EnginePool, Grant, Lease, Merge, NotShared, PeerReport, PeerReports, Pool
from sidecar.pools.engine_capacity import EngineSizedPool
from sidecar.pools.local import LocalPool

__all__ = [
    "Ask",
    "EnginePool",
    "EngineSizedPool",
    "Grant",
    "Lease",
    "LocalPool",
    "Merge",
    "NotShared",
    "PeerReport",
    "PeerReports",
    "Pool",
]
