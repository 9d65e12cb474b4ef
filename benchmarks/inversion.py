"""Whether unimportant work ever stands in the way of important work.

    python -m benchmarks.inversion [--part 1] [--part 2] [--json FILE]

An emulated engine behind `sidecar serve`, and clients that send when their time has come, whatever became of the
others. Everything that is compared runs at the same time, an engine and a proxy for each.

Part 1, a backlog. The engine does 8 requests a second (8 slots, 20 tokens of 50 ms). 200 bulk requests come at 0, and 3
interactive ones a second, evenly, for 60 s. Interactive has a reserve of 50% that it does not lend, bulk one of 25%,
which is what keeps it from starving: nothing ages. Interactive's time to first token is compared with what it is behind
the same proxy alone, for the whole run and in the worst 5 seconds; bulk's throughput with its own reserve, in its worst
5 seconds; and both with the same load on the engine without the proxy. A fourth run shows what a starvation override
does, which our policies have as `aging`, with a warning: bulk may age up to interactive there, and then takes the room
that interactive does not lend.

Part 2, a full engine. 40 bulk requests with answers of 400 tokens (20 s) hold all 40 slots (8 requests of 100 tokens a
second) when a burst of 8 critical ones comes, 5 s in. Critical has `preempt_after: 100ms`, bulk is `preemptible`;
beside it the same without.

The command fails where a target is missed: the table says which.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import command
from sidecar.tools.loadgen import Planned, Progress, Seen, play, quantile

STEP_MS = 50
WINDOW_S = 5.0
TIMEOUT_S = 300.0

# Part 1
SLOTS, OUTPUT_TOKENS = 8, 20
BULK, INTERACTIVE_PER_S, SECONDS = 200, 3, 60
BULK_RESERVE = 0.25
MOST_TIMES_ALONE = 2.0
AGING = "aging: {promote_after: 5s, ceiling: interactive}\n"
BACKLOG_POLICY = f"""\
engine: vllm
capacity: {{requests: {SLOTS}}}
tiers:
  interactive: {{reserve: 50%, lend: 0%}}
  bulk: {{reserve: {BULK_RESERVE:.0%}}}
default_tier: bulk
anonymous: interactive
sources: [header]
endpoints:
  /v1/chat/completions: {{}}
"""

# Part 2
HELD, LONG_TOKENS, BURST, BURST_AT_S = 40, 400, 8, 5.0
MOST_WAIT_S = 1.0
FULL_POLICY = f"""\
engine: vllm
capacity: {{{{requests: {HELD}}}}}
tiers:
  critical: {{{{reserve: 20%{{preempts}}}}}}
  bulk: {{{{reserve: 20%{{preemptible}}}}}}
default_tier: bulk
anonymous: critical
sources: [header]
endpoints:
  /v1/chat/completions: {{{{}}}}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a report; `is_reached` is None where there is no target."""

    name: str
    figure: str
    target: str = ""
    is_reached: bool | None = None


def request(tier: str, at_s: float, tokens: int, *, stream: bool) -> Planned:
    """One request of a tier; its label is the tier."""
    messages = [{"role": "user", "content": f"{tier}, sent at {at_s:.3f} s"}]
    body = {"model": "emulated", "messages": messages, "max_tokens": tokens, "stream": stream}
    headers = {"content-type": "application/json", "x-priority": tier}
    return Planned(at_s, "/v1/chat/completions", headers, json.dumps(body).encode(), tier)


async def played(runs: Mapping[str, tuple[str, Sequence[Planned]]]) -> tuple[dict[str, list[Seen]], float]:
    """Plays all runs at the same time; and the longest time for which this process itself stood still."""
    progress = [Progress() for _ in runs]
    seen = await asyncio.gather(
        *(
            play([url], plan, timeout_s=TIMEOUT_S, progress=own)
            for (url, plan), own in zip(runs.values(), progress, strict=True)
        )
    )
    return dict(zip(runs, seen, strict=True)), max(own.stalled_s for own in progress)


# Part 1


def backlog() -> tuple[dict[str, list[Seen]], float]:
    """Plays it: `alone`, `proxy`, `engine` (without the proxy) and `aging` (behind a proxy where bulk ages)."""
    every_s = 1 / INTERACTIVE_PER_S
    interactive = [
        request("interactive", turn * every_s, OUTPUT_TOKENS, stream=True)
        for turn in range(SECONDS * INTERACTIVE_PER_S)
    ]
    both = [*(request("bulk", 0.0, OUTPUT_TOKENS, stream=False) for _ in range(BULK)), *interactive]
    with ExitStack() as running:
        engine = running.enter_context(_engine(SLOTS))
        alone, _ = running.enter_context(_proxy(running, BACKLOG_POLICY, SLOTS))
        proxy, _ = running.enter_context(_proxy(running, BACKLOG_POLICY, SLOTS))
        aging, _ = running.enter_context(_proxy(running, BACKLOG_POLICY + AGING, SLOTS))
        runs = {"proxy": (proxy, both), "engine": (engine[0], both), "aging": (aging, both)}
        return asyncio.run(played({"alone": (alone, interactive), **runs}))


def backlog_report(seen: Mapping[str, Sequence[Seen]]) -> list[Line]:
    """Figures and targets of part 1."""
    ttft_s = {name: quantile(_ttfts(answers), 0.99) for name, answers in seen.items()}
    worst_s = {name: worst_window_s(answers) for name, answers in seen.items()}
    times, worst_times = ttft_s["proxy"] / ttft_s["alone"], worst_s["proxy"] / worst_s["alone"]
    least = {name: least_throughput(seen[name]) for name in ("proxy", "engine")}
    reserved = BULK_RESERVE * SLOTS / (OUTPUT_TOKENS * STEP_MS / 1000)
    failed = sum(not one.is_complete for answers in seen.values() for one in answers)
    return [
        *(Line(f"interactive p99 TTFT, {_WORDS[name]}", f"{ttft_s[name]:.3f} s") for name in seen),
        Line("  of alone, whole run", f"{times:.2f}", f"at most {MOST_TIMES_ALONE:g}", times <= MOST_TIMES_ALONE),
        *(Line(f"interactive p99 TTFT, worst 5 s, {_WORDS[name]}", f"{worst_s[name]:.3f} s") for name in seen),
        Line("  of alone, worst 5 s", f"{worst_times:.2f}"),
        Line(
            "bulk requests/s, worst 5 s, with the proxy",
            f"{least['proxy']:.2f}",
            f"at least {reserved:g}, its reserve",
            least["proxy"] >= reserved,
        ),
        Line("bulk requests/s, worst 5 s, engine without the proxy", f"{least['engine']:.2f}"),
        *(Line(f"all bulk done after, {_WORDS[name]}", f"{_last_end_s(seen[name]):.1f} s") for name in least),
        Line("requests without a complete answer", str(failed), "0", failed == 0),
    ]


def worst_window_s(answers: Sequence[Seen]) -> float:
    """The largest p99 of interactive's TTFT in any 5 s, by when they were sent: each request begins a window."""
    sent = sorted((one.sent_s, one.ttft_s) for one in answers if one.planned.label == "interactive" and one.ttft_s)
    starts = [at_s for at_s, _ in sent if at_s <= sent[-1][0] - WINDOW_S]
    return max(
        quantile([ttft_s for at_s, ttft_s in sent if start_s <= at_s < start_s + WINDOW_S], 0.99) for start_s in starts
    )


def least_throughput(answers: Sequence[Seen]) -> float:
    """Bulk requests done per second in its worst 5 s while bulk waited: up to when the last of it was admitted."""
    ends = sorted(one.end_s for one in answers if one.planned.label == "bulk" and one.is_complete)
    last_start_s = ends[-1] - WINDOW_S - OUTPUT_TOKENS * STEP_MS / 1000
    # A request's own time behind the start: nothing can be done before.
    windows = [end_s for end_s in ends if end_s <= last_start_s]
    return min(sum(start_s < end_s <= start_s + WINDOW_S for end_s in ends) for start_s in windows) / WINDOW_S


_WORDS = {
    "alone": "alone",
    "proxy": "with the proxy",
    "engine": "engine without the proxy",
    "aging": "proxy with aging",
}


def _ttfts(answers: Sequence[Seen]) -> list[float]:
    return [one.ttft_s for one in answers if one.planned.label == "interactive" and one.ttft_s is not None]


def _last_end_s(answers: Sequence[Seen]) -> float:
    return max(one.end_s for one in answers if one.planned.label == "bulk")


# Part 2


def full_engine() -> tuple[dict[str, list[Seen]], float, float | None]:
    """Plays it, `with` preemption and `without`; and the seconds of engine time that were lost, as the proxy tells."""
    plan = [
        *(request("bulk", 0.0, LONG_TOKENS, stream=False) for _ in range(HELD)),
        *(request("critical", BURST_AT_S, OUTPUT_TOKENS, stream=True) for _ in range(BURST)),
    ]
    preempting = FULL_POLICY.format(preempts=", preempt_after: 100ms", preemptible=", preemptible: true")
    with ExitStack() as running:
        proxy, admin = running.enter_context(_proxy(running, preempting, HELD))
        other, _ = running.enter_context(_proxy(running, FULL_POLICY.format(preempts="", preemptible=""), HELD))
        seen, stalled_s = asyncio.run(played({"with": (proxy, plan), "without": (other, plan)}))
        return seen, stalled_s, metric(admin, "admission_preempted_engine_time_seconds_total")


def full_engine_report(seen: Mapping[str, Sequence[Seen]], lost_s: float | None) -> list[Line]:
    """Figures and targets of part 2."""
    waits_s = {name: quantile(_waits(answers, "critical"), 0.99) for name, answers in seen.items()}
    preempted = [one for one in seen["with"] if "x-admission-preempted" in one.headers]
    times = sum(int(one.headers["x-admission-preempted"]) for one in preempted)
    complete = sum(one.is_complete for one in preempted)
    failed = sum(not one.is_complete for answers in seen.values() for one in answers)
    worked_s = HELD * LONG_TOKENS * STEP_MS / 1000
    lost = "not told" if lost_s is None else f"{lost_s:.1f} s of slots, {lost_s / worked_s:.1%} of bulk's work"
    return [
        Line(
            "critical p99 wait, with preemption",
            f"{waits_s['with']:.3f} s",
            f"at most {MOST_WAIT_S:g} s",
            waits_s["with"] <= MOST_WAIT_S,
        ),
        Line("critical p99 wait, without", f"{waits_s['without']:.3f} s", "above", waits_s["without"] > MOST_WAIT_S),
        Line("requests preempted", f"{len(preempted)}, {times} times in all", "some", len(preempted) > 0),
        Line("  of these complete", str(complete), "all", complete == len(preempted)),
        Line("work that was lost", lost),
        *(Line(f"all bulk done after, {name} preemption", f"{_last_end_s(seen[name]):.1f} s") for name in seen),
        Line("requests without a complete answer", str(failed), "0", failed == 0),
    ]


def metric(admin: str, name: str) -> float | None:
    """The sum of a metric over its labels, None where it is not there."""
    with urllib.request.urlopen(f"{admin}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    values = [sample.value for family in families for sample in family.samples if sample.name == name]
    return sum(values) if values else None


def _waits(answers: Sequence[Seen], tier: str) -> list[float]:
    """As the proxy told them: from a request's arrival to its admission."""
    return [int(one.headers["x-admission-wait-ms"]) / 1000 for one in answers if one.planned.label == tier]


# Processes


def _engine(slots: int) -> AbstractContextManager[Sequence[str]]:
    return command(
        "emulate", "--engine", "vllm", "--max-num-seqs", str(slots), "--step-ms", str(STEP_MS), "--port", "0"
    )


def _proxy(running: ExitStack, policy: str, slots: int) -> AbstractContextManager[Sequence[str]]:
    """A proxy before an engine of its own; its addresses are the proxy's and the admin port's."""
    folder = running.enter_context(tempfile.TemporaryDirectory())
    (Path(folder) / "policy.yaml").write_text(policy)
    (engine,) = running.enter_context(_engine(slots))
    return command("serve", "--upstream", engine, "--policy", folder, "--port", "0", "--admin-port", "0")


def table(lines: Sequence[Line]) -> str:
    """A line for each figure."""
    marks = {None: "", True: "reached", False: "MISSED"}
    return "\n".join(f"{one.name:54}{one.figure:>28}  {one.target:28}{marks[one.is_reached]}".rstrip() for one in lines)


def main() -> int:
    """Returns 1 where a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", type=int, choices=(1, 2), action="append", help="only this (default: both)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    lines: list[Line] = []
    if 1 in (arguments.part or (1, 2)):
        seen, stalled_s = backlog()
        lines += [*backlog_report(seen), Line("longest time the client itself stood still", f"{stalled_s:.3f} s")]
        print(f"Part 1: {BULK} bulk requests at once, {INTERACTIVE_PER_S} interactive a second for {SECONDS} s\n")
        print(table(lines) + "\n")
    if 2 in (arguments.part or (1, 2)):
        seen, stalled_s, lost_s = full_engine()
        second = full_engine_report(seen, lost_s)
        second.append(Line("longest time the client itself stood still", f"{stalled_s:.3f} s"))
        print(f"Part 2: {HELD} bulk requests hold the engine, {BURST} critical ones come at once\n")
        print(table(second) + "\n")
        lines += second
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps(
                [
                    {"name": one.name.strip(), "figure": one.figure, "target": one.target, "reached": one.is_reached}
                    for one in lines
                ],
                indent=2,
            )
            + "\n"
        )
    missed = sum(one.is_reached is False for one in lines)
    print(f"{missed} targets missed" if missed else "every target was reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
