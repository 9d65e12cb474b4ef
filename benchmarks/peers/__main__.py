"""Peers side by side: other gateways and ours before the same emulated engine, with the same load.

    sh benchmarks/peers/run [--only SCENARIO] [--peer NAME] [--quick] [--json FILE] [--text FILE] [--check]
    sh benchmarks/peers/run --from FILE --markdown

LiteLLM, SMG and Dynamo are installed into environments of their own on the first run (~/.cache/engine-lab, or LAB), a
few minutes and some 2 GB. nginx is played where it is installed, or where NGINX names it. Results are added to those
in FILE. `--markdown` prints the table of docs/evidence.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.peers import cost, dynamo, litellm, nginx, none, ours, report, smg
from benchmarks.peers.real import NotInstalled, NotReady
from benchmarks.peers.scenarios import SCENARIOS, Load, Scenario
from benchmarks.peers.setting import Figure, Peer

PEERS: Mapping[str, Peer] = {
    peer.name: peer for peer in (ours.OURS, smg.SMG, litellm.LITELLM, dynamo.DYNAMO, none.NONE)
}
COST = "cost"
ROUNDS, REQUESTS = 13, 500


def measured(peers: Sequence[str]) -> list[Peer]:
    """The gateways whose cost is measured in turns. Dynamo is none of them: it tokenizes, and renders each chunk."""
    found = []
    if "ours" in peers:
        found += [ours.OURS_ALONE, ours.OURS_SHIPPED]
    if "smg" in peers:
        found += [smg.SMG_DEFAULT, smg.SMG_SCHEDULED]
    if "litellm" in peers:
        found.append(litellm.LITELLM_PASSING)
    if "ours" in peers and nginx.program() is not None:
        found.append(nginx.peer())
    return found


def play(name: str, scenario: Scenario, names: Sequence[str], *, is_quick: bool) -> dict[str, Sequence[Figure]]:
    """One scenario by all peers that have means for it: at the same time where that is no load for the machine."""
    peers = [PEERS[peer] for peer in names if (name, peer) not in report.NO_MEANS]
    apart = [one for one in peers if scenario.load is Load.HEAVY or (scenario.load is Load.SOME and one.is_heavy)]
    groups = [[one for one in peers if one not in apart], *([one] for one in apart)]
    found: dict[str, Sequence[Figure]] = {}
    for group in filter(None, groups):
        if len(group) == 1:  # in the main thread, where a store can be started
            found |= _played([(group[0].name, partial(scenario.play, group[0], is_quick))])
        else:
            with ThreadPoolExecutor(len(group)) as pool:
                futures = [(one.name, pool.submit(scenario.play, one, is_quick)) for one in group]
            found |= _played([(peer, future.result) for peer, future in futures])
    return {peer: found[peer] for peer in names if peer in found}


def _played(results: Sequence[tuple[str, Callable[[], Sequence[Figure]]]]) -> dict[str, Sequence[Figure]]:
    """The figures of each peer, less those that cannot be installed or started."""
    found = {}
    for peer, result in results:
        try:
            found[peer] = result()
        except (NotInstalled, NotReady) as error:  # noqa: PERF203  # one peer's failure is not the others'
            print(f"{peer} was not played: {error}", file=sys.stderr)
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*SCENARIOS, COST], help="only this scenario; repeatable")
    parser.add_argument("--peer", action="append", choices=[*PEERS], help="only this gateway; repeatable")
    parser.add_argument("--quick", action="store_true", help="a few seconds each: shows that it runs, and no more")
    parser.add_argument("--json", metavar="FILE", type=Path, help="add the results to this file")
    parser.add_argument("--text", metavar="FILE", type=Path, help="also write the report there")
    parser.add_argument("--from", dest="source", metavar="FILE", type=Path, help="play nothing, read these results")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/evidence.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the cost is more than asked")
    return parser.parse_args()


def main() -> int:
    """Plays what the command line names. Returns 1 where a target was missed and `--check` was given."""
    options = arguments()
    known = options.source or options.json
    document = report.empty("sh benchmarks/peers/run" + " --quick" * options.quick)
    if known is not None and known.is_file():
        document = {**document, **json.loads(known.read_text())}
    if options.source is None:
        names = options.peer or [*PEERS]
        document["peers"] |= {name: f"{PEERS[name].title} {PEERS[name].version}".strip() for name in names}
        for name in options.only or [*SCENARIOS, COST]:
            if name == COST:
                found = cost.measure(measured(names), *((1, 50) if options.quick else (ROUNDS, REQUESTS)))
                report.add_cost(document, found, smg.SMG_DEFAULT.title)
            else:
                scenario = SCENARIOS[name]
                report.add(document, name, scenario.title, play(name, scenario, names, is_quick=options.quick))
            if options.json:
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(report.markdown(document) if options.markdown else report.text(document), end="")
    if options.text:
        options.text.write_text(report.text(document))
    misses = report.missed(document, ours.OURS_SHIPPED.title)
    for line in misses:
        print(line, file=sys.stderr)
    return 1 if misses and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
