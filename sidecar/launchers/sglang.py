"""Launcher of SGLang's HTTP server with the middleware in its app, which also hands the granted priority to its engine.

The app is a module's attribute. Worker processes import it by the name in an environment variable, which is set to
`sidecar.launchers.sglang_app`. SGLang adds its own API key check later, so that check runs before the middleware.
Read from SGLang 0.5.23: launch_server.py, cli/serve.py, srt/entrypoints/http_server.py, srt/environ.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from sidecar.engines import NoPriorityEngine, Sglang
from sidecar.launchers.checks import CannotLaunch, announce_processes, begin, imported

INSTALL = "install SGLang as its documentation says, or run `sidecar serve` in front of a server elsewhere"
APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
APP = "sidecar.launchers.sglang_app:app"
logger = logging.getLogger(__name__)
_RUST_VARIABLE = "SGLANG_RUST_SERVER"
_SKIP_WARMUP = "--skip-server-warmup"
_TRUE = frozenset(("true", "1", "yes", "y"))
_UNSUPPORTED = {
    "enable_http2": "--enable-http2 serves with Granian, with which the middleware is not tested",
    "grpc_mode": "--grpc-mode serves no HTTP",
    "smg_grpc_mode": "--smg-grpc-mode serves no HTTP",
    "grpc_port": "--grpc-port opens a port without admission",
    "encoder_only": "--encoder-only is another server",
    "use_ray": "--use-ray starts another server",
}
"""Arguments of the server with which requests would bypass the app, or reach it in an untested way."""


def run(policy_path: str | None, arguments: Sequence[str]) -> None:
    """Runs the real server with `arguments` until it ends. Raises CannotLaunch or PolicyError."""
    policy = begin(policy_path, Sglang)
    if os.environ.get(_RUST_VARIABLE, "").lower() in _TRUE:
        raise CannotLaunch(f"{_RUST_VARIABLE} serves without the Python app; unset it, or run `sidecar serve` in front")
    if os.environ.get(APP_VARIABLE, APP) != APP:
        raise CannotLaunch(f"{APP_VARIABLE} names another app, and the sidecar's has to be there; unset it")
    launching = imported("sglang.launch_server", INSTALL)
    server_args = imported("sglang.srt.server_args", INSTALL).prepare_server_args(_arguments(arguments))
    for name, why in _UNSUPPORTED.items():
        if getattr(server_args, name, None):
            raise CannotLaunch(f"{why}; leave it away, or run `sidecar serve` in front")
    if policy.engine is not NoPriorityEngine and not getattr(server_args, "enable_priority_scheduling", True):
        logger.warning(
            "sidecar: the engine serves its waiting queue first come, first served, and is told no priorities; start "
            "it with --enable-priority-scheduling --default-priority-value 0",
            extra={"event": "engine_priority"},
        )
    announce_processes(int(getattr(server_args, "tokenizer_worker_num", 1)), policy)
    os.environ[APP_VARIABLE] = APP
    imported("sidecar.launchers.sglang_app", INSTALL)
    try:
        launching.run_server(server_args)
    finally:  # as its own command does, because the engine's processes would stay
        imported("sglang.srt.utils", INSTALL).kill_process_tree(os.getpid(), include_parent=False)


def _arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `python -m sglang.launch_server`.

    `sglang serve MODEL` takes the model without its option, which that command does not. And the server must not warm
    itself up: its own POST /generate would be refused as a request without a key or an admission, and then it ends
    itself (`http_server.py`: `_execute_server_warmup`). `--warmups` are no requests over HTTP, and stay possible.
    """
    model = ["--model-path"] if arguments and not arguments[0].startswith("-") else []
    return [*model, *arguments, _SKIP_WARMUP]
