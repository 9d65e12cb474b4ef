"""Which engines hold a block of a prompt: one look-up for all of them.

A block is its hash (`prefix_table`), and an engine is one bit of a mask. An engine holds a block only where it holds
all blocks before it in the prompt. So along a prompt masks only lose bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence


def count_first(hashes: Sequence[int], blocks: Container[int], start: int = 0) -> int:
    """How many of the first hashes are in `blocks`, which has the first `start` of them or need not.

    Where it has a block, it must have all from `start` up to it.
    """
    absent = len(hashes)
    if start == absent or hashes[start] not in blocks:
        return start
    if hashes[-1] in blocks:
        return absent
    present = start
    while present + 1 < absent:
        middle = (present + absent) // 2
        if hashes[middle] in blocks:
            present = middle
        else:
            absent = middle
    return absent


class BlockIndex:
    """The mask of each block that at least one engine holds. `blocks` are these masks, by hash."""

    __slots__ = ("_bits", "blocks")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self._bits = 0

    def new_bit(self) -> int:
        """A bit for one more engine."""
        bit = ~self._bits & (self._bits + 1)
        self._bits |= bit
        return bit

    def free(self, bit: int) -> None:
        """Gives a bit back. Its engine must hold nothing any more."""
        self._bits &= ~bit

    def add(self, hashes: Sequence[int], bit: int) -> None:
        """An engine now holds these consecutive blocks of a prompt, and all before them."""
        blocks = self.blocks
        known = count_first(hashes, blocks)
        for name in hashes[:known]:
            blocks[name] |= bit
        if known < len(hashes):
            blocks.update(dict.fromkeys(hashes[known:], bit))

    def remove(self, hashes: Sequence[int], bit: int) -> None:
        """An engine has lost these consecutive blocks of a prompt, and all after them."""
        blocks = self.blocks
        shared, alone = -1, len(hashes)  # from `alone` on no other engine holds them
        while shared + 1 < alone:
            middle = (shared + alone) // 2
            if blocks[hashes[middle]] == bit:
                alone = middle
            else:
                shared = middle
        for name in hashes[:alone]:
            blocks[name] ^= bit
        deque(map(blocks.__delitem__, hashes[alone:]), maxlen=0)

    def depths(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """How many of a prompt's first blocks are held, at least one, and the mask of the engines that hold just these.

        The most blocks come first. Each engine is in one of the masks at most. Each mask costs a bisection.
        """
        if not hashes:
            return
        get, last = self.blocks.get, len(hashes) - 1
        rest = get(hashes[0], 0)
        while rest:
            mask = get(hashes[last], 0) & rest
            if not mask:
                absent, last = last, 0
                while last + 1 < absent:
                    middle = (last + absent) // 2
                    if get(hashes[middle], 0) & rest:
                        last = middle
                    else:
                        absent = middle
                mask = get(hashes[last], 0) & rest
            yield last + 1, mask
            rest ^= mask
