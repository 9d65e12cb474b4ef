"""What every launcher checks before the server spends minutes on its model: policy, store, processes, admin ports."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from sidecar.admin.port import try_ports
from sidecar.app import POLICY_VARIABLE, store_of
from sidecar.asgi.server import CannotServe
from sidecar.asgi.workers import PROCESSES_VARIABLE, refuse_separate_pools
from sidecar.policy.compiler import load_files
from sidecar.policy.model import EngineName, Policy
from sidecar.policy.warnings import warnings

TRIED_VARIABLE = "SIDECAR_ADMIN_PORTS_TRIED"
"""Set for processes that run the launcher again (TensorRT-LLM's further frontends): the first may listen by then."""

logger = logging.getLogger(__name__)


class CannotStart(Exception):
    """Why the server was not started, in a line for whoever typed the command."""


def begin(policy_path: str | None, engine: EngineName) -> Policy:
    """Leaves the policy's place in the environment, where the middleware looks for it in every process of the server.

    Logs the policy's warnings. Raises CannotStart, or PolicyError with every mistake of the files.
    """
    path = policy_path or os.environ.get(POLICY_VARIABLE)
    if not path:
        raise CannotStart(f"no policy: give --policy PATH or set {POLICY_VARIABLE} to a policy file or its folder")
    loaded = load_files(path)
    if loaded.policy.engine not in {engine, EngineName.NONE}:
        raise CannotStart(f"the policy is for {loaded.policy.engine.value}; write `engine: {engine.value}` in {path}")
    for warning in warnings(loaded.policy, loaded.place):
        logger.warning("sidecar: warning: %s", warning, extra={"event": "policy_warning"})
    os.environ[POLICY_VARIABLE] = os.path.abspath(path)
    return loaded.policy


def announce_processes(count: int, policy: Policy) -> None:
    """Tells the server's processes how many they are.

    Raises CannotStart where several would not share a pool, and where one of them would not have its admin port.
    """
    try:
        if store_of(policy, os.environ) is None:
            refuse_separate_pools(count)
        if TRIED_VARIABLE not in os.environ:
            try_ports(os.environ, count)
    except (CannotServe, ValueError) as mistake:
        raise CannotStart(str(mistake)) from None
    os.environ |= {PROCESSES_VARIABLE: str(count), TRIED_VARIABLE: "1"}


def imported(module: str, install: str) -> Any:
    """A module of the server. Raises CannotStart, with how to `install` it where its package is not there at all."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise CannotStart(f"{package} is not installed in this environment ({sys.prefix}): {install}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CannotStart(f"{package} is installed, but {module} cannot be imported: {error}") from error


def count_given(arguments: Sequence[str], option: str) -> int:
    """The number given for an option on another program's command line, the last one counts; 1 where none is given."""
    count = 1
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            text = value if equals else "".join(arguments[index + 1 : index + 2])
            count = int(text) if text.isdecimal() else count
    return count
