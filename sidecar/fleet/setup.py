"""A fleet as the policy describes it, and its change to another policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from sidecar.engines.watch import EngineCheck
from sidecar.fleet.discovery import EngineDiscovery, StaticDiscovery
from sidecar.fleet.dns_discovery import DnsDiscovery
from sidecar.fleet.file_discovery import FileDiscovery
from sidecar.fleet.fleet import Fleet
from sidecar.policy.compiler import read_engine_list
from sidecar.policy.fleet import EngineAddress, FleetPolicy
from sidecar.policy.model import Policy


def new_fleet(
    policy: Policy,
    now_us: Callable[[], int],
    *,
    engine_key: str | None = None,
    check: EngineCheck = EngineCheck.ON,
    model: str | None = None,
) -> Fleet:
    """The fleet of a policy with `engines`. `now_us` is the pool's clock.

    `model` is the one whose engines belong to it, None for all engines. Raises ValueError where SRV records are to be
    looked up, and dnspython is missing.
    """
    assert policy.engines is not None
    discovery = _discovery(policy, policy.engines, _names(policy, model))
    return Fleet(policy.engine, policy.engines, discovery, now_us, check=check, engine_key=engine_key)


def change_fleet(fleet: Fleet, policy: Policy, model: str | None = None) -> None:
    """The policy is another one from now on. Where the engines are found stays as it is: `diff.needs_restart`."""
    assert policy.engines is not None
    fleet.change(policy.engines)
    names, discovery = _names(policy, model), fleet.discovery
    if isinstance(discovery, FileDiscovery):
        discovery.change(partial(_read, policy, names))
    elif isinstance(discovery, DnsDiscovery):
        discovery.change(policy.engines.capacity, policy.engines.prefill)
    elif isinstance(discovery, StaticDiscovery):
        discovery.change(_select(policy.engines.static, names))


def _names(policy: Policy, model: str | None) -> Collection[str] | None:
    """The names of a model's engines; None where all engines serve it."""
    return None if model is None else policy.models[model].engines


def _discovery(policy: Policy, engines: FleetPolicy, names: Collection[str] | None) -> EngineDiscovery:
    if engines.file is not None:
        return FileDiscovery(engines.file, partial(_read, policy, names))
    if engines.dns is not None:
        return DnsDiscovery(engines.dns, engines.capacity, engines.prefill)
    return StaticDiscovery(_select(engines.static, names))


def _read(policy: Policy, names: Collection[str] | None, path: Path) -> Sequence[EngineAddress]:
    return _select(read_engine_list(policy, path), names)


def _select(engines: Sequence[EngineAddress], names: Collection[str] | None) -> Sequence[EngineAddress]:
    return engines if names is None else [engine for engine in engines if engine.name in names]
