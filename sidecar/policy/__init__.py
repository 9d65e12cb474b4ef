"""Policy: YAML files compiled to one immutable value, with every mistake reported at once, by file and line."""

from sidecar.apis import Api
from sidecar.engines.base import Carrier
from sidecar.policy.compiler import Loaded, load, load_files
from sidecar.policy.model import Endpoint, Limits, Policy, Source, StoreLoss, Tenant, Tier
from sidecar.policy.problems import Place, PolicyError, Problem
from sidecar.policy.store import StoreAddress, StoreKind, store_address

__all__ = [
    "Api",
    "Carrier",
    "Endpoint",
    "Limits",
    "Loaded",
    "Place",
    "Policy",
    "PolicyError",
    "Problem",
    "Source",
    "StoreAddress",
    "StoreKind",
    "StoreLoss",
    "Tenant",
    "Tier",
    "load",
    "load_files",
    "store_address",
]
