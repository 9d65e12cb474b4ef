"""Checks of every launcher before a server spends minutes on its model: policy, store, processes, admin ports."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from sidecar.admin.port import try_ports
from sidecar.composition.stores import find_store
from sidecar.engines import Engine, NoPriorityEngine
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.model import Policy, is_forced
from sidecar.policy.passing import load_or_pass
from sidecar.policy.warnings import warnings
from sidecar.server import CannotServe
from sidecar.server.workers import PROCESSES_VARIABLE, ServerProcesses, refuse_several

TRIED_VARIABLE = "SIDECAR_ADMIN_PORTS_TRIED"
"""Set for processes that run the launcher again (TensorRT-LLM's further frontends), when the first may listen."""

logger = logging.getLogger(__name__)


class CannotLaunch(Exception):
    """The server was not started. The message is one line for the operator."""


def begin(policy_path: str | None, engine: type[Engine]) -> Policy:
    """Loads the policy, logs its warnings, and writes its path into the environment for the server's processes.

    Raises CannotLaunch, or PolicyError with every mistake of the files.
    """
    path = policy_path or os.environ.get(POLICY_VARIABLE, "")
    if not path and not is_forced(os.environ):
        raise CannotLaunch(f"no policy: give --policy PATH or set {POLICY_VARIABLE} to a policy file or its folder")
    loaded = load_or_pass(path, os.environ)
    if loaded.policy.is_bare:
        os.environ[POLICY_VARIABLE] = os.path.abspath(path) if path else ""
        return loaded.policy
    if loaded.policy.engine not in {engine, NoPriorityEngine}:
        raise CannotLaunch(f"the policy is for {loaded.policy.engine.name}; write `engine: {engine.name}` in {path}")
    for warning in warnings(loaded.policy, loaded.place):
        logger.warning("sidecar: warning: %s", warning, extra={"event": "policy_warning"})
    os.environ[POLICY_VARIABLE] = os.path.abspath(path)
    return loaded.policy


def announce_processes(count: int, policy: Policy) -> None:
    """Writes the number of processes into the environment, for each of them.

    Raises CannotLaunch where they would not share a pool, or where one of them would not get its admin port.
    """
    try:
        is_shared = policy.is_bare or find_store(policy, os.environ) is not None
        refuse_several(ServerProcesses(count), is_shared=is_shared, is_engine=policy.engines is not None)
        if TRIED_VARIABLE not in os.environ:
            try_ports(os.environ, count)
    except (CannotServe, ValueError) as mistake:
        raise CannotLaunch(str(mistake)) from None
    os.environ |= {PROCESSES_VARIABLE: str(count), TRIED_VARIABLE: "1"}


def imported(module: str, install: str) -> Any:
    """Imports a module of the server. Raises CannotLaunch; `install` says how to install a missing package."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise CannotLaunch(f"{package} is not installed in this environment ({sys.prefix}): {install}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CannotLaunch(f"{package} is installed, but {module} cannot be imported: {error}") from error


def count_given(arguments: Sequence[str], option: str) -> int:
    """The last number given for an option on another program's command line; 1 where none is given."""
    count = 1
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            text = value if equals else "".join(arguments[index + 1 : index + 2])
            count = int(text) if text.isdecimal() else count
    return count
