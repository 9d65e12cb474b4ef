"""Whether a nightly batch that takes leases disturbs live traffic, and how much idle capacity it uses.

    python -m benchmarks.nightly [--seconds 60] [--json FILE]

An emulated vLLM with 16 places, each answer of live traffic 40 tokens of 50 ms: 8 requests a second are all that it
can do. Live requests come at 1 to 7 a second, in a wave of 30 s, as in a day that is squeezed. A nightly job has more
requests of 100 tokens than fit. Three engines are played at the same time, each with `sidecar serve` before it:

- alone: live traffic, and nothing else;
- leases: `examples/leases/nightly.py` runs beside it, with the example's policy, in the pool of the same store;
- straight: the same nightly requests go to the engine at once, with the least important priority of the engine's own.

Live TTFT beside leases is asked to be at most 0.2 s more than alone in the median, and 0.5 s in p99: a request that
finds no room waits 50 ms before it takes some back. No request may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.inversion import Line, table
from benchmarks.processes import command
from benchmarks.redis_setup import running_server
from sidecar.tools.loadgen import Planned, Seen, play, quantile

EXAMPLE = Path(__file__).parents[1] / "examples" / "leases"
SLOTS, STEP_MS = 16, 50
LIVE_TOKENS, NIGHTLY_TOKENS = 40, 100
LEAST_PER_S, MOST_PER_S, WAVE_S = 1.0, 7.0, 30.0
NIGHTLY_AT_ONCE = 32
MOST_MORE_S = {0.5: 0.2, 0.99: 0.5}
CHAT = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}


def live(seconds: float) -> list[Planned]:
    """Requests at random times, at a rate that goes up and down."""
    luck, at_s, found = random.Random(7), 0.0, list[Planned]()
    while (at_s := at_s + luck.expovariate(MOST_PER_S)) < seconds:
        share = (1 - math.cos(2 * math.pi * at_s / WAVE_S)) / 2
        if luck.random() < (LEAST_PER_S + (MOST_PER_S - LEAST_PER_S) * share) / MOST_PER_S:
            found.append(Planned(at_s, CHAT, HEADERS, json.dumps(body("live", LIVE_TOKENS, stream=True)).encode()))
    return found


def body(said: str, tokens: int, **more: object) -> dict[str, object]:
    """A chat completion."""
    return {"model": "emulated", "messages": [{"role": "user", "content": said}], "max_tokens": tokens, **more}


def nightly(seconds: float) -> list[dict[str, object]]:
    """More requests than the whole engine could do in the time."""
    number = round(seconds * 1000 / STEP_MS * SLOTS / NIGHTLY_TOKENS) + NIGHTLY_AT_ONCE
    return [body(f"document {each}", NIGHTLY_TOKENS) for each in range(number)]


class Stack:
    """An emulated engine, and a proxy before it with the example's policy."""

    def __init__(self, running: ExitStack, store: str | None) -> None:
        arguments = ("--max-num-seqs", str(SLOTS), "--step-ms", str(STEP_MS), "--port", "0")
        (self.engine,) = running.enter_context(command("emulate", "--engine", "vllm", *arguments))
        self.policy = Path(running.enter_context(tempfile.TemporaryDirectory())) / "policy.yaml"
        lines = (EXAMPLE / "policy.yaml").read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("store:")]
        self.policy.write_text("".join(kept) + (f"store: {store}\n" if store else ""))
        serve = ("serve", "--upstream", self.engine, "--policy", str(self.policy), "--port", "0", "--admin-port", "0")
        self.proxy, _ = running.enter_context(command(*serve))


@contextmanager
def driver(stack: Stack, requests: Sequence[dict[str, object]]) -> Iterator[Path]:
    """The example while the block runs, and the file of its answers."""
    folder = stack.policy.parent
    (folder / "requests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    line = [sys.executable, str(EXAMPLE / "nightly.py"), str(folder / "requests.jsonl"), "--engine", stack.engine]
    line += ["--policy", str(stack.policy), "--at-once", str(NIGHTLY_AT_ONCE)]
    with (folder / "answers.jsonl").open("w") as answers, subprocess.Popen(line, stdout=answers) as process:
        try:
            yield folder / "answers.jsonl"
        finally:
            process.terminate()


async def played(alone: Stack, leases: Stack, straight: Stack, seconds: float) -> tuple[dict[str, list[Seen]], int]:
    """What the live clients saw, and how many nightly requests were answered straight."""
    plan = live(seconds)
    straight_plan = [
        Planned(0.0, CHAT, HEADERS, json.dumps({**each, "priority": 1000}).encode()) for each in nightly(seconds)
    ]
    beside = asyncio.ensure_future(play([straight.engine], straight_plan, timeout_s=seconds))
    seen = await asyncio.gather(
        *(play([stack.proxy], plan, timeout_s=300.0) for stack in (alone, leases, straight)),
    )
    done = sum(one.is_complete for one in await beside)
    return dict(zip(("alone", "leases", "straight"), seen, strict=True)), done


def report(seen: dict[str, list[Seen]], done: dict[str, int], seconds: float) -> list[Line]:
    """The figures and the targets."""
    ttft_s = {name: [one.ttft_s for one in answers if one.ttft_s is not None] for name, answers in seen.items()}
    times = {part: {name: quantile(each, part) for name, each in ttft_s.items()} for part in MOST_MORE_S}
    places = seconds * 1000 / STEP_MS * SLOTS
    used = {name: sum(one.output_tokens for one in answers) for name, answers in seen.items()}
    all_used = {name: used[name] + done.get(name, 0) * NIGHTLY_TOKENS for name in used}
    failed = sum(not one.is_complete for answers in seen.values() for one in answers)
    lines = []
    for part, most_s in MOST_MORE_S.items():
        more_s = times[part]["leases"] - times[part]["alone"]
        lines += [Line(f"live TTFT p{part * 100:g}, {name}", f"{at_s:.3f} s") for name, at_s in times[part].items()]
        lines.append(Line("  leases, more than alone", f"{more_s:.3f} s", f"at most {most_s:g} s", more_s <= most_s))
    return [
        *lines,
        *(Line(f"nightly requests answered, {name}", str(done[name])) for name in done),
        *(Line(f"engine's places in use, {name}", f"{all_used[name] / places:.0%}") for name in seen),
        Line("live requests that failed", str(failed), "0", failed == 0),
    ]


def main() -> int:
    """1 where a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    wanted = parser.parse_args()
    with ExitStack() as running:
        server = running.enter_context(running_server())
        alone, leases, straight = Stack(running, None), Stack(running, server.url), Stack(running, None)
        answers = running.enter_context(driver(leases, nightly(wanted.seconds)))
        seen, straight_done = asyncio.run(played(alone, leases, straight, wanted.seconds))
        done = {"leases": len(answers.read_text().splitlines()), "straight": straight_done}
    lines = report(seen, done, wanted.seconds)
    print(table(lines))
    if wanted.json:
        Path(wanted.json).write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")
    return int(any(line.is_reached is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
