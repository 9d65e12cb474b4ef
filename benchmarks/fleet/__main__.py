"""Several engines behind one pool: routers compared on the same engines, and what happens when things break.

    python -m benchmarks.fleet routers [--only NAME]... [--also NAME=COMMAND]... [--seeds 1] [--json FILE]
    python -m benchmarks.fleet SCENARIO [--router NAME] [--json FILE]

Emulated engines with prefix caches, a router, and the load are processes on loopback. See benchmarks/README.md for the
scenarios. The command fails where a check is missed or could not be made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fleet import comparison, scenarios
from benchmarks.fleet.routers import OURS, NotStarted
from benchmarks.fleet.runs import written
from benchmarks.fleet.setting import TRACE, Setting
from benchmarks.fleet.verdict import Verdict, summary
from benchmarks.fleet_routers import RULES

USUAL = Setting()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    routers = commands.add_parser("routers", help="the comparison of routers")
    routers.add_argument("--also", action="append", default=[], metavar="NAME=COMMAND", help="any other program")
    routers.add_argument("--only", action="append", choices=[*RULES, OURS], help="repeatable (default: all)")
    routers.add_argument("--seeds", type=int, nargs="+", default=[1])
    routers.add_argument("--rate", type=float, default=USUAL.rate, help="times the trace's own (default: %(default)s)")
    routers.add_argument("--requests", type=int, default=USUAL.requests)
    routers.add_argument("--compression", type=float, default=USUAL.compression, help="trace seconds in a real one")
    for name, scenario in scenarios.SCENARIOS.items():
        one = commands.add_parser(name, help=scenario.title)
        one.add_argument("--router", default=OURS, help="a baseline shows what the scenario does to it")
        one.add_argument("--seed", type=int, default=1)
    for command in commands.choices.values():
        command.add_argument("--trace", type=Path, default=TRACE)
        command.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Returns 1 where a check is missed or could not be made, 2 without a trace."""
    args = _arguments()
    if not args.trace.is_file():
        print(f"no trace at {args.trace}: give --trace")
        return 2
    try:
        verdicts, document = _compared(args) if args.command == "routers" else _scenario(args)
    except NotStarted as error:
        print(error)
        return 1
    print(f"\n{summary(verdicts)}")
    if args.json:
        args.json.write_text(written({"checks": [str(verdict) for verdict in verdicts], **document}))
    return 0 if all(verdict.is_met for verdict in verdicts) else 1


def _compared(args: argparse.Namespace) -> tuple[Sequence[Verdict], dict[str, object]]:
    setting = Setting(trace=args.trace, requests=args.requests, rate=args.rate, compression=args.compression)
    names = [*(args.only or [*RULES, OURS]), *args.also]
    print(
        f"{setting.requests:,} requests at {setting.rate:g} times their own rate on {setting.engines} engines of "
        f"{setting.cache_tokens:,} tokens; lengths times {setting.scale:g}, {setting.compression:g} times as fast\n"
    )
    runs = comparison.compare(names, args.seeds, setting)
    return comparison.judge(runs, setting), {"runs": [run.document() for run in runs]}


def _scenario(args: argparse.Namespace) -> tuple[Sequence[Verdict], dict[str, object]]:
    scenario = scenarios.SCENARIOS[args.command]
    print(f"{scenario.title}: {args.router}\n")
    verdicts = scenario.run(args.router, Setting(trace=args.trace, seed=args.seed))
    return verdicts, {"router": args.router, "scenario": args.command}


if __name__ == "__main__":
    sys.exit(main())
