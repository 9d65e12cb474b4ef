"""The policy that a process was given: loaded, by its path, or by the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.model import Policy, is_forced

if TYPE_CHECKING:
    from sidecar.policy.reload import PolicyFiles


def path_of(given: str | Path | None) -> str | Path:
    """The policy's path; empty where there is none."""
    return given or os.environ.get(POLICY_VARIABLE, "")


def policy_of(given: str | Path | Policy | None) -> tuple[Policy, PolicyFiles | None]:
    """The policy, and its files where it was not loaded before. Without a path SIDECAR_POLICY says where it is.

    Raises ValueError where there is none, PolicyError for its mistakes.
    """
    if isinstance(given, Policy):
        return given, None
    from sidecar.policy.passing import load_or_pass
    from sidecar.policy.reload import files_of

    path = path_of(given)
    if not path and not is_forced(os.environ):
        raise ValueError(f"no policy: pass `policy=` or set {POLICY_VARIABLE} to a policy file or its folder")
    return load_or_pass(path, os.environ).policy, files_of(path, os.environ)
