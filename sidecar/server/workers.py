"""Number of server processes for one engine: each has a queue of its own, unless they share one pool in a store."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

PROCESSES_VARIABLE = "SIDECAR_PROCESSES"
"""The number of processes, for servers that do not tell their app. The launchers set it."""


def processes(scope: Scope, environment: Mapping[str, str]) -> int:
    """The number that the server or the environment gives, else 1. Raises ValueError for an invalid number."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    count = getattr(arguments, "api_server_count", None)  # vLLM's; None where there is one process
    if isinstance(count, int):
        return max(1, count)
    written = environment.get(PROCESSES_VARIABLE, "").strip() or "1"
    if not written.isdecimal() or int(written) < 1:
        raise ValueError(f"{PROCESSES_VARIABLE}: {written!r} is no number of processes; write 1 or more")
    return int(written)


def refuse_separate_pools(count: int) -> None:
    """Raises ValueError for several processes without a store."""
    if count > 1:
        raise ValueError(
            f"{count} server processes share this engine, and each would admit a whole pool of its own: "
            "set SIDECAR_STORE=redis://HOST:6379/0 so that they share one, start a single server process, "
            "or run `sidecar serve` in front"
        )
