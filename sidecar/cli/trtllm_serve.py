"""Run the real trtllm-serve with the middleware mounted in its app.

Every argument but --policy is trtllm-serve's own; `trtllm-serve --help` lists them. The engine gets the granted
priority on every endpoint, responses and messages included. It orders its queue by it only with
`scheduler_config: {waiting_queue_policy: priority}` in the file given by --config.

SIDECAR_STORE, SIDECAR_ADMIN_PORT and OTEL_* are read from the environment.
"""

from __future__ import annotations

import argparse

from sidecar.cli.launching import configure, launch

EXAMPLE = "  sidecar trtllm-serve MODEL --policy policies/ --config serve.yaml --tp_size 4 --port 8000"
PASSES_ON = True
__all__ = ["EXAMPLE", "PASSES_ON", "configure", "run"]


def run(args: argparse.Namespace) -> int:
    """Serves until the real command ends. Returns 1 where it was not started, with one line that says why."""
    from sidecar.launchers import trtllm

    return launch(trtllm.run, args)
