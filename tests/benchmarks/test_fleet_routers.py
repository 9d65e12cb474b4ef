"""The routers that the fleet is compared with: each rule as its source has it, and the process that applies it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fleet_routers import RULES
from benchmarks.fleet_routers.cache_aware import CacheAware, RadixTree
from benchmarks.fleet_routers.least_uncached_work import LeastUncachedWork
from benchmarks.fleet_routers.lmetric import LMetric
from benchmarks.fleet_routers.prefix_blocks import BLOCK_TOKENS, BYTES_PER_TOKEN, PrefixBlocks, block_hashes
from benchmarks.fleet_routers.rule import Request, Rule
from tests.support.each import each

pytestmark = pytest.mark.long

BLOCK = BLOCK_TOKENS * BYTES_PER_TOKEN
ENGINES = 3
SMALL_TEXTS = st.text("ab", max_size=12).map(str.encode)


def prompt(*blocks: str) -> Request:
    """A prompt of whole blocks, each filled with its letter."""
    return Request("".join(block * BLOCK for block in blocks).encode())


def served(rule: Rule, request: Request) -> int:
    engine = rule.choose(request)
    rule.first_byte(request, engine)
    rule.ended(request, engine)
    return engine


@each("name", RULES)
def test_counts_are_empty_after_any_order_of_ends(name: str) -> None:
    chance = random.Random(1)
    rule = RULES[name](ENGINES, 10 * BLOCK_TOKENS)
    running: list[tuple[Request, int, bool]] = []
    for number in range(400):
        request = prompt(*chance.choices("abcd", k=chance.randrange(0, 6)))
        engine = rule.choose(request)
        assert 0 <= engine < ENGINES
        running.append((request, engine, False))
        while len(running) > chance.randrange(1, 9):
            request, engine, is_prefilled = running.pop(chance.randrange(len(running)))
            if not is_prefilled and chance.random() < 0.7:
                rule.first_byte(request, engine)
                running.append((request, engine, True))
            else:
                rule.ended(request, engine)
        assert sum(rule.requests) == len(running), number
    for request, engine, _ in running:
        rule.ended(request, engine)
    assert rule.requests == [0] * ENGINES
    if isinstance(rule, LeastUncachedWork):
        assert rule.prefill_tokens == [0] * ENGINES
        assert [len(active) for active in rule.active] == [0] * ENGINES


@given(st.lists(st.tuples(SMALL_TEXTS, st.integers(0, 2)), max_size=25), SMALL_TEXTS)
def test_the_radix_tree_matches_as_a_list_of_all_prompts_does(known: Sequence[tuple[bytes, int]], text: bytes) -> None:
    """The owner of a byte of the tree is the first who inserted a prompt that begins with everything up to it."""
    tree = RadixTree()
    for prefix, owner in known:
        tree.insert(prefix, owner)
    matched, owner_found = tree.match(text)
    longest = max((common(prefix, text) for prefix, _ in known), default=0)
    assert matched == longest
    first = next((owner for prefix, owner in known if longest and prefix.startswith(text[:longest])), None)
    assert owner_found == first


def common(one: bytes, other: bytes) -> int:
    """How many bytes both begin with, byte by byte."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@each(
    ("loads", "is_balanced"),
    [
        ([64, 0, 0], True),
        ([65, 0, 0], False),
        ([200, 135, 135], True),
        ([200, 134, 134], True),
        ([203, 135, 138], False),
    ],
)
def test_cache_aware_gives_up_affinity_where_both_thresholds_are_passed(loads: list[int], is_balanced: bool) -> None:
    rule = CacheAware(ENGINES, 1)
    assert served(rule, prompt("a", "b")) == 0
    rule.requests = list(loads)
    assert rule.choose(prompt("a", "b", "c")) == (0 if is_balanced else 1)


def test_least_uncached_work_weighs_prefill_and_held_blocks_against_a_hit() -> None:
    rule = LeastUncachedWork(ENGINES, 100 * BLOCK_TOKENS)
    conversation = [*"abcdefgh"]
    assert served(rule, prompt(*conversation)) == 0
    assert rule.cost(prompt(*conversation, "i"), 0) == 1 + 9  # one to prefill, nine to hold
    assert rule.cost(prompt(*conversation, "i"), 1) == 9 + 9
    busy = prompt(*"nopq")
    rule.choose(busy)  # by its number: engine 0 has nothing to do either
    assert rule.requests == [1, 0, 0]
    assert rule.cost(prompt(*conversation, "i"), 0) == (4 + 1) + (4 + 9)
    rule.first_byte(busy, 0)
    assert rule.cost(prompt(*conversation, "i"), 0) == 1 + (4 + 9)


def test_lmetric_multiplies_uncached_tokens_by_requests() -> None:
    rule = LMetric(2, 100 * BLOCK_TOKENS)
    assert served(rule, prompt(*"abcd")) == 0
    rule.requests = [3, 0]
    assert rule.choose(prompt(*"abcdef")) == 1  # 2 * 4 blocks there, 6 * 1 here
    rule = LMetric(2, 100 * BLOCK_TOKENS)
    assert served(rule, prompt(*"abcd")) == 0
    rule.requests = [1, 0]
    assert rule.choose(prompt(*"abcdef")) == 0  # 2 * 2, against 6 * 1


def test_prefix_blocks_forget_the_least_recently_used_and_a_prompts_end_first() -> None:
    blocks = PrefixBlocks(3 * BLOCK_TOKENS)
    old, fresh = prompt(*"ab").blocks, prompt(*"cd").blocks
    blocks.add(old)
    blocks.add(fresh)
    assert (blocks.hit_blocks(old), blocks.hit_blocks(fresh)) == (1, 2)


@given(st.binary(max_size=4 * BLOCK), st.binary(max_size=4 * BLOCK))
def test_block_hashes_are_equal_as_far_as_the_prompts_are(one: bytes, other: bytes) -> None:
    shared = common(one, other) // BLOCK
    pairs = zip(block_hashes(one), block_hashes(other), strict=False)
    assert sum(1 for left, right in pairs if left == right) == shared
