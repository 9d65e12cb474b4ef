"""The fleet: the engines of one pool as one process sees them, with their addresses, connections and health."""

from sidecar.fleet.app import FleetApp, FleetsApp
from sidecar.fleet.discovery import EngineDiscovery, StaticDiscovery
from sidecar.fleet.dns_discovery import DnsDiscovery
from sidecar.fleet.file_discovery import FileDiscovery
from sidecar.fleet.fleet import Fleet
from sidecar.fleet.member import EngineMember, MemberState
from sidecar.fleet.replay_budget import ReplayBudget
from sidecar.fleet.retry_after import retry_after_s
from sidecar.fleet.settings import FleetSettings
from sidecar.fleet.view import FleetView
from sidecar.policy.fleet import DnsService, EngineAddress

__all__ = [
    "DnsDiscovery",
    "DnsService",
    "EngineAddress",
    "EngineDiscovery",
    "EngineMember",
    "FileDiscovery",
    "Fleet",
    "FleetApp",
    "FleetSettings",
    "FleetView",
    "FleetsApp",
    "MemberState",
    "ReplayBudget",
    "StaticDiscovery",
    "retry_after_s",
]
