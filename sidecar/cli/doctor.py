"""Find out whether an engine's priority has an effect, and if not, why not.

The command reads what the engine says about itself. Then it sends a few short bursts of requests at mixed and at equal
priorities, and looks at the order in which they are served. It says first how much it will send; --read-only sends
nothing.

Exit codes: 0 priority was seen to work; 1 something is broken, and the text says what; 2 a wrong command line, or no
server to examine; 3 it could not be seen: too little load, or nothing was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from sidecar.cli.api_key import KEY_VARIABLE, add_key, key_given
from sidecar.cli.arguments import duration_s, server_url
from sidecar.cli.output import unwritable, write_json
from sidecar.engines import ENGINES
from sidecar.policy.compiler import load
from sidecar.secrets import ENGINE_KEY_VARIABLE
from sidecar.tools.doctor.conditions import State
from sidecar.tools.doctor.examination import Options, examine
from sidecar.tools.doctor.report import figures, report
from sidecar.tools.doctor.survey import CannotLook

EXAMPLE = """  sidecar doctor --upstream http://127.0.0.1:8000
  sidecar doctor --upstream http://127.0.0.1:8000 --policy policies/ --json doctor.json
  sidecar doctor --upstream http://127.0.0.1:8000 --read-only"""

WRONG, UNSEEN = 2, 3
_KEYS = (KEY_VARIABLE, ENGINE_KEY_VARIABLE)
_LONGEST_S = 600.0
_MOST = 4_096


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    add("--upstream", required=True, type=server_url, metavar="URL", help="the engine, e.g. http://127.0.0.1:8000")
    add("--policy", metavar="PATH", help="compare with this policy, and probe with its carrier and ladder")
    add("--json", metavar="FILE", help="also write everything as JSON, - for standard output")
    add("--read-only", "--skip-probe", action="store_true", help="only read, send no request that generates")
    engines = [name for name, engine in ENGINES.items() if engine.carriers]
    add("--engine", choices=engines, help="which engine it is, where its pages do not say")
    add("--model", help="model to ask for (default: the first one that it lists)")
    add_key(parser, "API key of the engine, or of the sidecar, sent as `Authorization: Bearer KEY`", _KEYS)
    add("--header", action="append", default=[], type=_header, metavar="NAME:VALUE", help="sent with every request")
    add("--requests", type=_requests, default=400, metavar="N", help="most in one burst; it starts small (%(default)s)")
    add("--timeout", type=_seconds, default=60.0, metavar="TIME", help="for all requests together (default 60s)")
    add("--force", action="store_true", help="probe even where that interrupts requests of others (SGLang)")


def run(args: argparse.Namespace) -> int:
    """Examines and prints. See the module for the exit codes."""
    try:
        if problem := unwritable(args.json):
            raise CannotLook(problem)
        found = asyncio.run(examine(_options(args), _say))
    except (CannotLook, ValueError) as error:
        print(f"sidecar doctor: {error}", file=sys.stderr)
        return WRONG
    if args.json != "-":
        print(report(found))
    code = {State.WORKS: 0, State.BROKEN: 1, State.UNKNOWN: UNSEEN}[found.state]
    return code if write_json(args.json, figures(found)) else WRONG


def _options(args: argparse.Namespace) -> Options:
    """The arguments as options. Raises ValueError, PolicyError included, for what cannot be read."""
    headers = dict(args.header)
    variables = () if "authorization" in headers else _KEYS
    key, _ = key_given(args.key, args.key_file, variables=variables)
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return Options(
        url=args.upstream,
        policy=None if args.policy is None else load(args.policy),
        engine=None if args.engine is None else ENGINES[args.engine],
        model=args.model,
        headers=headers,
        most=args.requests,
        allowed_s=args.timeout,
        reads_only=args.read_only,
        force=args.force,
    )


def _say(line: str) -> None:
    print(f"sidecar doctor: {line}", file=sys.stderr, flush=True)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no header; write one like x-team: search")
    return name.strip().lower(), value.strip()


def _requests(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a burst; write a number from 1 to {_MOST}")
    return int(text)


def _seconds(text: str) -> float:
    """A time such as 90s; a bare number is taken as seconds."""
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else duration_s(text)
    if not 1 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time for a probe; write one from 1s to {_LONGEST_S:g}s")
    return seconds
