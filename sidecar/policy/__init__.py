"""The policy: from YAML files to one immutable value, with every mistake at once, by file and line."""

from sidecar.policy.compiler import Loaded, load, load_files
from sidecar.policy.model import Api, Carrier, Endpoint, EngineName, Limits, Policy, Source, StoreLoss, Tenant, Tier
from sidecar.policy.problems import Place, PolicyError, Problem
from sidecar.policy.store import StoreAddress, StoreKind, store_address

__all__ = [
    "Api",
    "Carrier",
    "Endpoint",
    "EngineName",
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
