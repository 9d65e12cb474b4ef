"""The KV cache on its own, and against a slow one that has every block as an object and compares whole prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tools.step_model.kv_cache import BlockHash, Holding, KvCache

Tokens = tuple[int, ...]


def blocks_of(tokens: Tokens, size: int) -> list[BlockHash]:
    """A block's name is everything up to its end: as chained as can be."""
    return [bytes(tokens[:end]) for end in range(size, len(tokens) + 1, size)]


@dataclass(eq=False)
class Block:
    """A piece of memory: the prefix whose end it holds, where it can be found, and how many sequences hold it."""

    prefix: Tokens | None = None
    holders: int = 0


@dataclass(eq=False)
class Running:
    """A sequence of the reference: what others may find, what is its alone, and how far it has come."""

    tokens: Tokens
    chain: list[Block]
    own: list[Block]


class Reference:
    """The rules in the docstring of `kv_cache`, word by word. Every step looks at every block."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.all = [Block() for _ in range(blocks)]
        self.free = list(self.all)  # the next to be taken first

    def found(self, prompt: Tokens) -> list[Block]:
        hits: list[Block] = []
        for end in range(self.size, len(prompt), self.size):  # never the last token
            block = self.with_prefix(prompt[:end])
            if block is None:
                break
            hits.append(block)
        return hits

    def with_prefix(self, prefix: Tokens) -> Block | None:
        return next((block for block in self.all if block.prefix == prefix), None)

    def reserve(self, prompt: Tokens, output_tokens: int) -> Running | None:
        hits = self.found(prompt)
        fresh = -(-(len(prompt) + output_tokens) // self.size) - len(hits)
        if fresh > len([block for block in self.free if block not in hits]):
            return None
        for block in hits:
            self.hold(block)
        own = [self.free.pop(0) for _ in range(fresh)]
        for block in own:
            block.prefix, block.holders = None, 1
        return Running(prompt, hits, own)

    def hold(self, block: Block) -> None:
        if not block.holders:
            self.free.remove(block)
        block.holders += 1

    def publish(self, running: Running, tokens: Tokens) -> None:
        """The sequence has computed exactly `tokens`."""
        for end in range((len(running.chain) + 1) * self.size, len(tokens) + 1, self.size):
            mine, known = running.own.pop(0), self.with_prefix(tokens[:end])
            if known is not None and known.holders:
                running.chain.append(mine)  # a copy of its own, which is never found
                continue
            if known is not None:  # nothing holds it: mine is as good
                known.prefix = None
                self.free.remove(known)
                self.free.insert(0, known)
            mine.prefix = tokens[:end]
            running.chain.append(mine)

    def release(self, running: Running) -> None:
        for block in [*running.own, *reversed(running.chain)]:
            block.holders -= 1
            if not block.holders:
                self.free.insert(0 if block.prefix is None else len(self.free), block)

    @property
    def held(self) -> int:
        return sum(bool(block.holders) for block in self.all)

    @property
    def prefixes(self) -> set[bytes]:
        return {bytes(block.prefix) for block in self.all if block.prefix is not None}


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("start"), token_lists, st.integers(0, 5)),
        st.tuples(st.just("compute"), st.integers(0, 9), st.integers(1, 6)),
        st.tuples(st.just("end"), st.integers(0, 9), token_lists),
    ),
    max_size=60,
)


@given(operations, st.integers(1, 4), st.integers(1, 12))
def test_it_finds_holds_and_evicts_what_the_slow_one_does(
    steps: list[tuple[str, object, object]], size: int, blocks: int
) -> None:
    cache = KvCache(blocks * size + size - 1, size, caches_prefixes=True)
    reference = Reference(blocks, size)
    running: list[tuple[Running, Holding, int]] = []  # and the prompt tokens that are computed
    for kind, one, two in steps:
        if kind == "start":
            names, tokens = blocks_of(one, size), len(one) + two
            assert cache.hit_length(names, len(one)) == len(reference.found(one)) * size < len(one)
            holding, slow = cache.reserve(tokens, names, len(one)), reference.reserve(one, two)
            assert (holding is None) == (slow is None)
            if holding is not None and slow is not None:
                running.append((slow, holding, holding.cached_tokens))
        elif running and kind == "compute":
            place = one % len(running)
            slow, holding, computed = running[place]
            computed = min(computed + two, len(slow.tokens))
            cache.publish(holding, blocks_of(slow.tokens, size), computed)
            reference.publish(slow, slow.tokens[:computed])
            running[place] = (slow, holding, computed)
        elif running:
            slow, holding, computed = running.pop(one % len(running))
            if computed == len(slow.tokens):  # it has an output, which is cached as far as it had room
                room = (len(slow.chain) + len(slow.own)) * size
                whole = (*slow.tokens, *two)[:room]
                cache.publish(holding, blocks_of(whole, size), len(whole))
                reference.publish(slow, whole)
            cache.release(holding)
            reference.release(slow)
        check(cache, reference, blocks)


def check(cache: KvCache, reference: Reference, blocks: int) -> None:
    names = reference.prefixes
    assert cache.held_tokens == reference.held * cache.block_tokens <= blocks * cache.block_tokens
    assert cache.cached_blocks == len(names) <= blocks
    for name in names:
        assert name[: -cache.block_tokens] in names | {b""}, "a block is cached without the one before it"
        chain = blocks_of(tuple(name), cache.block_tokens)
        assert cache.hit_length(chain, len(name) + 1) == len(name)


def run(cache: KvCache, prompt: Tokens, output_tokens: int = 0) -> Holding:
    """A sequence that is admitted and computes its prompt."""
    names = blocks_of(prompt, cache.block_tokens)
    holding = cache.reserve(len(prompt) + output_tokens, names, len(prompt))
    cache.publish(holding, names, len(prompt))
    return holding


def test_without_prefixes_a_block_is_a_token_and_nothing_is_found() -> None:
    cache = KvCache(100)
    holding = cache.reserve(60, blocks_of((1,) * 50, 1), 50)
    assert (holding.cached_tokens, cache.held_tokens, cache.cached_blocks) == (0, 60, 0)
    assert cache.reserve(41) is None
    assert cache.queried_tokens == cache.hit_tokens == 0


@pytest.mark.parametrize("wrong", [(15, 16), (16, 0)])
def test_figures_that_no_cache_could_have_are_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"block|capacity"):
        KvCache(*wrong, caches_prefixes=True)


def test_running_requests_take_the_room_of_what_is_only_cached_the_oldest_first() -> None:
    cache = KvCache(16, 4, caches_prefixes=True)
    cache.release(run(cache, (1,) * 8))
    cache.release(run(cache, (2,) * 8))
    assert cache.cached_blocks == 4
    big = run(cache, (3,) * 8, output_tokens=4)
    assert [cache.hit_length(blocks_of((n,) * 8, 4), 9) for n in (1, 2)] == [
        0,
        4,
    ]  # the last block goes before its first
    assert cache.reserve(8, (), 8) is None
    cache.release(big)


def test_a_hit_that_nothing_holds_takes_room_again() -> None:
    cache = KvCache(16, 4, caches_prefixes=True)
    prompt = (1,) * 9
    cache.release(run(cache, prompt))
    other = cache.reserve(8, (), 8)
    assert cache.reserve(9, blocks_of(prompt, 4), 9) is None  # two found, but idle, and one more: three of two free
    cache.release(other)
    assert run(cache, prompt).cached_tokens == 8
