"""What learned lengths gain: the share of the KV cache in use, engine preemptions and output, by mode of `learn`.

    python -m benchmarks.reservations [--check] [--quick] [--seeds N] [--traces FOLDER] [--json FILE]

Public traces are played in virtual time to the product's own pool, estimator, lease sizes and trust, before an engine
whose KV cache is what binds: there is always a next request. See `engine`, `traces` and `runs` for what is assumed.
`--check` exits with 1 where a target is missed. `--quick` plays 2,000 requests of each trace, with one seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.reservations import loads
from benchmarks.reservations.engine import SMALL_KV, Hardware
from benchmarks.reservations.runs import Run, play
from benchmarks.reservations.traces import CODE, CONV, FOLDER, MOONCAKE, Asked, Trace, asked, max_tokens_of

OTHER_SEEDS = 2
"""Of the loads without a target."""
MODES = ("off", "cautious", "full")
NAMES = {"off": "off (prompt + max_tokens)", "cautious": "cautious", "full": "full"}
HARDWARE = {CONV.name: Hardware(), CODE.name: Hardware(), MOONCAKE.name: SMALL_KV}
USED = {
    (CONV.name, "cautious"): 0.78,
    (CONV.name, "full"): 0.88,
    (CODE.name, "cautious"): 0.88,
    (CODE.name, "full"): 0.92,
    (MOONCAKE.name, "cautious"): 0.93,
    (MOONCAKE.name, "full"): 0.94,
}
"""The least share of the KV cache in use."""
PREEMPTED = {"off": 0.0, "cautious": 0.0, "full": 2.0}
"""The most engine preemptions for 1,000 answers, in the mean of the seeds."""
OUTPUT = {(CONV.name, "cautious"): 1.25, (CONV.name, "full"): 1.40}
"""The least output tokens a second, relative to `off`."""


@dataclass(frozen=True)
class Case:
    """One line of a table: the mean of its seeds."""

    load: str
    learn: str
    used: float
    used_least: float
    used_most: float
    preempted_per_1000: float
    cold_preemptions: float
    tokens_per_s: float
    tokens_per_step: float


Change = Callable[[Sequence[Asked]], list[Asked]]


@dataclass(frozen=True)
class Plan:
    """One load: a trace and what is changed in it. `prefills` and `replicas` as in `runs.play`."""

    name: str
    trace: Trace
    change: Change | None = None
    prefills: bool = False
    replicas: int = 1


TRACES = tuple(Plan(trace.name, trace) for trace in (CONV, CODE, MOONCAKE))
OTHERS = (
    Plan("max_tokens always absent", CONV, loads.absent),
    Plan("max_tokens always 32,768", CONV, loads.huge),
    Plan("half of the answers do not stream", CONV, loads.unstreamed),
    Plan("two replicas", CONV, replicas=2),
    Plan("the engine computes the prompts too", CONV, prefills=True),
)
JUMP = Plan("a tenant's lengths times ten", CONV, loads.jump)


def run(plan: Plan, learn: str, seed: int, folder: Path, most: int | None) -> Run:
    """One run of a load, of the first `most` requests."""
    requests = asked(plan.trace.lengths(folder), seed)[:most]
    if plan.change is not None:
        requests = plan.change(requests)
    return play(requests, learn, HARDWARE[plan.trace.name], prefills=plan.prefills, replicas=plan.replicas)


def case(load: str, learn: str, found: Sequence[Run]) -> Case:
    """The mean of the seeds."""
    used = [one.used for one in found]
    mean = partial(_mean, found)
    return Case(
        load, learn, statistics.mean(used), min(used), max(used), mean("preempted_per_1000"), mean("cold_preemptions"),
        mean("tokens_per_s"), mean("tokens_per_step"),
    )  # fmt: skip


def _mean(found: Iterable[Run], name: str) -> float:
    return statistics.mean(float(getattr(one, name)) for one in found)


def table(cases: Sequence[Case]) -> str:
    """A line for each load and mode."""
    rows = [
        f"{'load':36}{'learn':27}{'KV cache in use':>24}{'preemptions':>13}{'in the':>8}{'output':>9}{'running':>9}",
        f"{'':36}{'':27}{'mean (least..most seed)':>24}{'per 1,000':>13}{'start':>8}{'/ off':>9}{'/ off':>9}",
    ]
    for one in cases:
        off = next(other for other in cases if (other.load, other.learn) == (one.load, "off"))
        used = f"{one.used:.3f} ({one.used_least:.3f}..{one.used_most:.3f})"
        rows.append(
            f"{one.load:36}{NAMES[one.learn]:27}{used:>24}{one.preempted_per_1000:>13.2f}{one.cold_preemptions:>8.1f}"
            f"{one.tokens_per_s / off.tokens_per_s:>9.2f}{one.tokens_per_step / off.tokens_per_step:>9.2f}"
        )
    return "\n".join(rows)


def missed(cases: Sequence[Case]) -> list[str]:
    """The targets that the traces' cases miss, a sentence each."""
    found = []
    off = {one.load: one for one in cases if one.learn == "off"}
    for one in cases:
        place = f"{one.load}, {one.learn}"
        least, output = USED.get((one.load, one.learn), 0.0), OUTPUT.get((one.load, one.learn), 0.0)
        if one.used < least:
            found.append(f"{place}: {one.used:.3f} of the KV cache in use, not {least:.2f}")
        if one.preempted_per_1000 > PREEMPTED[one.learn]:
            found.append(
                f"{place}: {one.preempted_per_1000:.2f} preemptions for 1,000 answers, not {PREEMPTED[one.learn]:g}"
            )
        ratio = one.tokens_per_s / off[one.load].tokens_per_s
        if ratio < output:
            found.append(f"{place}: {ratio:.2f} times the output of off, not {output:.2f}")
    return found


@dataclass(frozen=True)
class Recovery:
    """What the engine went through when one tenant's lengths jumped. Seconds are virtual, from the jump on.

    `last_s` is the last preemption, None without one. `quantile` is the highest in force after the jump.
    """

    learn: str
    preemptions_before: int
    preemptions: int
    last_s: float | None
    quantile: float
    used_before: float
    used_after: float


def recovery(learn: str, found: Run) -> Recovery:
    """The jump is in the middle of the requests."""
    points = found.points
    jump = next(one for one in points if one.answers >= found.end.answers // 2)
    after = [one for one in points if one.at_s > jump.at_s]
    last_s, before = None, jump
    for one in after:
        last_s = one.at_s - jump.at_s if one.preemptions > before.preemptions else last_s
        before = one
    span_s = found.end.at_s - jump.at_s
    return Recovery(
        learn,
        jump.preemptions,
        found.end.preemptions - jump.preemptions,
        last_s,
        max(one.quantile for one in after),
        (jump.used_token_s - found.warm.used_token_s) / (jump.at_s - found.warm.at_s) / found.kv_tokens,
        (found.end.used_token_s - jump.used_token_s) / span_s / found.kv_tokens,
    )


def recoveries(found: Sequence[Recovery]) -> str:
    """A line for each mode and seed."""
    rows = [f"{'learn':12}{'preemptions':>24}{'the last after':>16}{'highest':>10}{'KV cache in use':>24}"]
    rows.append(f"{'':12}{'before / after the jump':>24}{'the jump':>16}{'quantile':>10}{'before / after':>24}")
    for one in found:
        last = "none" if one.last_s is None else f"{one.last_s:.0f} s"
        rows.append(
            f"{one.learn:12}{f'{one.preemptions_before} / {one.preemptions}':>24}{last:>16}{one.quantile:>10.4g}"
            f"{f'{one.used_before:.3f} / {one.used_after:.3f}':>24}"
        )
    return "\n".join(rows)


def assumptions(folder: Path) -> str:
    """What the figures rest on, with the sizes of the traces."""
    rows = []
    for trace in (CONV, CODE, MOONCAKE):
        lengths = trace.lengths(folder)
        rows.append(
            f"{trace.name}: {len(lengths):,} requests, max_tokens {max_tokens_of(lengths):,} "
            "(longer outputs send what they use), "
            f"KV cache {HARDWARE[trace.name].kv_tokens:,} tokens"
        )
    return "\n".join(rows)


def measured(plans: Sequence[Plan], seeds: int, folder: Path, most: int | None) -> Mapping[tuple[str, str], list[Run]]:
    """All runs, in as many processes as the machine has processors."""
    jobs = [
        (plan, learn, seed)
        for plan in plans
        for learn in MODES
        for seed in range(seeds if plan in TRACES else min(seeds, OTHER_SEEDS))
    ]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as workers:
        waiting = [workers.submit(run, plan, learn, seed, folder, most) for plan, learn, seed in jobs]
        found: dict[tuple[str, str], list[Run]] = {}
        for (plan, learn, seed), one in zip(jobs, waiting, strict=True):
            found.setdefault((plan.name, learn), []).append(one.result())
            print(f"{plan.name}, {learn}, seed {seed}", file=sys.stderr, flush=True)
    return found


def main(arguments: argparse.Namespace) -> int:
    """Plays everything and prints the tables. With `--check`, 1 where a target is missed."""
    seeds, most = (1, 2000) if arguments.quick else (arguments.seeds, None)
    folder = arguments.traces
    runs = measured((*TRACES, *OTHERS, JUMP), seeds, folder, most)
    cases = {place: case(*place, found) for place, found in runs.items()}
    main_cases = [cases[plan.name, learn] for plan in TRACES for learn in MODES]
    print(f"Virtual time, {seeds} seeds ({OTHER_SEEDS} where there is no target).")
    print("The KV cache binds: a next request always waits, and prompts come computed.\n")
    print(assumptions(folder) + "\n\n" + table(main_cases))
    print("\nOutput follows the model of a step's time (engine.py). `running` would be it if all steps took the same.")
    print(f"\nOther loads, of {CONV.name}\n\n{table([cases[plan.name, learn] for plan in OTHERS for learn in MODES])}")
    jumps = [recovery(learn, one) for learn in MODES for one in runs[JUMP.name, learn]]
    print(f"\n{JUMP.name}, from a tenth of the trace's to the trace's, in the middle; a line for each seed\n")
    print(recoveries(jumps))
    found = missed(main_cases)
    if arguments.json:
        document = {"cases": [asdict(one) for one in cases.values()], "jump": [asdict(one) for one in jumps]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print("\n" + ("\n".join(f"MISSED {one}" for one in found) if found else "every target was reached"))
    return 1 if found and arguments.check else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    parser.add_argument(
        "--quick", action="store_true", help="2,000 requests of each trace, one seed; targets may be missed"
    )
    parser.add_argument("--seeds", type=int, default=5, help="where in the trace a run begins; 5")
    parser.add_argument("--traces", metavar="FOLDER", type=Path, default=FOLDER, help="the folder of the public traces")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    sys.exit(main(parser.parse_args()))
