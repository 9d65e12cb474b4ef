"""KV cache of an engine: blocks of tokens that running sequences hold, and a prefix cache in what is left.

The rules are vLLM 0.32's, read in `vllm/v1/core/block_pool.py`, `kv_cache_manager.py` and `sched/scheduler.py`:

1. The hash of a block covers its tokens and the hash of the block before it: a hit is a hit of the whole prefix.
2. A prompt hits its longest cached prefix of full blocks, but never its last token: that one yields the first output
   token (`get_computed_blocks`: `max_cache_hit_length = num_tokens - 1`).
3. Running sequences that share a prefix hold its blocks together. A block that nothing holds stays cached, and counts
   as free (`touch`, `free_blocks`, `get_usage`).
4. A block that is needed is taken from the free ones without content, then from the least recently used cached ones; a
   sequence releases its last block first, so a prefix outlives what was built on it (`get_new_blocks`, `free`).
5. Two sequences that compute one block at the same time hold a copy each; only the first copy is found later.

Room for prompt and output is reserved at once (TensorRT-LLM's GUARANTEED_NO_EVICT). Or it is reserved for the prompt
alone, and a block is taken when it is written (`grow`), as in vLLM. Without `caches_prefixes` a block is one token, and
nothing is ever found again.

`reserve`, `publish` and `release` take time in proportion to the blocks of one sequence, whatever the cache holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

BlockHash: TypeAlias = bytes


class Holding:
    """Blocks that one running sequence holds. `cached_tokens` were found when it was admitted, so nothing computes
    them.
    """

    __slots__ = ("_blocks", "_private", "_published", "_shared", "cached_tokens")

    def __init__(self, blocks: int, found: Sequence[BlockHash], block_tokens: int) -> None:
        self.cached_tokens = len(found) * block_tokens
        self._blocks = blocks
        self._shared = list(found)
        self._private = blocks - len(found)
        self._published = len(found)


class KvCache:
    """The blocks of one engine. Not thread-safe, never awaits.

    A remainder of `capacity_tokens` that fills no block is never used. `queried_tokens` and `hit_tokens` count the
    prompts of admitted sequences and what was found of them. Raises ValueError for a capacity below one block.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int = 1, *, caches_prefixes: bool = False) -> None:
        if block_tokens < 1:
            raise ValueError("block_tokens must be at least 1")
        if capacity_tokens < block_tokens:
            raise ValueError(f"a KV cache of {capacity_tokens} tokens has no block of {block_tokens}")
        self.block_tokens = block_tokens
        self.caches_prefixes = caches_prefixes
        self.blocks = capacity_tokens // block_tokens
        self.queried_tokens = self.hit_tokens = 0
        self._private = 0
        self._holders: dict[BlockHash, int] = {}
        # The least recently used first. A dictionary would do, but to drop its first key again and again is O(n).
        self._idle: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def held_tokens(self) -> int:
        """Tokens in blocks that running sequences hold; what is cached and idle is free."""
        return (self._private + len(self._holders)) * self.block_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that no running sequence holds, cached ones included."""
        return self.blocks - self._private - len(self._holders)

    @property
    def cached_blocks(self) -> int:
        """Blocks that a prompt could hit, held ones included."""
        return len(self._holders) + len(self._idle)

    def fits(self, tokens: int) -> bool:
        """True if a sequence that holds `tokens` could ever run."""
        return self._blocks_for(tokens) <= self.blocks

    def hit_length(self, prompt: Sequence[BlockHash], prompt_tokens: int) -> int:
        """Tokens of a prompt that it would hit now."""
        return len(self._find(prompt, prompt_tokens)) * self.block_tokens

    def reserve(self, tokens: int, prompt: Sequence[BlockHash] = (), prompt_tokens: int = 0) -> Holding | None:
        """Room for a sequence of `tokens`, of which `prompt_tokens` are its prompt; None where there is none now.

        `prompt` has the hashes of the prompt's full blocks, in order.
        """
        found = self._find(prompt, prompt_tokens)
        fresh = self._blocks_for(tokens) - len(found)
        woken = sum(block in self._idle for block in found)
        if self._private + len(self._holders) + woken + fresh > self.blocks:
            return None
        for block in found:
            self._hold(block)
        self._private += fresh
        self._evict()
        if self.caches_prefixes:
            self.queried_tokens += prompt_tokens
            self.hit_tokens += len(found) * self.block_tokens
        return Holding(self._blocks_for(tokens), found, self.block_tokens)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Takes the blocks that the holder lacks for `tokens`. False, and nothing happens, where there are too few."""
        fresh = self._blocks_for(tokens) - holding._blocks
        if fresh <= 0:
            return True
        if self._private + len(self._holders) + fresh > self.blocks:
            return False
        holding._blocks += fresh
        holding._private += fresh
        self._private += fresh
        self._evict()
        return True

    def publish(self, holding: Holding, blocks: Sequence[BlockHash], computed_tokens: int) -> None:
        """The holder has computed its first `computed_tokens`: their full blocks can be hit from now on."""
        full = min(computed_tokens // self.block_tokens, len(blocks))
        for number in range(holding._published, full):
            block = blocks[number]
            if block in self._holders:
                continue  # the holder keeps a copy of its own, which is never found
            holding._private -= 1
            self._private -= 1
            self._hold(block)
            holding._shared.append(block)
        holding._published = max(holding._published, full)

    def release(self, holding: Holding) -> None:
        """The holder is gone. What it published stays, as far as there is room."""
        self._private -= holding._private
        for block in reversed(holding._shared):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._idle[block] = None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _find(self, prompt: Sequence[BlockHash], prompt_tokens: int) -> Sequence[BlockHash]:
        if not self.caches_prefixes:
            return ()
        most = min(len(prompt), max(prompt_tokens - 1, 0) // self.block_tokens)
        for count in range(most):
            if prompt[count] not in self._holders and prompt[count] not in self._idle:
                return prompt[:count]
        return prompt[:most]

    def _hold(self, block: BlockHash) -> None:
        self._idle.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def _evict(self) -> None:
        while self._private + len(self._holders) + len(self._idle) > self.blocks:
            self._idle.popitem(last=False)
