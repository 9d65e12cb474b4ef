"""How many server processes serve one engine: each has a queue of its own, unless they keep one pool in a store."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.asgi.types import Scope

PROCESSES_VARIABLE = "SIDECAR_PROCESSES"
"""Set by whoever starts several processes of a server that does not tell its app so."""


def processes(scope: Scope, environment: Mapping[str, str]) -> int:
    """As the server or the environment says it; 1 where neither does. Raises ValueError for what is no number."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    told = getattr(arguments, "api_server_count", None)  # vLLM's; None where there is one process
    if isinstance(told, int):
        return max(1, told)
    written = environment.get(PROCESSES_VARIABLE, "").strip() or "1"
    if not written.isdecimal() or int(written) < 1:
        raise ValueError(f"{PROCESSES_VARIABLE}: {written!r} is no number of processes; write 1 or more")
    return int(written)


def refuse_separate_pools(count: int) -> None:
    """For processes without a store. Raises ValueError where there are several."""
    if count > 1:
        raise ValueError(
            f"{count} server processes share this engine, and each would admit a whole pool of its own: "
            "set SIDECAR_STORE=redis://HOST:6379/0 so that they share one, start a single server process, "
            "or run `sidecar serve` in front"
        )
