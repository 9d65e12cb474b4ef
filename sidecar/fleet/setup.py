"""A fleet as the policy describes it, and its change to another policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from sidecar.engines.watch import EngineCheck
from sidecar.fleet.discovery import EngineDiscovery, FollowedDiscovery, StaticDiscovery
from sidecar.fleet.dns_discovery import DnsDiscovery
from sidecar.fleet.fleet import Fleet
from sidecar.policy.compiler import read_engine_list
from sidecar.policy.fleet import EngineAddress, FleetPolicy
from sidecar.policy.followed_files import LOOK_EVERY_S, FollowedFiles
from sidecar.policy.model import Policy

# -- Discovery by a file, which is followed as the policy's files are: a broken one leaves the last list standing.

ReadEngines: TypeAlias = Callable[[Path], Sequence[EngineAddress]]
"""Reads a file of engines. Raises ValueError (so PolicyError, too) or OSError, with a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Content of the file: engines, or in `problem` the reason why it cannot be used."""

    engines: tuple[EngineAddress, ...]
    problem: str | None = None


class FileDiscovery(FollowedDiscovery):
    """The engines that a file lists, as `read` reads it, in a thread. `every_s` is for tests."""

    def __init__(self, path: str | Path, read: ReadEngines, *, every_s: float = LOOK_EVERY_S) -> None:
        super().__init__(f"the file {path}")
        self._path = Path(path)
        self._read_engines = read
        self._every_s = every_s
        self._is_read = False
        self._file = FollowedFiles(lambda: [str(path)], self._read, lambda found: found.problem is not None)

    def change(self, read: ReadEngines) -> None:
        """Reads the file anew, and from now on, by another function."""
        self._read_engines = read
        self._file.forget()

    async def _look(self) -> float:
        reading = await asyncio.to_thread(self._file.look, at_once=not self._is_read)
        self._is_read |= reading is not None
        if reading is not None and reading.problem is not None:
            self._failed(reading.problem)
        elif reading is not None:
            self._answered(reading.engines)
        return self._file.pause_s(self._every_s)

    def _read(self) -> _Reading:
        try:
            return _Reading(tuple(self._read_engines(self._path)))
        except OSError as error:
            return _Reading((), f"it cannot be read: {error.strerror or error}")
        except ValueError as error:
            return _Reading((), "; ".join(str(error).splitlines()) or "it cannot be read")


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
