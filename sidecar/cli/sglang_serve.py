"""Run the real SGLang server with the middleware mounted in its app.

Every argument but --policy is SGLang's own; `sglang serve --help` lists them. The engine orders its queue by priority
only with --enable-priority-scheduling. With --tokenizer-worker-num above 1 the worker processes must share their pool:
set SIDECAR_STORE.

SIDECAR_STORE, SIDECAR_ADMIN_PORT and OTEL_* are read from the environment.
"""

from __future__ import annotations

import argparse

from sidecar.cli.launching import configure, launch

EXAMPLE = "  sidecar sglang-serve MODEL --policy policies/ --enable-priority-scheduling --default-priority-value 0"
PASSES_ON = True
__all__ = ["EXAMPLE", "PASSES_ON", "configure", "run"]


def run(args: argparse.Namespace) -> int:
    """Serves until the real server ends. Returns 1 where it was not started, with one line that says why."""
    from sidecar.launchers import sglang

    return launch(sglang.run, args)
