"""The policy: from YAML files to one immutable value, with every mistake at once, by file and line."""

from sidecar.policy.loading import Loaded, load, load_files
from sidecar.policy.policy import Api, Carrier, Endpoint, EngineName, Limits, Policy, Source, Tenant, Tier
from sidecar.policy.problems import Place, PolicyError, Problem

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
    "Tenant",
    "Tier",
    "load",
    "load_files",
]
