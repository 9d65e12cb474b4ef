"""From a path to a `Policy`, or to every mistake in its files at once."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sidecar.policy.crosschecks import entries, pool_problems, tenant_problems
from sidecar.policy.fields import Context
from sidecar.policy.models import FileModel, PoolFile, TenantFile
from sidecar.policy.policy import Policy
from sidecar.policy.problems import Path, Place, PolicyError, Problem, printable
from sidecar.policy.resolving import resolve
from sidecar.policy.sentences import sentence
from sidecar.policy.source import Document, read

POOL_FILE = "policy.yaml"
M = TypeVar("M", bound=FileModel)


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

    def place(self, path: Path) -> Place | None:
        """Where a value stands: a path in the pool's file, or `("tenants", NAME, ...)` for one in a tenant's."""
        if len(path) > 1 and path[0] == "tenants":
            document = self.tenants.get(str(path[1]))
            return document.place(path[2:]) if document else None
        return self.pool.place(path)


def load(path: str | FilePath) -> Policy:
    """The policy at `path`, a file or a folder with policy.yaml in it. Raises PolicyError with every mistake."""
    return load_files(path).policy


def load_files(path: str | FilePath) -> Loaded:
    """As `load`, and keeps what it read: for who wants to say where something stands."""
    file = FilePath(path)
    file = file / POOL_FILE if file.is_dir() else file
    document = read(file)
    if document.data is None:
        raise PolicyError(document.problems)
    around = Context(tuple(entries(document.data, "tiers")), file.parent)
    tenants, missing = _tenant_documents(document, file.parent)
    pool, problems = _validated(PoolFile, document, around)
    problems += [*pool_problems(document), *missing]
    bodies: list[TenantFile] = []
    for tenant in tenants:
        body, wrong = _validated(TenantFile, tenant, around)
        problems += wrong
        bodies += [body] if body else []
    problems += tenant_problems(tenants)
    if problems or pool is None:
        raise PolicyError(_in_order(problems, [document, *tenants]))
    policy = resolve(pool, bodies, _digest([document, *tenants]))
    by_name = {body.tenant: tenant for body, tenant in zip(bodies, tenants, strict=True)}
    return Loaded(policy, document, by_name)


def _tenant_documents(pool: Document, folder: FilePath) -> tuple[list[Document], list[Problem]]:
    """The files that the pool's `tenants` pattern names, sorted by name; a pattern that names none is a mistake."""
    pattern = (pool.data or {}).get("tenants")
    if not isinstance(pattern, str) or not pattern.strip() or not pattern.isprintable():
        return [], []  # absent, or reported by the pool's own validation
    files = tenant_files(pattern, folder)
    if not files:
        message = f"no file matches {printable(pattern)}; write a pattern such as tenants/*.yaml, or remove this line"
        return [], [pool.problem(("tenants",), message)]
    return [read(FilePath(name)) for name in files], []


def tenant_files(pattern: str, folder: FilePath) -> list[str]:
    """The files that a pool's `tenants` pattern names, sorted. `folder` is the one that the pool's file is in."""
    whole = pattern if FilePath(pattern).is_absolute() else str(FilePath(glob.escape(str(folder))) / pattern)
    return sorted(name for name in glob.glob(whole, recursive=True) if FilePath(name).is_file())


def _validated(model: type[M], document: Document, around: Context) -> tuple[M | None, list[Problem]]:
    problems = list(document.problems)
    if document.data is None:
        return None, problems
    try:
        return model.model_validate(document.data, context=around), problems
    except ValidationError as refused:
        return None, problems + [_problem(model, document, error) for error in refused.errors(include_url=False)]


def _problem(model: type[FileModel], document: Document, error: ErrorDetails) -> Problem:
    path, message = sentence(model, error)
    return document.problem(path, message)


def _in_order(problems: Iterable[Problem], documents: list[Document]) -> list[Problem]:
    """By file, then by line; what was found twice, once."""
    order = {document.file: index for index, document in enumerate(documents)}

    def where(problem: Problem) -> tuple[int, int]:
        return (order[problem.place.file], problem.place.line) if problem.place else (0, 0)

    return sorted(dict.fromkeys(problems), key=where)


def _digest(documents: list[Document]) -> str:
    """Changes when any file's own name or content does; the folder's place does not count, so replicas agree."""
    whole = hashlib.sha256()
    for document in documents:
        for part in (os.fsencode(FilePath(document.file).name), document.content):
            whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:12]
