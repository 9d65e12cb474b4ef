"""Prefix tables: an exact LRU of blocks, compared with a literal one, and a size that is learned."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sidecar.fleet import prefix_table
from sidecar.fleet.prefix_table import (
    BLOCK_BYTES,
    ENDS,
    FINE_BYTES,
    LARGEST,
    MOST_HITS,
    SHORT_BYTES,
    SMALLEST,
    BlockRun,
    Chain,
    PrefixTable,
    PrefixTables,
    Runs,
)
from sidecar.payload.prompt_bytes import LONGEST_READ, PromptBytes

TOKENS = BLOCK_BYTES // 4  # of a prompt's first blocks


def tokens_of(blocks: int) -> int:
    """The tokens of a prompt of so many blocks."""
    return ENDS[blocks] // 4


def prompt(*names: int, root: str = "m", tokens: int | None = None) -> Chain:
    """A prompt of whole blocks, of a token for 4 bytes unless `tokens` says otherwise."""
    sizes = (end - start for start, end in pairwise(prefix_table.ENDS))
    data = b"".join(b"%08x" % name * (size // 8) for name, size in zip(names, sizes, strict=False))
    return Chain(PromptBytes(root, data, len(data)), len(data) // 4 if tokens is None else tokens)


class Literal:
    """The rules of `PrefixTable`, one block at a time. The last of a list is the most recently used."""

    def __init__(self, size_units: int, most_blocks: int) -> None:
        self.size_units, self.most_blocks = size_units, most_blocks
        self.held: list[tuple[int, int]] = []  # (hash, units); an answer has the hash before it, negated
        self.evicted: list[tuple[int, int]] = []

    def hit(self, chain: Chain) -> int:
        held = {name for name, _ in self.held}
        return next((at for at, name in enumerate(chain.hashes) if ("block", name) not in held), len(chain))

    def use(self, chain: Chain, output_units: int = 0) -> None:
        sizes = [(end - start) * chain.units_per_byte for start, end in pairwise(prefix_table.ENDS)]
        mine = [(("block", name), units) for name, units in zip(chain.hashes, sizes, strict=False)]
        # An answer goes with the last block of the prompt that it answers.
        names = {name for name, _ in mine} | {("answer", name) for name in chain.hashes}
        self.held = [entry for entry in self.held if entry[0] not in names]
        self.evicted = [entry for entry in self.evicted if entry[0] not in names]
        self.held += reversed(mine)
        self.fit()
        if output_units and mine and mine[0] in self.held:
            kept = [entry for entry in mine if entry in self.held]
            at = self.held.index(kept[-1])
            self.held.insert(at, (("answer", kept[-1][0][1]), output_units))
            self.fit()

    def fit(self) -> None:
        while self.is_over(self.held, self.most_blocks):
            name, units = self.held.pop(0)
            if name[0] == "block":
                self.evicted.append((name, units))
            elif (over := self.units(self.held) - self.size_units) < 0 and self.blocks(self.held) <= self.most_blocks:
                self.held.insert(0, (name, -over))
        while self.is_over(self.evicted, self.most_blocks - self.blocks(self.held)):
            self.evicted.pop(0)

    def is_over(self, entries: list, most_blocks: int) -> bool:
        return bool(entries) and (self.units(entries) > self.size_units or self.blocks(entries) > most_blocks)

    @staticmethod
    def units(entries: list) -> int:
        return sum(units for _, units in entries)

    @staticmethod
    def blocks(entries: list) -> int:
        return sum(name[0] == "block" for name, _ in entries)


def blocks_of(runs: Runs) -> list[int]:
    """The blocks in their order of use, the oldest first, and that everything in it agrees."""
    found = [name for run in runs for name in reversed(run.hashes)]
    assert len(found) == len(set(found)) == len(runs.of)
    assert all(run.hashes for run in runs)
    assert all(runs.of[name] is run for run in runs for name in run.hashes)
    assert runs.units == sum(run.units for run in runs)
    return found


def check(table: PrefixTable) -> None:
    held, evicted = blocks_of(table._held), blocks_of(table._evicted)
    assert not set(held) & set(evicted)
    assert table._held.units <= table._size_units
    assert table._evicted.units <= table._size_units
    assert len(table) == len(held) + len(evicted) <= table._most_blocks
    assert not any(run.output_units for run in table._evicted)


COARSE = (0, 256, 512, 768, 1_280, 1_792, 2_816, 3_840, 5_888, 7_936)
"""Ends of blocks that grow as soon as a short prompt does."""


@pytest.fixture(params=["fine", "coarse"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "coarse":
        monkeypatch.setattr(prefix_table, "ENDS", COARSE)
    prefix_table._new_cutter.cache_clear()
    yield
    prefix_table._new_cutter.cache_clear()


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=16)
STEPS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.sampled_from([None, 0, 1, 40, 300])), max_size=40)
LEARNING = st.lists(
    st.tuples(
        PROMPTS,
        st.sampled_from([0, 1, 40, 300]),
        st.tuples(st.integers(1, 2_000), st.integers(0, 2_000)),
        st.none() | st.tuples(st.integers(1, 40), st.integers(1, 60)),
    ),
    max_size=40,
)
POOL = st.lists(st.tuples(PROMPTS, st.integers(0, 9), st.sampled_from(["send", "end", "restart"])), max_size=60)


PROPERTY = hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Each example only reads what the fixture sets."""


@pytest.mark.usefixtures("_blocks")
@given(STEPS, st.integers(1, 30), st.integers(1, 40))
@PROPERTY
def test_a_table_is_a_literal_lru_of_blocks(steps: list, size: int, most_blocks: int) -> None:
    table = PrefixTable(size * TOKENS, most_blocks)
    literal = Literal(table._size_units, most_blocks)
    for names, tokens, output in steps:
        chain = prompt(*names, tokens=tokens * TOKENS)
        assert table.hit(chain) == literal.hit(chain)
        once_had = {name for name, _ in literal.held + literal.evicted}
        sent_had = literal.hit(chain)
        if output is None:
            sent = table.send(chain)
            expected = next((i for i, h in enumerate(chain.hashes) if ("block", h) not in once_had), len(chain))
            assert (sent.had, sent.once_had) == (sent_had, max(sent_had, expected))
            literal.use(chain)
        else:
            table.end(chain, output)
            literal.use(chain, output << 16)
        check(table)
        assert blocks_of(table._held) == [name[1] for name, _ in literal.held if name[0] == "block"]
        assert blocks_of(table._evicted) == [name[1] for name, _ in literal.evicted]
        assert table._held.units == literal.units(literal.held)


@pytest.mark.usefixtures("_blocks")
@given(LEARNING, st.integers(1, 30))
@PROPERTY
def test_whatever_is_learned_and_resized_the_table_stays_sound(steps: list, size: int) -> None:
    table = PrefixTable(size * TOKENS, 60)
    for names, output, reported, resized in steps:
        chain = prompt(*names)
        sent = table.send(chain)
        check(table)
        table.learn(chain, sent, *reported)
        check(table)
        table.end(chain, output)
        if resized is not None:
            table.resize(resized[0] * TOKENS, resized[1])
        check(table)
        assert SMALLEST <= table.scale <= LARGEST


@given(POOL, st.integers(4, 30), st.integers(1, 40))
@PROPERTY
def test_the_tables_of_a_pool_say_what_each_engines_literal_lru_holds(steps: list, size: int, most_blocks: int) -> None:
    tables = PrefixTables(most_blocks * 10)
    ids = [f"e{number}#1" for number in range(10)]
    tables.set_engines(dict.fromkeys(ids, size * TOKENS))
    literals = {engine_id: Literal(size * TOKENS << 16, most_blocks) for engine_id in ids}
    for names, number, step in steps:
        chain, engine_id = prompt(*names), ids[number]
        if step == "restart":
            ids[number] = f"{engine_id}again"
            del literals[engine_id]
            tables.set_engines(dict.fromkeys(ids, size * TOKENS))
            literals[ids[number]] = Literal(size * TOKENS << 16, most_blocks)
        else:
            if step == "send":
                tables[engine_id].send(chain)
            else:
                tables[engine_id].end(chain, 7)
            literals[engine_id].use(chain, 0 if step == "send" else 7 << 16)
        has = {each: tokens_of(literals[each].hit(chain)) for each in ids}
        hits = tables.hits(chain)
        assert all(has[each] == tokens for each, tokens in hits)
        assert len(dict(hits)) == len(hits)
        best_first = sorted((tokens for tokens in has.values() if tokens), reverse=True)
        assert [tokens for _, tokens in hits] == best_first[:MOST_HITS]
        held: dict[int, int] = {}
        for each, literal in literals.items():
            for name in (name for kind, name in dict(literal.held) if kind == "block"):
                held[name] = held.get(name, 0) | tables[each].bit
        assert tables.index.blocks == held  # nothing stays of what is evicted, or of an engine that is gone
        assert sorted(table.bit for _, table in tables.items()) == [1 << at for at in range(10)]


def test_which_of_many_equal_engines_are_named_differs_by_prompt() -> None:
    tables = PrefixTables()
    tables.set_engines({f"e{number}#1": 10**6 for number in range(64)})
    for number in range(64):
        tables[f"e{number}#1"].send(prompt(1, 2, 3))
    named = Counter(engine_id for number in range(2_000) for engine_id, _ in tables.hits(prompt(1, 2, 3, number + 9)))
    assert sum(named.values()) == 2_000 * MOST_HITS
    assert len(named) == 64
    assert min(named.values()) > 150
    assert max(named.values()) < 350


def test_nested_prompts_cost_a_look_up_as_little_as_others() -> None:
    """A client that sends every beginning of a prompt to another engine makes as many depths as there are engines."""
    tables = PrefixTables()
    tables.set_engines({f"e{number}#1": 10**9 for number in range(64)})
    longest = len(ENDS) - 1
    for number in range(64):
        tables[f"e{number}#1"].send(prompt(*range(longest - number * 6)))
    asked = Counting(tables.index.blocks)
    tables.index.blocks = asked
    hits = tables.hits(prompt(*range(longest)))
    assert [engine_id for engine_id, _ in hits] == [f"e{number}#1" for number in range(MOST_HITS)]
    assert asked.count <= 1 + MOST_HITS * (longest.bit_length() + 2)


def test_the_same_bytes_for_another_model_or_salt_share_nothing() -> None:
    assert not set(prompt(1, 2, 3).hashes) & set(prompt(1, 2, 3, root="lora").hashes)


def test_swapped_repeated_and_shifted_blocks_are_other_prompts() -> None:
    chains = [prompt(1, 2, 3), prompt(2, 1, 3), prompt(1, 1, 3), prompt(3, 3, 3), prompt(2, 3), prompt(2, 2, 3)]
    last = [chain.hashes[-1] for chain in chains]
    assert len(set(last)) == len(last)


def test_a_difference_in_the_last_byte_of_a_block_changes_it_and_all_after_it() -> None:
    base = bytearray(os.urandom(FINE_BYTES * 4))
    whole = Chain(PromptBytes("m", bytes(base), len(base)), 1_000)
    for end in range(1, len(whole) + 1, 7):
        other = bytearray(base)
        other[ENDS[end] - 1] ^= 1
        chain = Chain(PromptBytes("m", bytes(other), len(other)), 1_000)
        same = [a == b for a, b in zip(whole.hashes, chain.hashes, strict=True)]
        assert same == [True] * (end - 1) + [False] * (len(whole) - end + 1)


def test_hashes_differ_between_processes() -> None:
    """A client cannot prepare prompts that collide, because it does not know the process's key."""
    code = (
        "from sidecar.fleet.prefix_table import Chain; from sidecar.payload.prompt_bytes import PromptBytes; "
        "print(*Chain(PromptBytes('m', b'x' * 512, 512), 1).hashes)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    here = Chain(PromptBytes("m", b"x" * 512, 512), 1).hashes
    there = tuple(map(int, said.split()))
    assert len(there) == len(here) == 2
    assert not set(there) & set(here)


def test_blocks_have_256_bytes_at_first_and_a_prompt_has_never_more_than_388() -> None:
    sizes = [end - start for start, end in pairwise(ENDS)]
    assert ENDS[-1] == LONGEST_READ
    assert len(sizes) == 388
    assert sizes[: SHORT_BYTES // 256] == [256] * (SHORT_BYTES // 256)
    assert set(sizes[SHORT_BYTES // 256 :][: (FINE_BYTES - SHORT_BYTES) // 512]) == {512}
    assert all(size <= start // 64 for size, start in zip(sizes, ENDS, strict=False) if start >= FINE_BYTES)
    data = b"x" * LONGEST_READ
    assert len(Chain(PromptBytes("m", data, 8 * len(data)), 2_000_000)) == 388


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 2_559, 2_560, 65_536, 66_559, 66_560, 300_000])
def test_only_full_blocks_count(size: int) -> None:
    chain = Chain(PromptBytes("m", b"y" * size, size), size // 4)
    assert ENDS[len(chain)] <= size
    assert len(chain) == len(ENDS) - 1 or size < ENDS[len(chain) + 1]


def test_a_prompt_whose_end_was_not_read_is_never_hit_to_its_end() -> None:
    data = b"z" * LONGEST_READ
    chain = Chain(PromptBytes("m", data, 2 * LONGEST_READ), 500_000)
    table = PrefixTable(10_000_000)
    table.send(chain)
    assert chain.tokens_in(table.hit(chain)) == 250_000


class Counting(dict):
    """Counts the look-ups."""

    count = 0

    def get(self, *args: Any) -> Any:
        """See `dict.get`."""
        self.count += 1
        return super().get(*args)


class Engine:
    """A literal engine with a cache of its own size, which says what it found."""

    def __init__(self, size: int) -> None:
        self.cache = PrefixTable(size)

    def serve(self, chain: Chain) -> int:
        found = chain.tokens_in(self.cache.send(chain).had)
        self.cache.end(chain, 0)
        return found


def learned(
    configured: int, actual: int, requests: int = 1_600, cached: Callable[[int], int] = lambda found: found
) -> list:
    """The learned sizes relative to the actual one, under conversations that come back after different times."""
    table, engine, rng = PrefixTable(configured), Engine(actual), random.Random(3)
    grown = dict.fromkeys(range(60), 4)
    sizes = []
    for _ in range(requests):
        name = min(59, int(rng.expovariate(1 / 15)))
        grown[name] = 4 if grown[name] > 40 else grown[name] + 2
        chain = prompt(*(name * 1_000 + at for at in range(grown[name])))
        sent = table.send(chain)
        table.learn(chain, sent, chain.tokens, cached(engine.serve(chain)))
        table.end(chain, 0)
        sizes.append(table.size_tokens / actual)
    return sizes


@pytest.mark.parametrize("factor", [4, 2, 1, 1 / 2])
def test_the_size_is_learned_and_stays_there(factor: float) -> None:
    actual = 400 * TOKENS
    sizes = learned(round(actual * factor), actual)
    settled = sizes[1_000:]
    assert min(settled) >= 0.8
    assert max(settled) <= 1.3


def test_an_engine_whose_answer_counts_as_well_does_not_make_the_table_grow() -> None:
    """It finds more than any table could know: tokens that were in no prompt before."""
    actual = 400 * TOKENS
    assert max(learned(actual, actual, cached=lambda found: found + 300 if found else 0)) <= 1.3


def test_a_prompt_that_the_engine_still_computes_does_not_make_the_table_shrink() -> None:
    table = PrefixTable(10_000 * TOKENS)
    chain = prompt(*range(100))
    for _ in range(200):
        sent = table.send(chain)
        table.learn(chain, sent, chain.tokens, 0)
    assert table.scale == 1.0


def test_answers_that_were_predicted_together_change_the_size_once() -> None:
    table = PrefixTable(1_000 * TOKENS)
    chain = prompt(*range(100))
    table.send(chain)
    for number in range(200):
        table.send(prompt(10_000 + number))
    together = [table.send(chain)] * 500
    for sent in together:
        table.learn(chain, sent, chain.tokens, 0)
    assert table.scale == pytest.approx(1 / 1.1)


@pytest.mark.parametrize("cached", [0, 10**9])
def test_an_engine_that_reports_nonsense_moves_the_size_within_its_bounds(cached: int) -> None:
    assert all(SMALLEST * 0.99 <= size <= LARGEST for size in learned(25_600, 25_600, cached=lambda _: cached))


def test_the_tables_of_64_engines_together_have_a_bounded_number_of_blocks() -> None:
    tables = PrefixTables(most_blocks=640)
    tables.set_engines({f"e{number}#1": 10**9 for number in range(64)})
    tracemalloc.start()
    for number in range(2_000):
        tables[f"e{number % 64}#1"].send(prompt(number))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sum(len(table) for _, table in tables.items()) == 640
    assert used < 640 * 600  # the worst case: every run is a single block


def test_runs_cut_exactly_as_much_as_they_must() -> None:
    for first in (0, 120):
        run = BlockRun(tuple(range(40)), first, 65_536, 0)
        for units in range(1, run.units, 97 * 65_536):
            count = run.blocks_to_cut(units)
            freed = (ENDS[first + 40] - ENDS[first + 40 - count]) * run.units_per_byte
            less = (ENDS[first + 40] - ENDS[first + 41 - count]) * run.units_per_byte
            assert less < units <= freed
