"""Compiler of `engines` and `models`, and reader of the engine list that a policy names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType

from pydantic import ValidationError

from sidecar.engines import Engine
from sidecar.engines.pages import Health
from sidecar.policy.capacity_schema import Capacity
from sidecar.policy.fields import Context
from sidecar.policy.fleet import (
    Affinity,
    DnsService,
    EngineAddress,
    FleetPolicy,
    MemberCapacity,
    ModelPolicy,
    Replay,
    WrittenCapacity,
)
from sidecar.policy.fleet_schema import EngineEntry, EngineListFile, EnginesBody, HealthBody, ModelBody
from sidecar.policy.fleet_validate import list_mistakes
from sidecar.policy.model import Policy
from sidecar.policy.problems import PolicyError
from sidecar.policy.rules import EngineCapacity
from sidecar.policy.source import read
from sidecar.policy.validate import sentence


def fleet_policy(body: EnginesBody, engine: type[Engine]) -> FleetPolicy:
    """The fleet of a policy without mistakes."""
    capacity = capacity_of(body.capacity)
    return FleetPolicy(
        static=_listed(body.static or (), capacity, body.prefill),
        file=body.file,
        dns=None if body.dns is None else DnsService(*body.dns.name, float(body.dns.refresh)),
        capacity=capacity,
        prefill=body.prefill,
        affinity=Affinity(body.affinity.prefix, body.affinity.weight, tuple(body.affinity.session)),
        health=_health(body.health, engine),
        slow_start_s=float(body.slow_start),
        replay=Replay(body.replay.before_first_byte, body.replay.budget),
        drain_timeout_s=float(body.drain_timeout),
        mounted=body.mounted is True,
    )


def model_policies(models: Mapping[str, ModelBody] | None) -> Mapping[str, ModelPolicy]:
    """The models by name, in the order of the file."""
    return MappingProxyType(
        {
            name: ModelPolicy(name, None if body.engines is None else tuple(body.engines), tuple(body.aliases))
            for name, body in (models or {}).items()
        }
    )


def capacity_of(capacity: Capacity) -> MemberCapacity:
    """An engine's capacity: written, or read from it."""
    if capacity.read_from is None:
        return WrittenCapacity(capacity.tokens, capacity.requests)
    return EngineCapacity(capacity.fraction, capacity.waiting, capacity.tokens, capacity.requests)


def _health(body: HealthBody, engine: type[Engine]) -> Health:
    path = engine.health_page if body.path is None else body.path
    return Health(path, float(body.every), body.fail, body.rise)


def _listed(entries: Sequence[EngineEntry], capacity: MemberCapacity, prefill: int) -> tuple[EngineAddress, ...]:
    return tuple(
        EngineAddress(
            name=entry.name,
            url=entry.url,
            capacity=capacity if entry.capacity is None else capacity_of(entry.capacity),
            prefill=prefill if entry.prefill is None else entry.prefill,
            speed=entry.speed,
        )
        for entry in entries
    )


def read_engine_list(policy: Policy, file: FilePath) -> tuple[EngineAddress, ...]:
    """The engines in a file, now; what they do not write of their own is the policy's. Reads the disk.

    Raises PolicyError with every mistake, by file and line. An empty tuple means that the list itself is empty.
    """
    fleet = policy.engines
    assert fleet is not None
    document = read(file)
    if document.data is None:
        raise PolicyError(document.problems)
    problems = list(document.problems)
    found: EngineListFile | None = None
    try:
        found = EngineListFile.model_validate(document.data, context=Context((), file.parent))
    except ValidationError as refused:
        wrong = (sentence(EngineListFile, error) for error in refused.errors(include_url=False))
        problems += [document.problem(*one) for one in wrong]
    mistakes = list_mistakes(document.data, policy.engine.name, in_one_pool=not policy.models)
    problems += [document.problem(*one) for one in mistakes]
    if problems or found is None:
        raise PolicyError(sorted(problems, key=lambda problem: (problem.place and problem.place.line) or 0))
    return _listed(found.engines, fleet.capacity, fleet.prefill)
