"""The policy that we ship, as it is and with changes that a row needs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import yaml
from sidecar.policy.compiler import load, shipped_policies

from sidecar.policy.model import Policy

CRITICAL, HIGH, NORMAL, LOW, BATCH = range(5)
"""The levels of the policy that we ship. A request without a key is `low` there."""

Members = dict[str, Any]
Change = Callable[[Members], None]


@contextmanager
def shipped_files(change: Change | None = None) -> Iterator[Path]:
    """A folder with the policy that we ship, its pool's file changed."""
    with tempfile.TemporaryDirectory() as folder:
        path = copytree(shipped_policies(), Path(folder) / "policies")
        if change is not None:
            members: Members = yaml.safe_load((path / "policy.yaml").read_text())
            change(members)
            (path / "policy.yaml").write_text(yaml.safe_dump(members, sort_keys=False))
        yield path


def shipped(change: Change | None = None) -> Policy:
    """The policy that we ship, its pool's file changed."""
    with shipped_files(change) as path:
        return load(path)


def preempting(members: Members) -> None:
    """High may preempt after half a second, and everything below it may be preempted."""
    members["max_preemptions"] = 3
    members["tiers"]["high"]["preempt_after"] = "500ms"
    for name in ("normal", "low", "batch"):
        members["tiers"][name]["preemptible"] = True


def with_tiers(tiers: Mapping[str, Mapping[str, object]]) -> Change:
    """The ladder, and everything else that names one of its tiers, replaced."""

    def change(members: Members) -> None:
        first = next(iter(tiers))
        members.update(tiers={name: dict(tier) for name, tier in tiers.items()}, default_tier=first, anonymous=first)
        members.pop("aging", None)
        members.pop("tenants", None)
        members["endpoints"] = {"/v1/chat/completions": {}, "/v1/completions": {}}

    return change
