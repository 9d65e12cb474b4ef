"""Say which tier a request gets and why, or why a request that was sent had to wait.

With POLICY (or SIDECAR_POLICY) and --path the command takes the same decisions as the middleware, with the same code,
for an empty pool.
The exit code is 0 for a request that would be admitted, 1 for one that would be refused, or for an invalid policy.

With --request it asks a running sidecar, on its admin port, how that request fared and which requests were admitted
before it. The token in SIDECAR_ADMIN_TOKEN or SIDECAR_ADMIN_TOKEN_FILE is sent along. The exit code is 0 where the
sidecar knows the request, else 1.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from sidecar.cli.admin_client import admin_url
from sidecar.cli.arguments import ADMIN, NoPolicy, add_key, add_policy, policy_path

EXAMPLE = """  sidecar explain policies/ --path /v1/chat/completions --key-file key.txt --header 'x-priority: high'
  sidecar explain policies/ --path /v1/completions --body request.json --json -
  sidecar explain --request 4f0c3a517d2e4b1c8a6f9b0d2c1e3a57"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the two ways to ask."""
    parser.set_defaults(refuse=parser.error)
    would = parser.add_argument_group("what a request would get")
    add = would.add_argument
    add_policy(would)
    add("--path", metavar="P", help="the request's path, e.g. /v1/chat/completions")
    add_key(would, "its API key, sent as Authorization: Bearer", metavar="K")
    add("--header", action="append", default=[], type=_header, metavar="'N: V'", help="a header; may be repeated")
    add("--client", metavar="ADDRESS", help="the address that it comes from, for a policy with `gateway`")
    add("--body", metavar="FILE", help="its JSON body; - reads standard input (default: a small valid one)")
    did = parser.add_argument_group("how a request fared")
    did.add_argument("--request", metavar="ID", help="its x-request-id, as the answer said it, or its trace id")
    help_admin = f"the sidecar's admin port; repeat it for replicas (default {ADMIN})"
    did.add_argument("--admin", action="append", type=admin_url, metavar="URL", help=help_admin)
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON; - writes it to standard output")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where the request would be let in, or is known; else 1."""
    _refuse_what_does_not_go_together(args)
    if args.request is None:
        from sidecar.cli import explain_policy

        return explain_policy.run(args)
    from sidecar.cli import explain_request

    return explain_request.run(args.request.strip(), args.admin or [ADMIN], args.json)


def _refuse_what_does_not_go_together(args: argparse.Namespace) -> None:
    would = [
        name
        for name in ("path", "key", "key-file", "header", "client", "body")
        if getattr(args, name.replace("-", "_"))
    ]
    if args.request is None:
        if args.policy is None and args.path is None:
            _refuse(args, "give POLICY and --path for what a request would get, or --request ID for how one fared")
        if args.path is None:
            _refuse(args, "POLICY needs --path as well, e.g. --path /v1/chat/completions")
        try:
            args.policy = policy_path(args.policy)
        except NoPolicy as missing:
            _refuse(args, str(missing))
        if args.admin:
            _refuse(args, "--admin goes with --request: POLICY is explained without a running sidecar")
    elif args.policy is not None:
        _refuse(args, "POLICY and --request do not go together: --request asks a running sidecar")
    elif would:
        _refuse(args, f"--{would[0]} does not go with --request, which is about a request that was sent")
    elif not args.request.strip():
        _refuse(args, "--request is empty: give the x-request-id that the answer said, or the trace id")


def _refuse(args: argparse.Namespace, mistake: str) -> NoReturn:
    args.refuse(mistake)
    raise AssertionError("argparse has ended the program")


def _header(text: str) -> tuple[bytes, bytes]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no header; write 'name: value'")
    return name.strip().lower().encode("latin-1", "replace"), value.strip().encode("utf-8", "surrogateescape")
