"""Show what admission control does: an emulated TensorRT-LLM gets a third more work than it can do.

The same arrivals are played three times, over real HTTP on loopback: at equal priority (the control), with the engine's
own priority, and with admission control. Tiers, tenants and keys are those of the example policies. It takes less than
a minute. A page in the browser shows the third run live.

With --replicas the third run uses several sidecar processes, which share one pool in Redis. With --slo another scene is
played in two runs: batch work fills an engine, with and without `hold`, which keeps the SLO of people's requests.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, TextIO

from sidecar.cli.arguments import number, whole_number
from sidecar.cli.output import CommandFailed, reporter, require_writable, say, write_json
from sidecar.policy.compiler import load, shipped_policies
from sidecar.policy.store import store_address
from sidecar.tools.demo import slo
from sidecar.tools.demo.figures import BURST, RunMeasurement, arrivals
from sidecar.tools.demo.report import summary, table
from sidecar.tools.demo.runs import CannotStart, DemoRun, RunServers, Sharing, play_run, servers, shared, slots

EXAMPLE = "  sidecar demo --json demo.json\n  sidecar demo --slo\n  sidecar demo --replicas 3 --store redis://127.0.0.1:6379/0"
SECONDS = 8.0
LONGEST_S = 600.0  # the clients give up on an answer after a minute, and a longer run only builds a longer queue
MOST_REPLICAS = 32  # each is a Python process; more of them need more cores, and show nothing that fewer do not


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON, - for standard output")
    parser.add_argument("--keep", action="store_true", help="leave the last server running, to try requests on it")
    parser.add_argument(
        "--seconds",
        type=number("time to play", LONGEST_S),
        help=f"how long requests arrive (default {SECONDS:g}), or how long a run of --slo takes ({slo.SECONDS:g})",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default %(default)s)")
    replicas = whole_number("number of replicas", 1, MOST_REPLICAS)
    parser.add_argument("--replicas", type=replicas, metavar="N", help="admission by N sidecars that share one pool")
    parser.add_argument("--store", type=_store, metavar="URL", help="their store, such as redis://127.0.0.1:6379/0")
    parser.add_argument("--slo", action="store_true", help="the other scene: batch work, and an SLO that is held")
    parser.add_argument("--no-page", action="store_true", help="without the live page of the last run")
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Plays the three runs and prints the table. Returns 1 where requests failed, or a server could not start."""
    runs = shared(_sharing(args.replicas, args.store, args.refuse))
    if args.slo and args.store is not None:
        args.refuse("argument --slo: its servers share nothing; leave --store out")
    out = sys.stderr if args.json == "-" else sys.stdout
    require_writable(args.json)
    try:
        return _play_slo(args, out) if args.slo else _play(args, runs, out)
    except CannotStart as error:
        raise CommandFailed(str(error)) from None


def _play(args: argparse.Namespace, runs: Sequence[DemoRun], out: TextIO) -> int:
    policy_path = shipped_policies()
    policy = load(policy_path)
    seconds = args.seconds or SECONDS
    requests = arrivals(seconds, args.seed)
    with servers(runs, policy_path) as places:
        page = None if args.no_page else places["admission"].page
        if page is not None:
            say(f"Live page of the third run, while the demo runs: http://127.0.0.1:{page}/", out)
        say(
            f"An emulated TensorRT-LLM runs {slots(policy)} requests at once. {len(requests)} arrive within "
            f"{seconds:g} s, the same in each of three runs: a third more than it can do, and a burst of {BURST} "
            f"urgent ones.\nTiers and tenants: {policy_path}",
            out,
        )
        figures: list[RunMeasurement] = []
        for run in runs:
            if page is not None and run.has_admission:
                say(f"Now on the live page: http://127.0.0.1:{page}/", sys.stderr)
            figures.append(play_run(run, places[run.name], requests, policy, reporter(run.title)))
        say(f"\n{table(figures, runs)}\n\n{summary(figures)}", out)
        written = write_json(args.json, {"runs": figures})
        if args.keep:
            _keep(replace(places["admission"], page=page), out)
    return 0 if written and not any(one.failed for one in figures) else 1


def _play_slo(args: argparse.Namespace, out: TextIO) -> int:
    seconds = args.seconds or slo.SECONDS
    coming = slo.arrivals(seconds, args.seed)
    with slo.servers() as ports:
        held = ports[slo.HELD]
        if not args.no_page:
            say(f"Live page of the second run, while the demo runs: http://127.0.0.1:{held.admin}/", out)
        say(
            f"An emulated TensorRT-LLM runs {slo.PLACES} requests at once, and is slow when it does. {slo.BATCH} batch "
            f"requests come at once, and then {len(coming) - slo.BATCH} of people.\nTwo runs of {seconds:g} s, by:\n\n"
            f"{slo.POLICY}\nthe first without `hold`.",
            out,
        )
        figures = [
            slo.play_run(name, server.api, coming, seconds, reporter(slo.COLUMNS[name]))
            for name, server in ports.items()
        ]
        say(f"\n{slo.summary(figures)}", out)
        written = write_json(args.json, {"runs": figures})
        if args.keep:
            _keep(RunServers([held.api], held.admin, None if args.no_page else held.admin), out)
    return 0 if written and not any(one.failed for one in figures) else 1


def _sharing(replicas: int | None, store: str | None, refuse: Callable[[str], NoReturn]) -> Sharing | None:
    """The setup that --replicas and --store ask for together. Calls `refuse` for replicas that would share nothing."""
    if store is None:
        if replicas is not None:
            refuse("argument --replicas: replicas share a pool in a store; add --store redis://127.0.0.1:6379/0")
        return None
    return Sharing(replicas or 1, store)


def _store(text: str) -> str:
    """The address as it was written, which can be read."""
    try:
        store_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _keep(place: RunServers, out: TextIO) -> None:
    port, *others = place.sidecars
    page = "" if place.page is None else f"\nThe live page: http://127.0.0.1:{place.page}/"
    beside = f" The other replicas are on the ports {', '.join(map(str, others))}." if others else ""
    say(
        f"""
Still running, until you press Ctrl-C.{beside}{page}
Try:
  curl -i http://127.0.0.1:{port}/v1/chat/completions -H 'content-type: application/json' \\
    -H 'authorization: Bearer sk-demo-interactive' \\
    -d '{{"model": "emulated", "max_tokens": 5, "messages": [{{"role": "user", "content": "hello"}}]}}'""",
        out,
    )
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
