"""Play a trace in virtual time before engines that are a step model, and compare policies on it.

TRACE is a file (mooncake_trace JSONL, or Azure's LLM inference CSV), or the built-in burst, as for `sidecar replay`.
The scheduler, the pools, the placement and the learned lengths are the product's; nothing is sent anywhere. The exit
code is 2 for a command line, a trace, a policy or an engine model that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from sidecar.cli.arguments import number, policy_path, whole_number
from sidecar.cli.output import CommandFailed, require_writable, say, write_json, write_text
from sidecar.cli.replay import mix
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.choices import Order
from sidecar.policy.compiler import load_files
from sidecar.policy.problems import PolicyError
from sidecar.tools.replay.plan import BadTier, ladder
from sidecar.tools.replay.trace import BadTrace, read_trace
from sidecar.tools.simulate.baselines import NAMES, ROUTERS, names
from sidecar.tools.simulate.comparison import (
    ComparedPolicy,
    Rate,
    Setting,
    by_policy,
    find_rates,
    offered_tiers,
)
from sidecar.tools.simulate.comparison import run as run_one
from sidecar.tools.simulate.figures import RunResult, unused_keys
from sidecar.tools.simulate.load import Assign, check
from sidecar.tools.simulate.report import guarded, highest_rates, policies, report, tiers
from sidecar.tools.step_model.model import DEFAULT, BadEngineModel, load_model, shipped
from sidecar.tools.text import table

EXAMPLE = """  sidecar simulate azure_conv.csv policies/ --engines 4 --scale 7.5 --mix high=20,batch=80
  sidecar simulate conversation.jsonl now/ planned/ --baselines --report planned.html
  sidecar simulate azure_conv.csv policies/ --engines 4 --find-rate --seeds 1 --json -"""
MOST_SEEDS, MOST_ENGINES = 100, 256
MOST_SCALE = 1e6


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace's file, or burst, burst:N, burst:N:INPUT:OUTPUT")
    add("policies", nargs="*", metavar="POLICY",
        help=f"policy files or folders, which are compared (default {POLICY_VARIABLE})")  # fmt: skip
    add("--policy", action="append", default=[], metavar="DIR", help="the same as an option; repeated")
    add(
        "--engines",
        type=whole_number("number of engines", 1, MOST_ENGINES),
        default=1,
        metavar="N",
        help="engines of the pool (default %(default)s)",
    )
    add("--engine-model", default=DEFAULT, metavar="FILE",
        help=f"the engine's step model, a file or one of {', '.join(shipped())} (default {DEFAULT})")  # fmt: skip
    add(
        "--scale",
        type=number("factor", MOST_SCALE),
        default=1.0,
        metavar="X",
        help="times as many requests a second (default 1)",
    )
    add("--mix", type=mix, metavar="high=20,normal=50,batch=30",
        help="tiers of rows without one (default: all of the policy alike)")  # fmt: skip
    add("--assign", type=Assign, choices=list(Assign), default=Assign.REQUEST, metavar="request|tenant",
        help="what gets a tier: each request (default), or each of 20 tenants")  # fmt: skip
    add("--order", type=Order, choices=list(Order), metavar="level|gain",
        help="the order of waiting requests (default: the policy's)")  # fmt: skip
    add("--patience", type=number("time in seconds"), metavar="SECONDS",
        help="clients leave after so long without a first token (default: none leaves)")  # fmt: skip
    add("--baselines", action="store_true",
        help=f"also play {', '.join(NAMES)}, on the first policy's tiers; before several engines also "
        + ", ".join(ROUTERS))  # fmt: skip
    add(
        "--seeds",
        type=whole_number("number of runs", 1, MOST_SEEDS),
        default=5,
        metavar="N",
        help="runs of each, with other tiers (default %(default)s)",
    )
    add("--find-rate", action="store_true",
        help="the highest --scale at which every tier's SLO holds, for 90%% and 99%% of its requests")  # fmt: skip
    add("--json", metavar="FILE", help="also write all figures as JSON, - for standard output")
    add("--report", metavar="FILE.html", help="also write a page, which needs no network")


def run(args: argparse.Namespace) -> int:
    """Plays every policy. Returns 2 where something cannot be used, 1 where a file cannot be written."""
    for path in (args.json, args.report):
        require_writable(path)
    try:
        setting, candidates = _prepare(args)
    except (BadTrace, PolicyError, BadTier, BadEngineModel) as error:
        raise CommandFailed(str(error), 2) from None
    out: TextIO = sys.stderr if "-" in (args.json, args.report) else sys.stdout
    heading = _heading(setting, candidates)
    say("\n".join(heading), out)
    results: list[RunResult] = []
    rates: list[Rate] = []
    for candidate in candidates:
        results += [run_one(setting, candidate, seed, setting.scale) for seed in range(1, setting.seeds + 1)]
        if args.find_rate:
            rates += find_rates(setting, candidate)
    runs = by_policy(results)
    for columns, rows in (policies(runs), tiers(runs), guarded(runs)):
        if rows:
            say("\n".join(["", *table([columns, *rows], left=(0, 1))]), out)
    if rates:
        columns, rows = highest_rates(rates)
        say("\n".join(["", *table([columns, *rows])]), out)
    figures = {"runs": results, **({"rates": rates} if args.find_rate else {})}
    written = write_json(args.json, figures)
    written &= write_text(args.report, lambda: report(heading, candidates, results, rates))
    return 0 if written else 1


def _prepare(args: argparse.Namespace) -> tuple[Setting, list[ComparedPolicy]]:
    trace = read_trace(args.trace)
    check(trace)
    paths = [*args.policies, *args.policy] or [policy_path(None)]
    own = [Path(name).resolve().name for name in paths]
    shown = [name if own.count(name) == 1 else given for name, given in zip(own, paths, strict=True)]
    files = [load_files(name) for name in paths]
    policies, written = [one.policy for one in files], [dict(one.pool.data or {}) for one in files]
    if args.order is not None:
        policies = [policy.ordered_by(args.order) for policy in policies]
        written = [{**data, "order": args.order.value} for data in written]
    for policy in policies:
        ladder(policy, args.mix, trace.rows)
    model = load_model(args.engine_model)
    setting = Setting(trace, model, args.engines, args.mix, args.assign, args.scale, args.seeds, args.patience)
    candidates = [ComparedPolicy(*one) for one in zip(shown, policies, written, strict=True)]
    for candidate in candidates:
        offered = offered_tiers(setting, candidate)
        if args.find_rate and not offered & candidate.objectives.keys():
            raise CommandFailed(
                f"--find-rate: no tier of {candidate.name} has `slo` with both ttft and tpot and gets requests, "
                "so none can meet it",
                2,
            )
    if args.baselines:
        candidates += [ComparedPolicy(name, policies[0], {}, baseline=True) for name in names(args.engines)]
    return setting, candidates


def _heading(setting: Setting, candidates: Sequence[ComparedPolicy]) -> list[str]:
    trace = setting.trace
    duration_s = max(row.at_s or 0.0 for row in trace.rows) / setting.scale
    lines = [
        f"{trace.name} ({trace.format}) x{setting.scale:g}: {len(trace.rows)} requests within {duration_s:.1f} s, "
        f"before {setting.engines} x {setting.model.name}",
        f"tiers by {setting.by.value}, {setting.seeds} {'seed' if setting.seeds == 1 else 'seeds'}; virtual time",
    ]
    if setting.patience_s is not None:
        lines.append(f"clients leave after {setting.patience_s:g} s without a first token")
    for candidate in candidates:
        if unused := unused_keys(candidate.written):
            lines.append(f"{candidate.name}: no run uses {', '.join(unused)}")
        lacking = [tier.name for tier in candidate.policy.tiers if tier.level not in candidate.objectives]
        if lacking and not candidate.baseline:
            lines.append(
                f"{candidate.name}: {', '.join(lacking)} without `slo: {{ttft, tpot}}`: no SLO and no gain is measured "
                "there, only TTFT, queue waits and refusals"
            )
    return lines
