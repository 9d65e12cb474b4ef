"""Store of a process: the policy and the environment say where it is, and what is kept there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sidecar.policy.choices import StoredTenants
from sidecar.policy.model import Policy
from sidecar.policy.secrets import secret
from sidecar.policy.store import STORE_VARIABLE, StoreAddress, store_address

if TYPE_CHECKING:
    from sidecar.tenants.stored import TenantRecords
    from sidecar.tenants.usage import RedisUsage

TAKE_OVER_VARIABLE = "SIDECAR_TAKE_OVER_POOL"
"""`1`: a shared pool that has other tiers than the policy is made anew with the policy's. See docs/many-replicas.md."""


def find_store(policy: Policy, environment: Mapping[str, str]) -> StoreAddress | None:
    """Where the pool is kept, None for this process. Raises ValueError for an address that is none."""
    if policy.is_bare:
        return None
    written = secret(environment, STORE_VARIABLE)
    try:
        return store_address(written) if written else policy.store
    except ValueError as mistake:
        raise ValueError(f"{STORE_VARIABLE}: {mistake}") from None


def takes_over_a_store(environment: Mapping[str, str], store: StoreAddress | None, *, takes_over: bool) -> bool:
    """True if the command line or the environment says so. Raises ValueError where there is no store."""
    written = environment.get(TAKE_OVER_VARIABLE, "")
    if written not in ("", "0", "1"):
        raise ValueError(f"{TAKE_OVER_VARIABLE}: {written!r} is neither 1 nor 0")
    if not takes_over and written != "1":
        return False
    if store is None:
        raise ValueError(
            f"there is no shared pool to take over: the policy has no store, and {STORE_VARIABLE} is not set"
        )
    return True


def new_records(policy: Policy, environment: Mapping[str, str]) -> TenantRecords | None:
    """The tenants in the store; None where the policy has none there. Raises ValueError where there is no store."""
    if policy.stored_tenants is StoredTenants.NONE:
        return None
    store = find_store(policy, environment)
    if store is None:
        raise ValueError(
            "stored_tenants: true keeps tenants in a store, and there is none: write its address as `store` into the "
            f"pool's file, or set {STORE_VARIABLE}"
        )
    from sidecar.pools.redis.connection import reach_for
    from sidecar.tenants.stored import TenantRecords, tenants_connector

    return TenantRecords(tenants_connector(store, policy.pool), reach_for(store))


def new_usage(policy: Policy, environment: Mapping[str, str]) -> RedisUsage | None:
    """Where the use of the tenants is kept; None where it is not counted."""
    store = find_store(policy, environment)
    if store is None or not policy.usage_days:
        return None
    from sidecar.pools.redis.connection import reach_for
    from sidecar.tenants.usage import RedisUsage, usage_connector

    return RedisUsage(usage_connector(store, policy.pool), policy.usage_days, reach_for(store))


def refuse_uncounted_budgets(policy: Policy, environment: Mapping[str, str]) -> None:
    """Raises ValueError for budgets of tenants in a policy whose use is not counted."""
    budgets = sorted(tenant.name for tenant in policy.named.values() if tenant.has_budgets)
    has_store = find_store(policy, environment) is not None
    if budgets and not (has_store and policy.usage_days):
        missing = "usage_days is 0: write 1 or more" if has_store else "there is none: write its address as `store`"
        raise ValueError(
            f"tenant {budgets[0]} has tokens_per_day or tokens_per_month, which is counted in a store, and {missing}"
        )
