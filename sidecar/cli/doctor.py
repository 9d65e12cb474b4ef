"""Find out whether an engine's priority has an effect, and if not, why not.

The command reads what the engine says about itself. Then it sends a few short bursts of requests at mixed and at equal
priorities, and looks at the order in which they are served. It says first how much it will send; --read-only sends
nothing.

Without --upstream it examines each engine that the policy names, lists, or finds by DNS, one after another, and then
whether they fit together: two names for one server, models that differ, caches that are off.

With --engine-model it sends other requests and looks at their times instead, and writes a file for `sidecar simulate`.
The exit code is 0 where the file was written, else 2.

Exit codes: 0 priority was seen to work; 1 something is broken, and the text says what; 2 a wrong command line, or no
server to examine; 3 it could not be seen: too little load, or nothing was sent. Of several engines the first of 1, 2
and 3 that is true of one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sidecar.cli.arguments import KEY_VARIABLE, OneEngine, add_key, duration_s, key_given, server_url, whole_number
from sidecar.cli.output import CommandFailed, require_writable, say, write_json
from sidecar.engines import ENGINES
from sidecar.policy.compiler import load, read_engine_list
from sidecar.policy.fleet import DnsService, EngineAddress, FleetPolicy
from sidecar.policy.model import Policy
from sidecar.policy.secrets import ENGINE_KEY_VARIABLE
from sidecar.tools.doctor.conditions import ConditionState
from sidecar.tools.doctor.examination import Finding, Options, examine
from sidecar.tools.doctor.report import figures, report, report_of_several
from sidecar.tools.doctor.several_engines import ExaminedEngine, capacity, find_places, findings, rows
from sidecar.tools.doctor.survey import CannotLook

EXAMPLE = """  sidecar doctor --upstream http://127.0.0.1:8000
  sidecar doctor --upstream http://127.0.0.1:8000 --policy policies/ --json doctor.json
  sidecar doctor --upstream http://127.0.0.1:8000 --read-only
  sidecar doctor --policy policies/                  each engine that the policy names
  sidecar doctor --upstream http://127.0.0.1:8000 --engine-model engine.yaml"""

WRONG, UNSEEN = 2, 3
_KEYS = (KEY_VARIABLE, ENGINE_KEY_VARIABLE)
_LONGEST_S = 600.0
_MOST = 4_096


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.set_defaults(refuse=parser.error)
    add = parser.add_argument
    upstream = "the engine, e.g. http://127.0.0.1:8000 (default: each that the policy names)"
    add("--upstream", type=server_url, action=OneEngine, metavar="URL", help=upstream)
    add("--policy", metavar="PATH", help="compare with this policy, and probe with its carrier and ladder")
    add("--json", metavar="FILE", help="also write everything as JSON, - for standard output")
    add("--read-only", "--skip-probe", action="store_true", help="only read, send no request that generates")
    engines = [name for name, engine in ENGINES.items() if engine.carriers]
    add("--engine", choices=engines, help="which engine it is, where its pages do not say")
    add("--model", help="model to ask for (default: the first one that it lists)")
    add_key(parser, "API key of the engine, or of the sidecar, sent as `Authorization: Bearer KEY`", _KEYS)
    add("--header", action="append", default=[], type=_header, metavar="NAME:VALUE", help="sent with every request")
    burst = whole_number("size of a burst", 1, _MOST)
    add("--requests", type=burst, default=400, metavar="N", help="most in one burst; it starts small (%(default)s)")
    add("--timeout", type=_seconds, default=60.0, metavar="TIME", help="for all requests together (default 60s)")
    speed = "measure the engine's speed instead, and write FILE for `sidecar simulate --engine-model FILE`"
    add("--engine-model", metavar="FILE", help=speed)
    add("--force", action="store_true", help="probe even where that interrupts requests of others (SGLang)")


def run(args: argparse.Namespace) -> int:
    """Examines and prints. See the module for the exit codes."""
    if args.upstream is None and args.policy is None:
        args.refuse(_GIVE_ONE)
    if args.engine_model is not None:
        _refuse_what_measures_no_speed(args)
    try:
        require_writable(args.json)
        if args.engine_model is not None:
            from sidecar.cli.doctor_engine_model import write_model

            options = _options(args, args.upstream, None)
            return 0 if write_model(options, args.engine_model, args.json, _say) else WRONG
        policy = None if args.policy is None else load(args.policy)
        if args.upstream is None:
            return _examine_each(args, with_engines(policy))
        found = asyncio.run(examine(_options(args, args.upstream, of_upstream(policy, args.upstream)), _say))
    except (CannotLook, CommandFailed, ValueError) as error:
        raise CommandFailed(str(error), WRONG) from None
    if args.json != "-":
        say(report(found))
    return _CODES[found.state] if write_json(args.json, figures(found)) else WRONG


_CODES = {ConditionState.WORKS: 0, ConditionState.BROKEN: 1, ConditionState.UNKNOWN: UNSEEN}


_GIVE_ONE = "give --upstream URL, or --policy with a policy that names its engines"


def _refuse_what_measures_no_speed(args: argparse.Namespace) -> None:
    """Ends the program for arguments that do not go with --engine-model."""
    if args.upstream is None:
        args.refuse("--engine-model is of one engine: give --upstream URL")
    for name, is_given in (("--policy", args.policy is not None), ("--read-only", args.read_only)):
        if is_given:
            args.refuse(f"{name} does not go with --engine-model, which measures the engine's speed")
    if args.json == args.engine_model:
        args.refuse("--json and --engine-model write to the same file: give two")


def with_engines(policy: Policy | None) -> Policy:
    """The policy with the engines that it names now.

    Raises CannotLook where there are none, PolicyError for a bad engine list, ValueError where dnspython is missing.
    """
    if policy is None or policy.engines is None:
        raise CannotLook(_GIVE_ONE)
    if policy.engines.mounted:
        raise CannotLook("the engines are the processes that mount the middleware: give --upstream URL of one of them")
    fleet = policy.engines
    engines = fleet.static
    if fleet.dns is not None:
        engines = tuple(asyncio.run(_named_by_dns(fleet, fleet.dns)))
    elif fleet.file is not None:
        engines = tuple(read_engine_list(policy, Path(fleet.file)))
    if not engines:
        raise CannotLook("the engine list is empty: give --upstream URL of an engine")
    return policy.of_engines(engines)


async def _named_by_dns(fleet: FleetPolicy, service: DnsService) -> Sequence[EngineAddress]:
    """Raises CannotLook, and ValueError where dnspython is missing."""
    from sidecar.fleet.dns_discovery import DnsDiscovery, LookupFailed

    try:
        return await DnsDiscovery(service, fleet.capacity, fleet.prefill).look_once()
    except LookupFailed as reason:
        raise CannotLook(
            f"DNS for {service}: {reason}; run it where the sidecar runs, or give --upstream URL of an engine"
        ) from None


def of_upstream(policy: Policy | None, url: str) -> Policy | None:
    """A policy with several engines, as it is for the one at this address."""
    if policy is None or policy.engines is None:
        return policy
    fleet = policy.engines
    other = EngineAddress(url, url, fleet.capacity, fleet.prefill)
    return policy.of_engines([next((engine for engine in fleet.static if engine.url == url), other)])


def _examine_each(args: argparse.Namespace, policy: Policy) -> int:
    """Examines one engine after another: two at once would disturb each other where they share a machine."""
    assert policy.engines is not None
    codes, found, engines = [], [], []
    for engine in policy.engines.static:
        title = f"engine {engine.name}"
        try:
            options = _options(args, engine.url, policy.of_engines([engine]))
            seen = asyncio.run(examine(options, partial(_say, about=f"{title}: ")))
        except CannotLook as error:
            say(f"sidecar doctor: {title}: {error}", sys.stderr)
            codes.append(WRONG)
            found.append({"name": engine.name, "upstream": engine.url, "verdict": None, "error": str(error)})
            engines.append(ExaminedEngine(engine, asyncio.run(find_places(engine.url)), None))
            continue
        codes.append(_CODES[seen.state])
        engines.append(ExaminedEngine(engine, asyncio.run(find_places(engine.url)), seen))
        found.append({"name": engine.name, **figures(seen)})
        if args.json != "-":
            say(f"{title}\n{report(seen)}\n")
    together = findings(policy, engines)
    seen_codes = [*codes, _CODES[ConditionState.BROKEN]] if any(one.is_broken for one in together) else codes
    worst = next((code for code in (_CODES[ConditionState.BROKEN], WRONG, UNSEEN) if code in seen_codes), 0)
    if args.json != "-":
        say(f"{report_of_several(engines, together)}\n")
        words = {code: state.value for state, code in _CODES.items()} | {WRONG: "not examined"}
        names = (engine.name for engine in policy.engines.static)
        say(f"engines: {', '.join(f'{name} {words[code]}' for name, code in zip(names, codes, strict=True))}")
    return worst if write_json(args.json, _figures_of_several(found, engines, together)) else WRONG


def _figures_of_several(
    found: Sequence[Mapping[str, Any]], engines: Sequence[ExaminedEngine], together: Sequence[Finding]
) -> dict[str, Any]:
    return {"engines": found, "together": {"rows": rows(engines), "findings": together, "capacity": capacity(engines)}}


def _options(args: argparse.Namespace, url: str, policy: Policy | None) -> Options:
    """The arguments as options. Raises ValueError for what cannot be read."""
    headers = dict(args.header)
    variables = () if "authorization" in headers else _KEYS
    key, _ = key_given(args.key, args.key_file, variables=variables)
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return Options(
        url=url,
        policy=policy,
        engine=None if args.engine is None else ENGINES[args.engine],
        model=args.model,
        headers=headers,
        most=args.requests,
        allowed_s=args.timeout,
        reads_only=args.read_only,
        force=args.force,
    )


def _say(line: str, about: str = "") -> None:
    say(f"sidecar doctor: {about}{line}", sys.stderr)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no header; write one like x-team: search")
    return name.strip().lower(), value.strip()


def _seconds(text: str) -> float:
    """A time such as 90s; a bare number is taken as seconds."""
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else duration_s(text)
    if not 1 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time for a probe; write one from 1s to {_LONGEST_S:g}s")
    return seconds
