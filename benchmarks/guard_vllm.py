"""An interactive tier's SLO on a real vLLM full of batch work: without bounds, with constant limits, with the guard.

    python -m benchmarks.guard_vllm [--guard] [--seconds N] [--rate N] [--nice N] [--json FILE]

Batch work waits without end: twice as many clients as the engine has places, each of which sends its next request as
soon as it has its answer. Interactive requests arrive as a Poisson process, the same in every row. Their SLO is twice
what one request alone gets from the idle engine, through the same sidecar. Interactive figures are those of clients:
time to the first token from sending, waiting included, and time per output token after it. Batch tokens are the
engine's own count less the interactive ones. `--guard` adds the row of `slo.hold`. The command fails where a request
failed, where the load does not break the SLO or no constant limit holds it, and where the guard misses its targets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.one_request import CHAT, ask
from benchmarks.processes import command
from benchmarks.real_engines import version_of
from benchmarks.reservations_vllm import TEXT, Sample, sample
from sidecar.tools.loadgen.client import Planned, Progress, Seen, play
from sidecar.tools.loadgen.connection import Target
from sidecar.tools.loadgen.statistics import quantile
from tests.real.lab import MODEL, Engine, installed_in, script, vllm

PLACES = 32
"""The engine's `--max-num-seqs`, and the capacity of the pool."""
CHUNK_TOKENS = 512
MODEL_TOKENS = 512
LAYERS = "--layers 8 --hidden 512 --heads 8 --kv-heads 4 --inter 1536"
"""A model of 26 million parameters. On one core a step takes 13 ms, and 1 ms more for each sequence or prompt token: so
the engine takes most of a step, and not the clients, the sidecar and vLLM's server, which share the other core."""
INTERACTIVE_WORDS, INTERACTIVE_TOKENS = 16, 16
BATCH_WORDS, BATCH_TOKENS = 2, (128, 384)
"""Short prompts and long answers: then batch work slows steps by their width, which a limit bounds. Lengths differ, so
that requests which began together do not end together."""
SLO_TO_IDLE = 2.0
HOLD = 0.97
WARM_UP_REQUESTS, IDLE_REQUESTS = 3, 25
WARM_UP_S, GUARD_WARM_UP_S = 6.0, 24.0
"""Before a row is measured: the engine fills. The guard begins low, and has to find its bound."""
SAMPLE_EVERY_S = 1.0
ANSWER_WITHIN_S = 120.0
LIMITS = (10, 20, 40)

BREAKS_BELOW, BESIDE_BEST, TOKENS_TO_BEST = 0.5, 0.05, 0.8
"""The load is one for a guard if without bounds fewer than half of the interactive requests meet the SLO. The guard's
share may be so much less than 97%, or than the best constant limit's where that is lower, and its batch tokens such a
part of that limit's. With 115 requests the standard error of a share near 97% is 0.016."""

POLICY = """\
engine: vllm
capacity: {{requests: {places}}}
tiers:
  interactive: {{slo: {{{slo}}}}}
  batch: {{limit: "{limit}%"}}
default_tier: batch
anonymous: interactive
sources: [header]
endpoints:
  /v1/chat/completions: {{}}
"""


@dataclass(frozen=True, slots=True)
class Objectives:
    """TTFT and TPOT, in seconds: the SLO, or the medians of one request after another on the idle engine."""

    ttft_s: float
    tpot_s: float

    def met_by(self, seen: Seen) -> bool:
        """True if an answer is complete, and met both."""
        if seen.ttft_s is None or seen.tpot_s is None:
            return False
        return seen.ttft_s <= self.ttft_s and seen.tpot_s <= self.tpot_s

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s * 1000:.0f} ms, TPOT {self.tpot_s * 1000:.1f} ms"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to serve: its batch clients, the `limit` of their tier, and whether the SLO has a `hold`."""

    title: str
    clients: int = 2 * PLACES
    limit: int = 100
    is_guarded: bool = False

    def policy(self, slo: Objectives | None) -> str:
        """The policy of this row."""
        keys = {} if slo is None else {"ttft": f"{slo.ttft_s * 1e6:.0f}us", "tpot": f"{slo.tpot_s * 1e6:.0f}us"}
        if self.is_guarded:
            keys["hold"] = f"{HOLD:.0%}"
        written = ", ".join(f"{name}: {value}" for name, value in keys.items())
        return POLICY.format(places=PLACES, slo=written, limit=self.limit)


ALONE = Row("interactive alone", clients=0)
UNBOUNDED = Row("batch at 100%, the engine's priority")
CONSTANT = tuple(Row(f"batch: limit {limit}%", limit=limit) for limit in reversed(LIMITS))
GUARDED = Row(f"guard: hold {HOLD:.0%}", is_guarded=True)


@dataclass(frozen=True, slots=True)
class Figures:
    """One row. Milliseconds, shares of the interactive requests, and what the engine ran on average.

    `without_core` is for how much of the row vLLM's processes waited for a core, for other work or for each other.
    """

    requests: int
    met: float
    met_ttft: float
    met_tpot: float
    ttft_p50_ms: float
    ttft_p97_ms: float
    wait_p97_ms: float
    tpot_p50_ms: float
    tpot_p97_ms: float
    batch_tokens_per_s: float
    running: float
    failed: int
    stalled_ms: float
    load: float
    without_core: float


# -- requests


def body_of(rng: random.Random, words: int, tokens: int, *, stream: bool) -> bytes:
    """A chat whose answer has exactly so many tokens."""
    text = f"{rng.randint(0, 10**6)} " + " ".join(rng.choice(TEXT.split()) for _ in range(words))
    body: dict[str, object] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


def interactive(rng: random.Random, at_s: float) -> Planned:
    """One interactive request."""
    body = body_of(rng, INTERACTIVE_WORDS, INTERACTIVE_TOKENS, stream=True)
    return Planned(at_s, CHAT, {"x-priority": "interactive"}, body, "interactive")


def arrivals(per_s: float, seconds: float) -> list[Planned]:
    """Interactive requests of one row, the same for each: a Poisson process."""
    rng, at_s, planned = random.Random(1), 0.0, []
    while (at_s := at_s + rng.expovariate(per_s)) < seconds:
        planned.append(interactive(rng, at_s))
    return planned


@dataclass
class Batch:
    """Batch work without end, while the block runs. `failed` says what went wrong with its requests."""

    url: str
    clients: int
    failed: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs all clients."""
        rng, target = random.Random(2), Target.of(self.url)
        clients = [asyncio.ensure_future(self._client(rng, target)) for _ in range(self.clients)]
        try:
            yield
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self, rng: random.Random, target: Target) -> None:
        while True:
            body = body_of(rng, BATCH_WORDS, rng.randint(*BATCH_TOKENS), stream=False)
            answered = await ask(target, body, {"x-priority": "batch"}, ANSWER_WITHIN_S)
            if isinstance(answered, str):
                self.failed.append(answered)
            elif answered.error or answered.answer is None or answered.answer.error:
                self.failed.append(answered.error or f"{answered.answer}")


# -- rows


@contextlib.contextmanager
def served(engine: str, row: Row, slo: Objectives | None) -> Iterator[str]:
    """A fresh `sidecar serve` before the engine; its address."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(row.policy(slo))
        line = ("serve", "--upstream", engine, "--policy", str(policy), "--port", "0", "--admin-port", "0")
        with command(*line) as (url, _):
            yield url


async def idle(url: str) -> Objectives:
    """What the idle engine gives: medians of one request after another, the first ones left out."""
    rng = random.Random(3)
    seen: list[Seen] = []
    for _ in range(WARM_UP_REQUESTS + IDLE_REQUESTS):
        seen += await play([url], [interactive(rng, 0.0)], timeout_s=ANSWER_WITHIN_S)
    later = seen[WARM_UP_REQUESTS:]
    return Objectives(
        statistics.median(one.ttft_s for one in later if one.ttft_s is not None),
        statistics.median(one.tpot_s for one in later if one.tpot_s is not None),
    )


async def figures_of(engine: Engine, row: Row, slo: Objectives, arguments: argparse.Namespace) -> Figures:
    """Runs one row. Afterwards the engine is idle."""
    planned = arrivals(arguments.rate, arguments.seconds)
    before = arrivals(arguments.rate, GUARD_WARM_UP_S if row.is_guarded else WARM_UP_S)
    progress = Progress()
    with served(engine.url, row, slo) as url:
        batch = Batch(url, row.clients)
        async with batch.running():
            await play([url], before, timeout_s=ANSWER_WITHIN_S)
            machine = Machine.now(engine.process.pid)
            watching = asyncio.ensure_future(_watch(engine.url))
            seen = await play([url], planned, timeout_s=ANSWER_WITHIN_S, progress=progress)
            watching.cancel()
            samples = await watching
            later = Machine.now(engine.process.pid)
    await asyncio.to_thread(_until_idle, engine.url)
    waited = (later.waited_s - machine.waited_s) / (later.at_s - machine.at_s)
    return replace(measure(seen, samples, batch.failed, slo), stalled_ms=1000 * progress.stalled_s, without_core=waited)


def _until_idle(engine: str) -> None:
    """Waits until the engine has aborted what its clients have left."""
    while sample(engine).running:
        time.sleep(SAMPLE_EVERY_S / 10)


async def _watch(engine: str) -> Sequence[Sample]:
    """What the engine's page says, until canceled and once more."""
    samples = [await asyncio.to_thread(sample, engine)]
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            samples.append(await asyncio.to_thread(sample, engine))
    return [*samples, await asyncio.to_thread(sample, engine)]


def measure(seen: Sequence[Seen], samples: Sequence[Sample], batch_failed: Sequence[str], slo: Objectives) -> Figures:
    """The figures of one row, but for those of the machine."""
    done = [one for one in seen if one.ttft_s is not None and one.tpot_s is not None]
    ttfts, tpots = [one.ttft_s or 0.0 for one in done], [one.tpot_s or 0.0 for one in done]
    waits = [float(one.headers["x-admission-wait-ms"]) for one in done]
    generated = samples[-1].generated - samples[0].generated
    own = sum(one.output_tokens for one in done)
    return Figures(
        requests=len(seen),
        met=sum(slo.met_by(one) for one in seen) / len(seen),
        met_ttft=sum(ttft <= slo.ttft_s for ttft in ttfts) / len(seen),
        met_tpot=sum(tpot <= slo.tpot_s for tpot in tpots) / len(seen),
        ttft_p50_ms=1000 * quantile(ttfts, 0.5),
        ttft_p97_ms=1000 * quantile(ttfts, HOLD),
        wait_p97_ms=quantile(waits, HOLD),
        tpot_p50_ms=1000 * quantile(tpots, 0.5),
        tpot_p97_ms=1000 * quantile(tpots, HOLD),
        batch_tokens_per_s=max(0, generated - own) / (samples[-1].at_s - samples[0].at_s),
        running=statistics.fmean(one.running for one in samples),
        failed=len(seen) - len(done) + len(batch_failed),
        stalled_ms=0.0,
        load=os.getloadavg()[0],
        without_core=0.0,
    )


# -- what is printed

HEAD = (
    f"{'':38} {'met':>6} {'TTFT':>6} {'TPOT':>6} {'TTFT ms p50':>12} {'p97':>6} {'wait p97':>9} {'TPOT ms p50':>12} "
    f"{'p97':>6} {'batch tok/s':>12} {'running':>8} {'load':>6} {'no core':>8} {'stalled ms':>11}"
)


def line_of(row: Row, one: Figures) -> str:
    """One row as it is printed."""
    return (
        f"{row.title:38} {one.met:>6.3f} {one.met_ttft:>6.3f} {one.met_tpot:>6.3f} {one.ttft_p50_ms:>12.0f} "
        f"{one.ttft_p97_ms:>6.0f} {one.wait_p97_ms:>9.0f} {one.tpot_p50_ms:>12.1f} {one.tpot_p97_ms:>6.1f} "
        f"{one.batch_tokens_per_s:>12.0f} {one.running:>8.1f} {one.load:>6.1f} {one.without_core:>8.0%} "
        f"{one.stalled_ms:>10.0f}" + (f"  {one.failed} failed" if one.failed else "")
    )


def best_constant(found: dict[Row, Figures]) -> Row:
    """The largest constant limit that holds the SLO; where none does, the one with which most requests met it."""
    holding = [row for row in CONSTANT if found[row].met >= HOLD]
    return max(holding, key=lambda row: row.limit) if holding else max(CONSTANT, key=lambda row: found[row].met)


def missed(found: dict[Row, Figures]) -> list[str]:
    """The targets that were missed, and the conditions without which the comparison says nothing."""
    late = [f"{row.title}: {one.failed} requests failed" for row, one in found.items() if one.failed]
    best = best_constant(found)
    asked = min(HOLD, found[best].met) - BESIDE_BEST
    if found[UNBOUNDED].met >= BREAKS_BELOW:
        late.append(f"{UNBOUNDED.title}: {found[UNBOUNDED].met:.3f} met the SLO: this load does not break it")
    if found[best].met < HOLD - BESIDE_BEST:
        late.append(f"{best.title}: {found[best].met:.3f} met the SLO: no limit holds it, or the machine is busy")
    guarded = found.get(GUARDED)
    if guarded is None:
        return late
    if guarded.met < asked:
        late.append(f"{GUARDED.title}: {guarded.met:.3f} met the SLO, less than {asked:.3f}")
    part = guarded.batch_tokens_per_s / found[best].batch_tokens_per_s
    if part < TOKENS_TO_BEST:
        late.append(f"{GUARDED.title}: {part:.2f} of the batch tokens of {best.title}, less than {TOKENS_TO_BEST}")
    return late


# -- the machine


@dataclass(frozen=True, slots=True)
class Machine:
    """At one moment: how long the processes of a session have waited for a core so far."""

    at_s: float
    waited_s: float

    @staticmethod
    def now(session: int) -> Machine:
        """Reads it from Linux, for the first thread of each process: it is the one that works, in vLLM's."""
        waited_ns = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == session:
                    waited_ns += int((folder / "schedstat").read_text().split()[1])
        return Machine(time.monotonic(), waited_ns / 1e9)


@contextlib.contextmanager
def before_other_work(nice: int, engine: int) -> Iterator[None]:
    """Runs the engine's session before other work of the machine while the block runs, and this one before both.

    Linux shares the processor among sessions (autogroups), so a process's own nice value says nothing about other
    sessions' work. The clients and the sidecar need little of it, and have to run at once. Below 0 needs root.
    """
    weights = {Path(f"/proc/{os.getpid()}/autogroup"): max(-20, 2 * nice), Path(f"/proc/{engine}/autogroup"): nice}
    earlier = {group: group.read_text().split()[-1] for group in weights if nice}
    for group in earlier:
        group.write_text(str(weights[group]))
    try:
        yield
    finally:
        for group, value in earlier.items():
            group.write_text(value)


@contextlib.contextmanager
def model() -> Iterator[str]:
    """A folder with the model."""
    with tempfile.TemporaryDirectory() as folder:
        python = installed_in() / "vllm" / "bin" / "python"
        making = [str(python), str(script("make_tiny_model.py", "vllm")), folder, *LAYERS.split()]
        subprocess.run(making, check=True, stdout=subprocess.DEVNULL)
        yield folder


async def play_all(
    engine: Engine, rows: Sequence[Row], arguments: argparse.Namespace
) -> tuple[str, dict[Row, Figures]]:
    """Plays all rows, and says what the idle engine did before and after them."""
    with served(engine.url, ALONE, None) as url:
        first = await idle(url)
    slo = Objectives(SLO_TO_IDLE * first.ttft_s, SLO_TO_IDLE * first.tpot_s)
    found: dict[Row, Figures] = {}
    print(f"SLO: {slo}", file=sys.stderr)
    for row in rows:
        found[row] = await figures_of(engine, row, slo, arguments)
        print(line_of(row, found[row]), file=sys.stderr, flush=True)
    with served(engine.url, ALONE, None) as url:
        last = await idle(url)
    return f"SLO: {slo}; the idle engine before: {first}; and after all rows: {last}", found


def main(arguments: argparse.Namespace) -> int:
    """Plays everything and prints the table. 1 where something was missed."""
    rows = [ALONE, UNBOUNDED, *CONSTANT, *([GUARDED] if arguments.guard else [])]
    began_s, load = time.monotonic(), os.getloadavg()
    engine_arguments = ["--no-enable-prefix-caching", "--max-num-batched-tokens", str(CHUNK_TOKENS)]
    with (
        model() as folder,
        vllm(
            sequences=PLACES,
            arguments=engine_arguments,
            variables={"MODEL": folder, "MAXLEN": str(MODEL_TOKENS)},
        ) as engine,
        before_other_work(arguments.nice, engine.process.pid),
    ):
        version = version_of(engine.url, "vllm")
        said, found = asyncio.run(play_all(engine, rows, arguments))
    print(
        f"vLLM {version}, {PLACES} places, {CHUNK_TOKENS} tokens a step, {platform.machine()}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, nice {arguments.nice}\n"
        f"{arguments.rate:g} interactive requests a second for {arguments.seconds:g} s a row "
        f"({found[ALONE].requests}), {2 * PLACES} batch clients; load before {load[0]:.1f}; "
        f"{time.monotonic() - began_s:.0f} s in all\n{said}\n"
    )
    print("\n".join([HEAD, *(line_of(row, one) for row, one in found.items())]))
    if arguments.json:
        rows_found = {row.title: asdict(one) for row, one in found.items()}
        arguments.json.write_text(json.dumps({"version": version, "said": said, "rows": rows_found}, indent=2) + "\n")
    late = missed(found)
    print("\n" + ("\n".join(f"MISSED {one}" for one in late) if late else "every target was reached"))
    return 1 if late else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip(), formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--guard", action="store_true", help="also the row of the guard: a policy with slo.hold")
    parser.add_argument("--seconds", type=float, default=38.0, help="measured time of a row (default %(default)s)")
    parser.add_argument("--rate", type=float, default=2.8, help="interactive requests a second (default %(default)s)")
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="below 0: this session and vLLM's run before other work of the machine; as root",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures as JSON")
    raise SystemExit(main(parser.parse_args()))
