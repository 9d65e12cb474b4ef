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

from msgspec.structs import replace

from sidecar.cli.arguments import NoPolicy, policy_path
from sidecar.cli.output import aligned, unwritable, write_json, write_text
from sidecar.cli.replay import mix
from sidecar.policy import POLICY_VARIABLE
from sidecar.policy.compiler import load_files
from sidecar.policy.model import Order
from sidecar.policy.problems import PolicyError
from sidecar.tools.replay.plan import BadTier, ladder
from sidecar.tools.replay.trace import LONGEST_S, BadTrace, read_trace
from sidecar.tools.simulate.baselines import NAMES, ROUTERS, names
from sidecar.tools.simulate.comparison import (
    Candidate,
    Rate,
    Setting,
    by_policy,
    find_rates,
    offered_tiers,
    seconds,
    shown,
)
from sidecar.tools.simulate.comparison import run as run_one
from sidecar.tools.simulate.figures import RunResult
from sidecar.tools.simulate.load import Assign, check
from sidecar.tools.simulate.policy_keys import unused_keys, why_alike
from sidecar.tools.simulate.report import report
from sidecar.tools.step_model.model import DEFAULT, BadEngineModel, load_model, shipped

EXAMPLE = """  sidecar simulate azure_conv.csv policies/ --engines 4 --scale 7.5 --mix high=20,batch=80
  sidecar simulate conversation.jsonl now/ planned/ --baselines --report planned.html
  sidecar simulate azure_conv.csv policies/ --engines 4 --find-rate --seeds 1 --json -"""
MOST_SEEDS, MOST_ENGINES = 100, 256
MOST_SCALE = 1e6
MICROSECOND_S = 1e-6


class BadOrder(ValueError):
    """An order, or a search for a rate, that does not go with the rest. One line."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace's file, or burst, burst:N, burst:N:INPUT:OUTPUT")
    add("policies", nargs="*", metavar="POLICY",
        help=f"policy files or folders, which are compared (default {POLICY_VARIABLE})")  # fmt: skip
    add("--policy", action="append", default=[], metavar="DIR", help="the same as an option; repeated")
    add("--engines", type=_engines, default=1, metavar="N", help="engines of the pool (default %(default)s)")
    add("--engine-model", default=DEFAULT, metavar="FILE",
        help=f"the engine's step model, a file or one of {', '.join(shipped())} (default {DEFAULT})")  # fmt: skip
    add("--scale", type=_scale, default=1.0, metavar="X", help="times as many requests a second (default 1)")
    add("--mix", type=mix, metavar="high=20,normal=50,batch=30",
        help="tiers of rows without one (default: all of the policy alike)")  # fmt: skip
    add("--assign", type=Assign, choices=list(Assign), default=Assign.REQUEST, metavar="request|tenant",
        help="what gets a tier: each request (default), or each of 20 tenants")  # fmt: skip
    add("--order", type=Order, choices=list(Order), metavar="level|gain",
        help="the order of waiting requests (default: the policy's)")  # fmt: skip
    add("--patience", type=_patience, metavar="SECONDS",
        help="clients leave after so long without a first token (default: none leaves)")  # fmt: skip
    add("--baselines", action="store_true",
        help=f"also play {', '.join(NAMES)}, on the first policy's tiers; before several engines also "
        + ", ".join(ROUTERS))  # fmt: skip
    add("--seeds", type=_seeds, default=5, metavar="N", help="runs of each, with other tiers (default %(default)s)")
    add("--find-rate", action="store_true",
        help="the highest --scale at which every tier's SLO holds, for 90%% and 99%% of its requests")  # fmt: skip
    add("--json", metavar="FILE", help="also write all figures as JSON, - for standard output")
    add("--report", metavar="FILE.html", help="also write a page, which needs no network")


def run(args: argparse.Namespace) -> int:
    """Plays every policy. Returns 2 where something cannot be used, 1 where a file cannot be written."""
    for path in (args.json, args.report):
        if problem := unwritable(path):
            print(f"sidecar: {problem}", file=sys.stderr)
            return 1
    try:
        setting, candidates = _prepared(args)
    except (BadTrace, PolicyError) as error:
        print(error, file=sys.stderr)
        return 2
    except (BadTier, BadEngineModel, BadOrder, NoPolicy) as error:
        print(f"sidecar: {error}", file=sys.stderr)
        return 2
    out: TextIO = sys.stderr if "-" in (args.json, args.report) else sys.stdout
    heading = _heading(setting, candidates)
    print("\n".join(heading), file=out, flush=True)
    results: list[RunResult] = []
    rates: list[Rate] = []
    for candidate in candidates:
        results += [run_one(setting, candidate, seed, setting.scale) for seed in range(1, setting.seeds + 1)]
        if args.find_rate:
            rates += find_rates(setting, candidate)
    print(f"\n{chr(10).join(table(results))}", file=out)
    for line in _alike(candidates, results):
        print(f"\n{line}", file=out)
    if rates:
        print(f"\n{chr(10).join(rate_table(rates))}", file=out)
    figures = {"runs": results, **({"rates": rates} if args.find_rate else {})}
    written = write_json(args.json, figures)
    written &= write_text(args.report, lambda: report(heading, candidates, results, rates))
    return 0 if written else 1


def _prepared(args: argparse.Namespace) -> tuple[Setting, list[Candidate]]:
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
    candidates = [Candidate(*one) for one in zip(shown, policies, written, strict=True)]
    for candidate in candidates:
        offered = offered_tiers(setting, candidate)
        if args.find_rate and not offered & candidate.objectives.keys():
            raise BadOrder(
                f"--find-rate: no tier of {candidate.name} has `slo` with both ttft and tpot and gets requests, "
                "so none can meet it"
            )
    if args.baselines:
        candidates += [Candidate(name, policies[0], {}, baseline=True) for name in names(args.engines)]
    return setting, candidates


def _heading(setting: Setting, candidates: Sequence[Candidate]) -> list[str]:
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


def _alike(candidates: Sequence[Candidate], results: Sequence[RunResult]) -> list[str]:
    """A line for each policy that never differs from an earlier one, with the reason."""
    named = {candidate.name: candidate for candidate in candidates}
    played: list[tuple[Candidate, Sequence[RunResult]]] = []
    lines = []
    for runs in by_policy(results):
        one = named[runs[0].policy]
        if one.baseline:
            continue
        for other, earlier in played:
            if [replace(run, policy=other.name, order=other.order) for run in runs] == list(earlier):
                why = why_alike(other.written, one.written, runs)
                lines.append(f"{other.name} and {one.name} never differ: {why}.")
                break
        played.append((one, runs))
    return lines


def table(results: Sequence[RunResult]) -> list[str]:
    """The means over the seeds, with their 95% confidence intervals; a line for each tier."""
    has_left = any(tier.abandoned for one in results for tier in one.tiers.values())
    left = ["abandoned"] * has_left
    rows = [
        ["policy", "TDG", "SLO", "weighted SLO", "TTFT p50 s", "TTFT p99 s", "longest wait s", "refused", *left, "KV"]
    ]
    for runs in by_policy(results):
        rows.append(
            [
                runs[0].policy,
                *(shown([getattr(one, name) for one in runs]) for name in ("tdg", "slo", "weighted_slo")),
                "", "", "", "", *[""] * has_left,
                f"{sum(one.utilization for one in runs) / len(runs):.2f}",
            ]
        )  # fmt: skip
        for name in runs[0].tiers:
            tiers = [one.tiers[name] for one in runs if name in one.tiers]
            rows.append(
                [
                    f"  {name}",
                    shown([one.tdg for one in tiers]),
                    shown([one.slo for one in tiers]),
                    "",
                    seconds([one.ttft_s.p50 for one in tiers]),
                    seconds([one.ttft_s.p99 for one in tiers]),
                    seconds([one.queue_wait_s.max for one in tiers]),
                    str(sum(one.refused for one in tiers)),
                    *[str(sum(one.abandoned for one in tiers))] * has_left,
                    "",
                ]
            )
    return aligned(rows)


def rate_table(rates: Sequence[Rate]) -> list[str]:
    """The highest rates."""
    rows = [["highest rate", "met by", "scale", "requests/s"]]
    for one in rates:
        scale = "none" if one.scale is None else f"{'at least ' * one.is_bound}{one.scale:.2f}"
        per_s = "-" if one.requests_per_s is None else f"{one.requests_per_s:.1f}"
        rows.append([one.policy, f"{one.target:.0%}", scale, per_s])
    return aligned(rows)


def _scale(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_SCALE:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0, and at most {MOST_SCALE:g}")
    return number


def _patience(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not MICROSECOND_S <= number <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, more than 0 and at most {LONGEST_S:g}")
    return number


def _engines(text: str) -> int:
    return _whole(text, MOST_ENGINES)


def _seeds(text: str) -> int:
    return _whole(text, MOST_SEEDS)


def _whole(text: str, most: int) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {most}")
    return int(text)
