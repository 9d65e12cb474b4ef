"""Say what enforcing the policy would have done to the requests that passed in `mode: observe`.

Reads the admin port of a running door (sidecar serve, or SIDECAR_ADMIN_PORT where it is mounted), and sends the token
in SIDECAR_ADMIN_TOKEN or SIDECAR_ADMIN_TOKEN_FILE along. Nobody was held and nothing was refused: the figures are of
what would have been. Counting begins when the process does, and anew with every change of the policy.
"""

from __future__ import annotations

import argparse
import sys

from sidecar.cli.admin import ADMIN, CannotSee, admin_url, page_of
from sidecar.cli.output import STANDARD_OUTPUT, unwritable, write_json

EXAMPLE = """  sidecar observed
  sidecar observed --admin http://10.0.0.7:9464 --json observed.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    add("--admin", type=admin_url, default=ADMIN, metavar="URL", help="the door's admin port (default %(default)s)")
    add("--json", metavar="FILE", help="write the same figures as JSON as well, - for standard output alone")


def run(args: argparse.Namespace) -> int:
    """Prints the report. Returns 1 where the admin port does not answer, or the figures cannot be written."""
    from sidecar.live.observed import ObservedReport
    from sidecar.live.observed_table import table

    if (problem := unwritable(args.json)) is not None:
        print(f"sidecar observed: {problem}", file=sys.stderr)
        return 1
    try:
        report = page_of(args.admin, "/observed", ObservedReport)
    except CannotSee as refusal:
        print(f"sidecar observed: {refusal}", file=sys.stderr)
        return 1
    if args.json != STANDARD_OUTPUT:
        print("\n".join(table(report)))
    return 0 if write_json(args.json, report) else 1
