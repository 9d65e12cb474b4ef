"""Policy compiler: from a path to a `Policy`, or to all mistakes in its files at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import TypeVar

from sidecar.policy.declared import Context, values
from sidecar.policy.fleet import EngineAddress, EngineListFile, FleetPolicy, pool_prefill, pool_size
from sidecar.policy.model import Policy
from sidecar.policy.pool_file import PoolFile
from sidecar.policy.problems import FilePlace, Path, PolicyError, Problem, printable
from sidecar.policy.rules import PoolRules
from sidecar.policy.source import Document, read
from sidecar.policy.tenant import Tenant
from sidecar.policy.tenant_files import obstacles, tenant_files
from sidecar.policy.validate import entries, list_mistakes, pool_problems, read_record, reserve_mistake, tenant_problems

POOL_FILE = "policy.yaml"
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A policy and the files it came from."""

    policy: Policy
    pool: Document
    tenants: dict[str, Document]

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that was read, the pool's first."""
        return (self.pool.file, *(document.file for document in self.tenants.values()))

    def place(self, path: Path) -> FilePlace | None:
        """Where a value stands: a path in the pool's file, or `("tenants", NAME, ...)` for one in a tenant's."""
        if len(path) > 1 and path[0] == "tenants":
            document = self.tenants.get(str(path[1]))
            return document.place(path[2:]) if document else None
        return self.pool.place(path)


def pool_file(path: str | FilePath) -> FilePath:
    """The pool's file of a policy: the path itself, or policy.yaml in that folder."""
    file = FilePath(path)
    return file / POOL_FILE if os.path.isdir(file) else file


def load(path: str | FilePath) -> Policy:
    """The policy at `path`, a file or a folder with policy.yaml in it. Raises PolicyError with every mistake."""
    return load_files(path).policy


def load_files(path: str | FilePath) -> Loaded:
    """As `load`, and keeps what it read: for who wants to say where something stands."""
    file = pool_file(path)
    document = read(file)
    if document.is_missing:
        raise PolicyError([_missing(file, is_folder=file != FilePath(path))])
    if document.data is None:
        raise PolicyError(document.problems)
    if "tenant" in document.data and "tiers" not in document.data:
        raise PolicyError([document.problem(("tenant",), _A_TENANT)])
    around = Context(tuple(entries(document.data, "tiers")), file.parent)
    tenants, missing = _tenant_documents(document, file.parent)
    pool, problems = _validate(PoolFile, document, around)
    problems += [*pool_problems(document), *missing]
    bodies: list[Tenant] = []
    for tenant in tenants:
        body, wrong = _validate(Tenant, tenant, around)
        problems += wrong
        bodies += [body] if body else []
    problems += tenant_problems(document, tenants)
    if problems or pool is None:
        raise PolicyError(_in_order(problems, [document, *tenants]))
    policy = resolve(pool, bodies, _digest([document, *tenants]))
    if mistakes := [document.problem(("tiers",), message) for message in _too_much_reserved(policy)]:
        raise PolicyError(mistakes)
    by_name = {body.name: tenant for body, tenant in zip(bodies, tenants, strict=True)}
    return Loaded(policy, document, by_name)


def _too_much_reserved(policy: Policy) -> Iterator[str]:
    """A sentence for hours in which the tiers reserve more than the pool. At other times `pool_problems` says so."""
    if all(entry.reserve is None for tier in policy.tiers for entry in tier.hours.values()):
        return
    for hours, then in policy.in_all_hours():
        if mistake := reserve_mistake(tier.reserve for tier in then.tiers):
            yield f"in {hours} {mistake}"


_A_TENANT = "this is a tenant's file; name the policy's own file, or the folder with policy.yaml in it"
_HOW_TO_BEGIN = "`sidecar init` writes a policy for an engine"


def _missing(file: FilePath, *, is_folder: bool) -> Problem:
    """No line: nothing is there to have lines."""
    missing = "there is no such file" if is_folder else "there is no such file or folder"
    return Problem("", f"{missing}; {_HOW_TO_BEGIN}, or name another file or folder", FilePlace(str(file), None))


def _tenant_documents(pool: Document, folder: FilePath) -> tuple[list[Document], list[Problem]]:
    """The files that the pool's `tenants` pattern names, sorted by name; a pattern that names none is a mistake."""
    pattern = (pool.data or {}).get("tenants")
    if not isinstance(pattern, str) or not pattern.strip() or not pattern.isprintable():
        return [], []  # absent, or reported by the pool's own validation
    files, reasons = tenant_files(pattern, folder), obstacles(pattern, folder)
    if not files and not reasons:
        reasons = [f"no file matches {printable(pattern)}; add a tenant's file there, or remove this line"]
    elif not files:
        reasons = [f"no file matches {printable(pattern)}: {reason}" for reason in reasons]
    return [read(FilePath(name)) for name in files], [pool.problem(("tenants",), reason) for reason in reasons]


def _validate(kind: type[M], document: Document, around: Context) -> tuple[M | None, list[Problem]]:
    if document.data is None:
        return None, list(document.problems)
    found, mistakes = read_record(kind, document.data, around)
    return found, [*document.problems, *(document.problem(*mistake) for mistake in mistakes)]


def _in_order(problems: Iterable[Problem], documents: list[Document]) -> list[Problem]:
    """By file, then by line; what was found twice, once."""
    order = {document.file: index for index, document in enumerate(documents)}

    def where(problem: Problem) -> tuple[int, int]:
        return (order[problem.place.file], problem.place.line or 0) if problem.place else (0, 0)

    return sorted(dict.fromkeys(problems), key=where)


def _digest(documents: list[Document]) -> str:
    """Changes when any file's own name or content does; the folder's place does not count, so replicas agree."""
    whole = hashlib.sha256()
    for document in documents:
        for part in (os.fsencode(FilePath(document.file).name), document.content):
            whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:12]


def resolve(pool: PoolFile, tenants: Sequence[Tenant], generation: str) -> Policy:
    """The policy of files that were found to be without mistakes; `generation` says which version of them it is."""
    fleet = None if pool.engines is None else _set_health_page(pool.engines, pool)
    made = {
        "engines": fleet,
        "tiers": tuple(
            replace(tier, timeouts=tier.own_timeouts.beside(pool.timeouts) if tier.own_timeouts else pool.timeouts)
            for tier in pool.tiers
        ),
    }
    return Policy(
        **{**values(pool), **made},
        rules=_rules(pool, fleet),
        named=MappingProxyType({tenant.name: tenant for tenant in tenants}),
        generation=generation,
    )


def _set_health_page(fleet: FleetPolicy, pool: PoolFile) -> FleetPolicy:
    """The fleet, whose health page is the engine's own where the policy names none."""
    return replace(fleet, health=replace(fleet.health, path=fleet.health.path or pool.engine.health_page))


def _rules(pool: PoolFile, fleet: FleetPolicy | None) -> PoolRules:
    if fleet is not None:
        return pool.rules_for(*pool_size(fleet.static), pool_prefill(fleet.static))
    assert pool.capacity is not None  # `validate` refuses a pool without one that has no engines either
    return pool.rules_for(pool.capacity.tokens, pool.capacity.requests)


def read_engine_list(policy: Policy, file: FilePath) -> tuple[EngineAddress, ...]:
    """The engines in a file, now; what they do not write of their own is the policy's. Reads the disk.

    Raises PolicyError with every mistake, by file and line. An empty tuple means that the list itself is empty.
    """
    fleet = policy.engines
    assert fleet is not None
    document = read(file)
    found, problems = _validate(EngineListFile, document, Context((), file.parent))
    if document.data is not None:
        wrong = list_mistakes(document.data, policy.engine.name, in_one_pool=not policy.models)
        problems += [document.problem(*one) for one in wrong]
    if problems or found is None:
        raise PolicyError(sorted(problems, key=lambda problem: (problem.place and problem.place.line) or 0))
    return fleet.listing(found.engines).static


def shipped_policies() -> FilePath:
    """The folder with `policy.yaml` and `tenants/`. Raises FileNotFoundError where a packager left it out."""
    package = FilePath(__file__).resolve().parent.parent
    for folder in (package / "policies", package.parent / "policies"):
        if (folder / "policy.yaml").is_file():
            return folder
    raise FileNotFoundError("the example policies are missing from this installation; pass a policy of your own")
