"""Run the real SGLang server with the door mounted in its app.

Every argument but --policy is SGLang's own; `sglang serve --help` lists them. The engine orders its queue by the
priority that it is sent only with --enable-priority-scheduling. With --tokenizer-worker-num above 1 the worker
processes must share their pool: set SIDECAR_STORE.

SIDECAR_STORE, SIDECAR_ADMIN_PORT and OTEL_* are read from the environment.
"""

from __future__ import annotations

import argparse
import sys

EXAMPLE = "  sidecar sglang-serve MODEL --policy policies/ --enable-priority-scheduling --default-priority-value 0"
PASSES_ON = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument("--policy", metavar="PATH", help="policy.yaml, or the folder it is in (default SIDECAR_POLICY)")


def run(args: argparse.Namespace) -> int:
    """Serves until the real server ends. Returns 1 where it was not started, with one line that says why."""
    from sidecar.policy.problems import PolicyError
    from sidecar.servers import sglang
    from sidecar.servers.starting import CannotStart

    try:
        sglang.run(args.policy, args.passed_on)
    except (CannotStart, PolicyError) as error:
        print(f"sidecar: {error}", file=sys.stderr)
        return 1
    return 0
