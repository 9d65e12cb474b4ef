"""Prefix blocks of each engine, as a router believes them: chained hashes in an LRU of the engine's own size.

Dynamo is told of an engine's blocks by events, llm-d predicts them as here. An LRU of the right size is nearly what the
events would say: the best case for the rules that use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BYTES_PER_TOKEN = 4
"""The emulated engines' own."""
BLOCK_TOKENS = 64
"""As the benchmark's engines have them."""


def block_hashes(prompt: bytes) -> Sequence[bytes]:
    """One for each full block; each covers the blocks before it."""
    size, found, before = BLOCK_TOKENS * BYTES_PER_TOKEN, [], b""
    for start in range(0, len(prompt) - size + 1, size):
        before = blake2b(before + prompt[start : start + size], digest_size=8).digest()
        found.append(before)
    return found


class PrefixBlocks:
    """What one engine is believed to have cached."""

    def __init__(self, cache_tokens: int) -> None:
        self._most = max(1, cache_tokens // BLOCK_TOKENS)
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def hit_blocks(self, hashes: Sequence[bytes]) -> int:
        """How many blocks it has from the beginning on."""
        return next((number for number, one in enumerate(hashes) if one not in self._blocks), len(hashes))

    def hit_tokens(self, hashes: Sequence[bytes], prompt_tokens: int) -> int:
        """The same in tokens. A prompt's last token is never found, as in the engines."""
        return min(self.hit_blocks(hashes), max(prompt_tokens - 1, 0) // BLOCK_TOKENS) * BLOCK_TOKENS

    def add(self, hashes: Sequence[bytes]) -> None:
        """The engine has these now; a prompt's first block is the last to be forgotten."""
        for one in reversed(hashes):
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
