"""Run the real trtllm-serve with the door mounted in its app.

Every argument but --policy is trtllm-serve's own; `trtllm-serve --help` lists them. The granted priority is handed to
the engine for every endpoint, responses and messages included. The engine orders its queue by it only with
`scheduler_config: {waiting_queue_policy: priority}` in the file given by --config.

SIDECAR_STORE, SIDECAR_ADMIN_PORT and OTEL_* are read from the environment.
"""

from __future__ import annotations

import argparse
import sys

EXAMPLE = "  sidecar trtllm-serve MODEL --policy policies/ --config serve.yaml --tp_size 4 --port 8000"
PASSES_ON = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument("--policy", metavar="PATH", help="policy.yaml, or the folder it is in (default SIDECAR_POLICY)")


def run(args: argparse.Namespace) -> int:
    """Serves until the real command ends. Returns 1 where it was not started, with one line that says why."""
    from sidecar.policy.problems import PolicyError
    from sidecar.servers import trtllm
    from sidecar.servers.starting import CannotStart

    try:
        trtllm.run(args.policy, args.passed_on)
    except (CannotStart, PolicyError) as error:
        print(f"sidecar: {error}", file=sys.stderr)
        return 1
    return 0
