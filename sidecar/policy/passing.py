"""`mode: pass`: every request passes, whatever is wrong with the rest of the policy. See docs/roll-out.md.

The environment or one line of the pool's file asks for it. A process that starts so does not need a policy without
mistakes: it has a bare one then, with no more than what passing needs, and changes to another by a restart.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from sidecar.policy.choices import Mode
from sidecar.policy.compiler import Loaded, load_files, pool_file, resolve
from sidecar.policy.declared import Context
from sidecar.policy.model import BARE, is_forced
from sidecar.policy.pool_file import PoolFile
from sidecar.policy.problems import PolicyError
from sidecar.policy.source import LARGEST_FILE_BYTES, Document, read
from sidecar.policy.validate import entries, pool_problems, read_record

_LINE = re.compile(rb"""^mode:[ \t]*(["']?)pass\1[ \t]*(#.*)?\r?$""", re.MULTILINE)
_ENGINES = ("engine", "engines", "models", "forward_key")
_LEFT_OUT = frozenset(("capacity", "tenants", "store", "stored_tenants", "usage_days", "tokenizer", "jwt", "mode"))
_log = logging.getLogger("sidecar.policy")


def says_pass(path: str | FilePath) -> bool:
    """True if the pool's file has the line `mode: pass`, and be the rest no policy. Reads the disk."""
    try:
        with pool_file(path).open("rb") as file:
            return _LINE.search(file.read(LARGEST_FILE_BYTES)) is not None
    except OSError:
        return False


def load_or_pass(path: str | FilePath, environment: Mapping[str, str]) -> Loaded:
    """As `load_files`. Where every request is to pass, no mistake raises, and the policy is bare."""
    if is_forced(environment):
        return bare(path)
    try:
        return load_files(path)
    except PolicyError as mistakes:
        if not says_pass(path):
            raise
        one_line = "; ".join(str(mistakes).splitlines())
        _log.error("the policy cannot be used, and is passed over: %s", one_line, extra={"event": "policy_rejected"})
        return bare(path)


def bare(path: str | FilePath) -> Loaded:
    """A policy for `mode: pass` alone: as much of the file as can be used, without tenants and without a store.

    An empty path is no file.
    """
    file = pool_file(path)
    document = read(file) if path else Document("", b"", None)
    for data in _attempts(document.data or {}):
        tried = replace(document, data=data, problems=())
        pool, _ = read_record(PoolFile, data, Context(tuple(entries(data, "tiers")), file.parent))
        if pool is not None and not pool_problems(tried):
            return Loaded(resolve(pool, (), BARE), tried, {})
    raise AssertionError("the last attempt has nothing of the file")


def _attempts(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All that passing can use; then the engines, and who is known without a key; then nothing of the file."""
    is_open = written.get("anonymous") not in (None, "deny")
    for kept in ([key for key in written if key not in _LEFT_OUT], (*_ENGINES, "gateway"), _ENGINES, ()):
        data = {"engine": "none", "tiers": {"normal": {}}, "usage_days": 0, "mode": Mode.PASS.value}
        data |= {"anonymous": "normal"} if is_open else {}
        data |= {key: written[key] for key in kept if key in written}
        yield data if "engines" in data else {**data, "capacity": {"requests": 1}}
