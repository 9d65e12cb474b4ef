"""Predicted prefix hits against the hits of real prefix caches, in virtual time, on the Mooncake conversation trace.

    python -m benchmarks.prefix_prediction [--trace FILE] [--requests 3500] [--json FILE]

The engines are the emulator's own step model, queue and KV cache (`sidecar.tools.emulator`), without processes. Every
prompt is text with the trace's blocks in common, so the tables (`sidecar.fleet.prefix_table`) see bytes, as they do in
front of real engines.

Part 1: one engine, and beside it tables of a quarter of its KV cache, of its size and four times its size, with and
without the learned correction, and with other moments of insertion. They only watch: all predict the same requests. A
figure is a share of the tokens that the engine found: how many of them were predicted (`found`), how many were
predicted and not found (`wrong`).

Part 2: four engines, late binding with claims (`fleet.md`), and one predictor at a time. The oracle asks the engines'
caches themselves. Blind is the same placement without any prediction.

The command fails where the right size, or any size after the correction, is far from the engine in part 1, or from the
oracle in part 2. The trace is Mooncake's (FAST'25 release, Apache-2.0), by default in the folder `shared/` beside the
checkout. Its arrival times, which are rounded to 3 s, are spread evenly at random; outputs are cut at 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from pathlib import Path

from benchmarks.prefix_cache import BLOCK_TOKENS, TRACE
from sidecar.fleet.prefix_table import Chain, PrefixTable, Sent
from sidecar.payload.prompt_bytes import PromptBytes
from sidecar.tools.replay.trace import Row
from sidecar.tools.simulate.load import Request
from sidecar.tools.simulate.play import Stage, play
from sidecar.tools.simulate.virtual_loop import VirtualLoop
from sidecar.tools.step_model.kv_cache import KvCache
from sidecar.tools.step_model.model import EngineModel

BYTES_PER_TOKEN = 4
ROUNDED_S = 3.0
LONGEST_OUTPUT = 128
KV_TOKENS = 800_000
PREFILL = 8_192
LOOKED_AT = 16
MOST_P99 = 1.25
SLOWER, FASTER = 3.0, 0.55
"""How much longer the trace takes before one engine, and before four."""


@cache
def chain_of(names: tuple[int, ...], tokens: int) -> Chain:
    """The blocks of a prompt of text, which has the trace's blocks in common with others."""
    data = b"".join(b"%08d" % name * (BLOCK_TOKENS * BYTES_PER_TOKEN // 8) for name in names)
    data = data[: tokens * BYTES_PER_TOKEN]
    return Chain(PromptBytes("m", data, len(data)), tokens)


MODEL = EngineModel(
    name="emulated",
    max_sequences=128,
    chunk_tokens=1_024,
    kv_tokens=KV_TOKENS,
    block_tokens=BLOCK_TOKENS,
    step_us=20_000,
    step_us_per_prefill_token=40,
)


class Ticket(Request):
    """One request of the trace, from its arrival to its end."""

    def __init__(self, row: Row) -> None:
        tokens = row.input_tokens or 0
        super().__init__(row, 0, "", [b"%d" % name for name in row.hash_ids[: tokens // BLOCK_TOKENS]])
        self.chain = chain_of(row.hash_ids, tokens)
        self.hits: Sequence[int] = ()
        self.unprefilled = 0


def read(trace: Path, most: int, stretch: float) -> list[Ticket]:
    """The first requests of the trace, by arrival."""
    rng = random.Random(1)
    with trace.open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]
    return sorted(
        (
            Ticket(
                Row(
                    0,
                    (row["timestamp"] / 1_000 + rng.uniform(0, ROUNDED_S)) * stretch,
                    row["input_length"],
                    min(row["output_length"], LONGEST_OUTPUT),
                    tuple(row["hash_ids"]),
                )
            )
            for row in rows
        ),
        key=lambda ticket: ticket.at_us,
    )


class Predictor:
    """Predicts what each engine has of a prompt: here nothing."""

    def hits(self, ticket: Ticket) -> Sequence[int]:
        """The predicted tokens, by engine."""
        del ticket
        return ()

    def sent(self, ticket: Ticket) -> None:
        """The request goes to `ticket.engine`."""

    def ended(self, ticket: Ticket) -> None:
        """The answer is complete. `ticket.cached_tokens` is what the engine found."""


class Oracle(Predictor):
    """Asks the caches."""

    def __init__(self, caches: Sequence[KvCache]) -> None:
        self._caches = caches

    def hits(self, ticket: Ticket) -> Sequence[int]:
        """See `Predictor`."""
        return [cache.hit_length(ticket.blocks, ticket.prompt) for cache in self._caches]


class Tables(Predictor):
    """Prefix tables of `factor` times the engines' caches. `moments` are those at which a prompt counts as used."""

    def __init__(self, engines: int, factor: float, *, learns: bool, moments: str = "start and end") -> None:
        self.tables = [PrefixTable(round(KV_TOKENS * factor)) for _ in range(engines)]
        self.label = f"{factor:g}x" + (", learned" if learns else "") + (f", at the {moments}" * (moments == "end"))
        self.label += ", at the start only" * (moments == "start")
        self._factor, self._learns, self._moments = factor, learns, moments
        self._sent: dict[Ticket, Sent] = {}
        self.actual = self.predicted = self.both = 0
        self.scales: list[float] = []

    def hits(self, ticket: Ticket) -> Sequence[int]:
        """See `Predictor`."""
        return [ticket.chain.tokens_of(table.hit(ticket.chain)) for table in self.tables]

    def sent(self, ticket: Ticket) -> None:
        """See `Predictor`."""
        table = self.tables[ticket.engine or 0]
        if self._moments == "end":
            had = table.hit(ticket.chain)
            self._sent[ticket] = Sent(had, had, table.scale, is_settled=False)
        else:
            self._sent[ticket] = table.send(ticket.chain)

    def ended(self, ticket: Ticket) -> None:
        """See `Predictor`."""
        table, sent = self.tables[ticket.engine or 0], self._sent.pop(ticket)
        if self._learns:
            table.learn(ticket.chain, sent, ticket.prompt, ticket.cached_tokens)
        if self._moments != "start":
            table.end(ticket.chain, ticket.output)
        predicted = ticket.chain.tokens_of(sent.had)
        self.predicted += predicted
        self.actual += ticket.cached_tokens
        self.both += min(predicted, ticket.cached_tokens)
        self.scales.append(table.scale * self._factor)

    def settled_sizes(self) -> Sequence[float]:
        """The sizes of the second half of the run, relative to the engines' caches."""
        return self.scales[len(self.scales) // 2 :]


class Held:
    """What the ledgers know of one engine."""

    def __init__(self) -> None:
        self.tokens = self.unprefilled = 0

    def has_room(self, ticket: Ticket, hit: int) -> bool:
        """R2' of fleet.md."""
        alone = max(0, ticket.prompt - hit)
        fits = self.tokens + ticket.tokens <= KV_TOKENS
        return fits and (self.unprefilled == 0 or self.unprefilled + alone <= PREFILL)

    def score(self, ticket: Ticket, hit: int, claimed: int) -> int:
        """The placement of fleet.md; the smallest wins."""
        return (self.unprefilled + claimed + ticket.prompt - 2 * hit) * 50 + self.tokens


class Placement:
    """Late binding before some engines: see `simulate.play.Admission`."""

    def __init__(self, stage: Stage, predictor: Predictor, watching: Sequence[Predictor] = ()) -> None:
        self._stage = stage
        self._held = [Held() for _ in stage.engines]
        self._predictor = predictor
        self._all = [predictor, *watching]
        self._waiting: list[Ticket] = []
        self._places = count()

    def arrives(self, ticket: Request) -> None:
        """See `Admission`."""
        assert isinstance(ticket, Ticket)
        ticket.hits = self._predictor.hits(ticket)
        self._waiting.append(ticket)
        self._decide()

    def first_token(self, ticket: Request) -> None:
        """See `Admission`."""
        assert isinstance(ticket, Ticket)
        self._held[ticket.engine or 0].unprefilled -= ticket.unprefilled
        self._decide()

    def finished(self, ticket: Request) -> None:
        """See `Admission`."""
        assert isinstance(ticket, Ticket)
        self._held[ticket.engine or 0].tokens -= ticket.tokens
        for predictor in self._all:
            predictor.ended(ticket)
        self._decide()

    def _nothing(self, ticket: Request) -> None:
        """See `Admission`."""

    leaves = reached = removed = _nothing

    def _decide(self) -> None:
        """Walks the queue until no ticket can be admitted: late binding with claims."""
        while self._walk():
            pass

    def _walk(self) -> bool:
        claimed: dict[int, int] = {}
        for ticket in self._waiting[:LOOKED_AT]:
            hits = ticket.hits or [0] * len(self._held)
            scores = [
                (held.score(ticket, hits[number], claimed.get(number, 0)), number)
                for number, held in enumerate(self._held)
            ]
            number = min(scores)[1]
            if number not in claimed and self._held[number].has_room(ticket, hits[number]):
                self._send(ticket, number, hits[number])
                return True
            claimed[number] = claimed.get(number, 0) + ticket.prompt
            if len(claimed) == len(self._held):
                break
        return False

    def _send(self, ticket: Ticket, number: int, hit: int) -> None:
        self._waiting.remove(ticket)
        ticket.unprefilled = max(0, ticket.prompt - hit)
        self._held[number].tokens += ticket.tokens
        self._held[number].unprefilled += ticket.unprefilled
        ticket.place = (), next(self._places)
        self._stage.send(ticket, number)
        for predictor in self._all:
            predictor.sent(ticket)


def played(
    trace: Sequence[Ticket],
    engines: int,
    build: Callable[[Sequence[KvCache]], Predictor],
    watching: Sequence[Predictor] = (),
) -> Stage:
    """Plays the trace before some emulated engines, in virtual time. Every ticket has its `first_us` then."""
    loop = VirtualLoop()
    stage = Stage(MODEL, engines, loop, preempts=False, admits_ahead=True)
    predictor = build([engine.cache for engine in stage.engines])
    with loop.running():
        play(trace, stage, Placement(stage, predictor, watching))
    return stage


@dataclass(frozen=True)
class Watched:
    """Part 1. Shares of the tokens that the engine found, and the learned size relative to the engine's cache."""

    table: str
    found: float
    wrong: float
    smallest: float
    largest: float


@dataclass(frozen=True)
class Placed:
    """Part 2. `hit_rate` is the engines' own, `ttft_s` the times to the first token."""

    predictor: str
    hit_rate: float
    below_5_s: float
    p50_s: float
    p99_s: float


def watch(trace: Path, requests: int) -> list[Watched]:
    """Part 1."""
    tables = [Tables(1, factor, learns=learns) for learns in (False, True) for factor in (0.25, 1, 4)]
    tables += [Tables(1, 1, learns=False, moments=moments) for moments in ("start", "end")]
    played(read(trace, requests, SLOWER), 1, lambda _: Predictor(), tables)
    return [
        Watched(
            each.label,
            each.both / each.actual,
            (each.predicted - each.both) / each.actual,
            min(each.settled_sizes()),
            max(each.settled_sizes()),
        )
        for each in tables
    ]


def place(trace: Path, requests: int, label: str, build: Callable[[Sequence[KvCache]], Predictor]) -> Placed:
    """One run of part 2."""
    tickets = read(trace, requests, FASTER)
    stage = played(tickets, 4, build)
    ttft_s = sorted(((ticket.first_us or 0) - ticket.at_us) / 1e6 for ticket in tickets)
    hits = sum(engine.cache.hit_tokens for engine in stage.engines)
    return Placed(
        label,
        hits / sum(ticket.prompt for ticket in tickets),
        sum(each < 5 for each in ttft_s) / len(ttft_s),
        ttft_s[len(ttft_s) // 2],
        ttft_s[len(ttft_s) * 99 // 100],
    )


def place_all(trace: Path, requests: int) -> list[Placed]:
    """Part 2."""
    found = [
        place(trace, requests, "blind", lambda _: Predictor()),
        place(trace, requests, "oracle", Oracle),
    ]
    for learns in (False, True):
        for factor in (0.25, 1, 4):
            tables = Tables(4, factor, learns=learns)
            found.append(place(trace, requests, tables.label, lambda _, tables=tables: tables))  # type: ignore[misc]
    return found


def misses(watched: Sequence[Watched], placed: Sequence[Placed]) -> list[str]:
    """The targets that were missed, in sentences."""
    found = []
    for each in watched:
        if each.table in ("1x", "1x, learned") and (each.found < 0.9 or each.wrong > 0.1):
            found.append(f"table {each.table}: {each.found:.2f} found, {each.wrong:.2f} wrong")
        if each.table in ("1x, learned", "4x, learned") and not 0.7 <= each.smallest <= each.largest <= 1.4:
            found.append(f"table {each.table}: the learned size is {each.smallest:.2f} to {each.largest:.2f}")
    by_name = {each.predictor: each for each in placed}
    for name in ("1x", "1x, learned", "4x, learned"):
        ratio = by_name[name].p99_s / by_name["oracle"].p99_s
        if ratio > MOST_P99:
            found += [f"placement with {name}: p99 is {ratio:.2f} of the oracle's"]
    return found


def main() -> int:
    """Returns 1 where a target is missed, 2 without a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=3_500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.trace.is_file():
        print(f"no trace at {args.trace}: give --trace")
        return 2
    watched = watch(args.trace, args.requests)
    print(f"{args.requests} requests, KV cache of {KV_TOKENS:,} tokens an engine\n")
    print(f"{'one engine, table of':28} {'found':>7} {'wrong':>7}  learned size, second half")
    for seen in watched:
        print(f"{seen.table:28} {seen.found:7.3f} {seen.wrong:7.3f}  {seen.smallest:.2f} to {seen.largest:.2f}")
    placed = place_all(args.trace, args.requests)
    print(f"\n{'four engines, placed by':28} {'hit rate':>8} {'< 5 s':>7} {'p50':>8} {'p99':>8}")
    for run in placed:
        print(f"{run.predictor:28} {run.hit_rate:8.3f} {run.below_5_s:7.3f} {run.p50_s:6.2f} s {run.p99_s:6.1f} s")
    missed = misses(watched, placed)
    print("".join(f"\nMISSED: {sentence}" for sentence in missed) or "\nall targets met")
    if args.json:
        args.json.write_text(json.dumps([*map(asdict, watched), *map(asdict, placed)], indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
