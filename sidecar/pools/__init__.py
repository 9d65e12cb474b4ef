"""Where leases live: in one process, or in a store that many share."""

from sidecar.pools.engine_sized import EngineSizedPool
from sidecar.pools.local import LocalPool
from sidecar.pools.pool import Ask, Grant, Lease, NotShared, Pool, Shared

__all__ = ["Ask", "EngineSizedPool", "Grant", "Lease", "LocalPool", "NotShared", "Pool", "Shared"]
