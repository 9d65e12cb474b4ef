"""Where leases live: in one process, or in a store that many share."""

from sidecar.pools.engine_sized import EngineSizedPool
from sidecar.pools.local import LocalPool
from sidecar.pools.pool import Ask, Grant, Lease, Pool

__all__ = ["Ask", "EngineSizedPool", "Grant", "Lease", "LocalPool", "Pool"]
