"""Prediction of prefix hits: for each engine, the prompts that its prefix cache is likely to hold.

Engines keep the KV of past prompts in blocks, and evict the least recently used first; of one prompt the last block
goes first (vLLM: `vllm/v1/core/block_pool.py`, SGLang: `srt/mem_cache/radix_cache.py`). A `PrefixTable` does the same
with hashes over the prompt's bytes: an exact LRU of blocks, in tokens.

- **Chain.** A block's hash covers its bytes and the hash before it, `hash((before, bytes))`. Python's hash of bytes is
  SipHash with a key that each process draws anew: it is the fastest hash of the standard library for such pieces, and a
  client that does not know the key cannot make two prompts collide. (A fixed PYTHONHASHSEED gives the key away.)
  Hashes are never compared between processes.
- **Bounds.** Blocks have 256 bytes in the first 2 KiB of a prompt and 512 bytes up to 64 KiB. Then their size doubles
  whenever the prompt does. A prompt of 1 MiB, the most that is read, has 388 blocks. The end of a hit is known to 128
  tokens, or to 1/64 of it where that is more.
- **Index.** One dictionary says which engines hold a block (`BlockIndex`), so a prediction costs about the same for
  one engine and for 64.
- **Runs.** A run is a stretch of consecutive blocks that were used last by the same prompt. Only runs are in an order.
  A block is used no earlier than the block after it, so the blocks of a prompt that a table has are always its first
  ones: bisection finds how many. A prompt that goes on where a run ends takes the run over, and touches only the blocks
  that the run has not: the new ones, and a beginning that other prompts have used in between.
- **Size.** What falls out of the table is remembered a while as *evicted*, so that a later answer can show whether it
  fell out too early. `PrefixTable.learn` corrects the size by the engine's own count of cached tokens.

Engines share cached prefixes between tenants, and separate them by `cache_salt` and by the model's name (an adapter):
so do the tables. A tenant's unique prompts push other tenants' prompts out of a table exactly as they do in the engine.

The cost of a request is O(blocks), whatever the tables hold and however many engines there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

import msgspec

from sidecar.apis import Api
from sidecar.payload.prompt_bytes import LONGEST_READ, PromptBytes

# -- Which engines hold a block of a prompt: one look-up for all of them.
#
# A block is its hash (`prefix_table`), and an engine is one bit of a mask. An engine holds a block only where it
# holds all blocks before it in the prompt. So along a prompt masks only lose bits.


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


BLOCK_BYTES = 256
SHORT_BYTES, FINE_BYTES = 2**11, 2**16
"""The lengths from which blocks become larger: twice as large from the first on, and whenever the prompt doubles from
the second on."""
MOST_HITS = 8
"""Engines that a prediction names: the others are chosen for their load, whatever little they have."""
MOST_BLOCKS = 2**19
"""Blocks in all tables of a process, evicted ones included: 120 MB with prompts of 4,000 tokens, at most 300 MB, where
every prompt has a single block. With prompts of 8,000 tokens they hold what 16 engines of 4M tokens each hold."""
SMALLEST, LARGEST = 1 / 16, 4.0
"""Bounds of the learned size, relative to the configured one."""
STEP = 0.1
"""The most that one answer changes the size. Some 15 answers correct a size that is four times too large."""
SLACK = 1 / 16
"""The share of a prompt by which prediction and measurement may differ, and say nothing about the size: engines round
down to their own blocks, and a text's tokens are not spread evenly over its bytes."""
_SLACK_TOKENS = 128
_RECENT = 1 / 16
"""The share of the table's size that may have entered since a block was used: such a block cannot be evicted yet. Where
the engine did not find it, the engine was still computing it."""
_SCALE = 2**16
"""Units of a token. Sizes are whole numbers of units, so that sums never drift."""


def _block_ends() -> Iterator[int]:
    end, size = 0, BLOCK_BYTES
    while end < LONGEST_READ:
        if end == SHORT_BYTES or (end >= FINE_BYTES and end & (end - 1) == 0):
            size *= 2
        end += size
        yield end


ENDS: tuple[int, ...] = (0, *_block_ends())
"""The bytes that the first N blocks of a prompt have, by N."""


@cache
def _new_cutter(blocks: int) -> Callable[[bytes], tuple[bytes, ...]]:
    """Cuts the first blocks out of a prompt. Much faster than slices."""
    return Struct("".join(f"{end - start}s" for start, end in pairwise(ENDS[: blocks + 1]))).unpack_from


class Chain:
    """The hashes of a prompt's full blocks.

    `tokens` is the prompt's size as the estimator knows it, `size` its bytes.
    """

    __slots__ = ("hashes", "size", "tokens", "units_per_byte")

    def __init__(self, prompt: PromptBytes, tokens: int) -> None:
        data, before = prompt.data, hash(prompt.root)
        count = bisect_right(ENDS, len(data)) - 1
        pieces = _new_cutter(count)(data) if count else ()
        self.hashes = tuple([before := hash((before, piece)) for piece in pieces])
        self.tokens = tokens
        self.size = max(prompt.size, 1)
        self.units_per_byte = tokens * _SCALE // self.size
        """How much of an engine's cache a byte of this prompt takes."""

    def __len__(self) -> int:
        return len(self.hashes)

    def tokens_in(self, blocks: int, prompt_tokens: int | None = None) -> int:
        """The tokens in the first `blocks`, where the whole prompt has `prompt_tokens`."""
        tokens = self.tokens if prompt_tokens is None else prompt_tokens
        return ENDS[blocks] * tokens // self.size


class BlockRun(msgspec.Struct, gc=False, eq=False):
    """Consecutive blocks that one prompt used last. `first` is the number of blocks before them in their prompt.

    `output_units` is the answer, whose text is not known, and the rest of the prompt, which fills no block. They lie
    after the blocks, and are evicted before them. `units` is how much of the cache both take.

    There may be hundreds of thousands: the garbage collector would stop the process for a long time to look at them.
    """

    hashes: tuple[int, ...]
    first: int
    units_per_byte: int
    entered: int
    output_units: int = 0
    units: int = 0

    def __post_init__(self) -> None:
        self.units = (ENDS[self.first + len(self.hashes)] - ENDS[self.first]) * self.units_per_byte

    def cut_beginning(self, count: int) -> None:
        """Takes away its first blocks."""
        self.hashes = self.hashes[count:]
        self.units -= (ENDS[self.first + count] - ENDS[self.first]) * self.units_per_byte
        self.first += count

    def cut_end(self, count: int) -> BlockRun:
        """Takes away its last blocks, which a new run has."""
        kept = len(self.hashes) - count
        end = BlockRun(self.hashes[kept:], self.first + kept, self.units_per_byte, self.entered)
        self.hashes = self.hashes[:kept]
        self.units -= end.units
        return end

    def blocks_to_cut(self, units: int) -> int:
        """How many blocks at its end have at least so many units, after its output."""
        missing = units - self.output_units
        if missing <= 0:
            return 0
        last = self.first + len(self.hashes)
        kept_bytes = ENDS[last] - -(-missing // max(1, self.units_per_byte))
        return min(len(self.hashes), last - max(self.first, bisect_right(ENDS, kept_bytes) - 1))


class Runs:
    """Blocks in the order of their last use, as runs."""

    __slots__ = ("_order", "of", "units")

    def __init__(self) -> None:
        self.of: dict[int, BlockRun] = {}
        self.units = 0
        # The least recently used first. A dictionary would do, but to drop its first key again and again is O(n).
        self._order: OrderedDict[BlockRun, None] = OrderedDict()

    def __contains__(self, run: BlockRun) -> bool:
        return run in self._order

    def __iter__(self) -> Iterator[BlockRun]:
        return iter(self._order)

    def add(self, run: BlockRun) -> None:
        """The most recently used run. Its blocks are in no other run."""
        self.of.update(dict.fromkeys(run.hashes, run))
        self._order[run] = None
        self.units += run.units

    def use(self, chain: Chain, had: int) -> BlockRun:
        """Makes a prompt's blocks the most recently used ones, in one run. The first `had` are here, the rest not.

        Mostly the prompt goes on where a run ends. Then that run takes over what it has not yet.
        """
        hashes = chain.hashes
        run = self.of[hashes[had - 1]] if had else None
        if run is None or run.first + len(run.hashes) != had:
            self.disown(hashes, 0, had)
            run = BlockRun(hashes, 0, chain.units_per_byte, 0)
            self.add(run)
            return run
        if run.first:
            before = hashes[: run.first]
            self.disown(hashes, 0, run.first)
            self.of.update(dict.fromkeys(before, run))
            run.hashes = before + run.hashes
            run.first = 0
        if had < len(hashes):
            behind = hashes[had:]
            self.of.update(dict.fromkeys(behind, run))
            run.hashes += behind
        units = ENDS[len(hashes)] * chain.units_per_byte
        self.units += units - run.units
        run.units, run.units_per_byte, run.output_units = units, chain.units_per_byte, 0
        self._order.move_to_end(run)
        return run

    def add_oldest(self, run: BlockRun) -> None:
        """The least recently used run."""
        self.add(run)
        self._order.move_to_end(run, last=False)

    def pop_newest(self, most_units: int) -> BlockRun | None:
        """Takes out the most recently used run, where it has at most so many units."""
        run = next(reversed(self._order), None)
        if run is None or run.units > most_units:
            return None
        self._drop(run)
        return run

    def disown(self, hashes: Sequence[int], start: int, stop: int) -> None:
        """Takes blocks of one prompt from the runs that have them: all of `hashes[start:stop]` are here.

        Each of these runs loses its beginning, or ends. The caller adds the blocks in a new run, or forgets them.
        """
        while start < stop:
            run = self.of[hashes[start]]
            count = _common(run, hashes, start, min(stop - start, len(run.hashes)))
            self.units -= run.units
            if count == len(run.hashes):
                del self._order[run]
            else:
                run.cut_beginning(count)
                self.units += run.units
            start += count

    def forget(self, hashes: Sequence[int]) -> None:
        """Forgets blocks that belong to no run."""
        deque(map(self.of.__delitem__, hashes), maxlen=0)

    def cut(self, most_units: int, most_blocks: int) -> list[BlockRun]:
        """Takes out the least recently used blocks until the bounds hold, in the order in which they were used."""
        gone: list[BlockRun] = []
        while self._order and (self.units > most_units or len(self.of) > most_blocks):
            run = next(iter(self._order))
            count = max(run.blocks_to_cut(self.units - most_units), min(len(run.hashes), len(self.of) - most_blocks))
            if count == len(run.hashes):
                self._drop(run)
                gone.append(run)
            else:
                gone += self._cut_end(run, count, most_units)
        for run in gone:
            run.units -= run.output_units
            run.output_units = 0
        return gone

    def add_output(self, run: BlockRun, units: int) -> None:
        """Notes the answer of the prompt that used this run last."""
        run.output_units += units
        run.units += units
        self.units += units

    def _cut_end(self, run: BlockRun, count: int, most_units: int) -> list[BlockRun]:
        """Cuts the output, as far as it must, and `count` blocks off one run."""
        freed = run.output_units if count else min(run.output_units, self.units - most_units)
        run.output_units -= freed
        run.units -= freed
        self.units -= freed
        if not count:
            return []
        end = run.cut_end(count)
        self.units -= end.units
        self.forget(end.hashes)
        return [end]

    def _drop(self, run: BlockRun) -> None:
        del self._order[run]
        self.forget(run.hashes)
        self.units -= run.units


def _common(run: BlockRun, hashes: Sequence[int], start: int, most: int) -> int:
    """How many blocks, at least one, a run and a prompt have in common from `start` on; the run begins there."""
    if run.hashes[most - 1] == hashes[start + most - 1]:
        return most
    return bisect_left(range(most), True, 1, key=lambda at: run.hashes[at] != hashes[start + at])


class Sent(NamedTuple):
    """Prediction of a table for a request when it was sent: the first blocks that it had, and had or had evicted.

    `is_settled` says that the last one that it had was used long enough ago to be computed, if the engine has it.
    """

    had: int
    once_had: int
    scale: float
    is_settled: bool


class PrefixTable:
    """The prompts that one engine's prefix cache is predicted to hold.

    `configured_tokens` is the capacity of the engine's KV cache, `scale` the learned factor. `predicted_tokens` and
    `measured_tokens` add up the answers that report how much was cached; `reporting` are the APIs of such answers.
    `index` has the blocks that it holds, by its `bit`.
    """

    def __init__(self, configured_tokens: int, most_blocks: int = MOST_BLOCKS, index: BlockIndex | None = None) -> None:
        self.index = BlockIndex() if index is None else index
        self.bit = self.index.new_bit()
        self.scale = 1.0
        self.predicted_tokens = self.measured_tokens = 0
        self.reporting: tuple[Api, ...] = ()
        self.entered_units = 0
        self._held, self._evicted = Runs(), Runs()
        self.resize(configured_tokens, most_blocks)

    def __len__(self) -> int:
        """Blocks, evicted ones included."""
        return len(self._held.of) + len(self._evicted.of)

    @property
    def size_tokens(self) -> int:
        """The size of the engine's cache, as far as prompts and answers find room in it."""
        return self._size_units // _SCALE

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompts and answers in the table."""
        return self._held.units // _SCALE

    @property
    def entered_tokens(self) -> int:
        """All tokens that have ever entered the table anew."""
        return self.entered_units // _SCALE

    def resize(self, configured_tokens: int, most_blocks: int) -> None:
        """Sets the configured size, and the most blocks of this table."""
        self.configured_tokens = configured_tokens
        self._most_blocks = most_blocks
        self._grow()

    def clear(self) -> None:
        """Gives up the engine's bit and its blocks in the index. The table is not used any more."""
        for run in self._held:
            self.index.remove(run.hashes, self.bit)
        self.index.free(self.bit)

    def hit(self, chain: Chain) -> int:
        """How many of the prompt's first blocks the engine is predicted to have."""
        return count_first(chain.hashes, self._held.of)

    def send(self, chain: Chain) -> Sent:
        """The prompt goes to the engine: its blocks are the most recently used ones."""
        had = self.hit(chain)
        once_had = count_first(chain.hashes, self._evicted.of, had)
        is_settled = False
        if had:
            age_units = self.entered_units - self._held.of[chain.hashes[had - 1]].entered
            is_settled = age_units > self._size_units * _RECENT
        self._use(chain, had, once_had)
        return Sent(had, once_had, self.scale, is_settled)

    def end(self, chain: Chain, output_tokens: int) -> None:
        """The request has ended: the engine gives its blocks back now, and so counts them as used now.

        After the prompt's full blocks it has the rest of the prompt, and the answer.
        """
        had = self.hit(chain)
        run = self._use(chain, had, count_first(chain.hashes, self._evicted.of, had))
        behind = output_tokens + chain.tokens - chain.tokens_in(len(chain))
        if run is not None and behind and run in self._held:
            self._held.add_output(run, behind * _SCALE)
            self.entered_units += behind * _SCALE
            self._fit()

    def learn(self, chain: Chain, sent: Sent, prompt_tokens: int, cached_tokens: int) -> None:
        """Corrects the size by what the engine found of a prompt, by its own count.

        The engine found less than the table had: it has evicted that, so the table is too large. It found what the
        table had evicted: the table is too small. Tokens that the table never had (an answer, a template) say nothing.
        A size changes by at most `STEP` from the size that the prediction was made with, however many answers come at
        once: so answers that were predicted before a change cannot make it again.
        """
        predicted = chain.tokens_in(sent.had, prompt_tokens)
        self.predicted_tokens += predicted
        self.measured_tokens += cached_tokens
        slack = _SLACK_TOKENS + prompt_tokens * SLACK
        if cached_tokens < predicted - slack and sent.is_settled:
            share = (predicted - cached_tokens) / prompt_tokens
            self.scale = max(SMALLEST, min(self.scale, sent.scale / (1 + STEP * min(1.0, share))))
            self._grow()
        if sent.once_had > sent.had:
            found = min(cached_tokens, chain.tokens_in(sent.once_had, prompt_tokens))
            if found > predicted + slack:
                share = (found - predicted) / prompt_tokens
                self.scale = min(LARGEST, max(self.scale, sent.scale * (1 + STEP * min(1.0, share))))
                self._grow()

    def _use(self, chain: Chain, had: int, once_had: int) -> BlockRun | None:
        hashes = chain.hashes
        if not hashes:
            return None
        if had < once_had:
            self._evicted.disown(hashes, had, once_had)
            self._evicted.forget(hashes[had:once_had])
        if had < len(hashes):
            self.index.add(hashes[had:], self.bit)
            self.entered_units += (ENDS[len(hashes)] - ENDS[had]) * chain.units_per_byte
        run = self._held.use(chain, had)
        run.entered = self.entered_units
        self._fit()
        return run

    def _fit(self) -> None:
        """Evicts what has no room, and forgets the oldest evicted blocks.

        As much as the size is remembered again: the size grows by a tenth at most, and the evidence for that is near
        its bound.
        """
        held, evicted = self._held, self._evicted
        if held.units > self._size_units or len(held.of) > self._most_blocks:
            for run in held.cut(self._size_units, self._most_blocks):
                self.index.remove(run.hashes, self.bit)
                evicted.add(run)
        if evicted.of:
            evicted.cut(self._size_units, max(0, self._most_blocks - len(held.of)))

    def _grow(self) -> None:
        """Takes the size that is configured and learned, and takes back what has room in it."""
        self._size_units = round(self.configured_tokens * self.scale) * _SCALE
        while (free_units := self._size_units - self._held.units) > 0:
            run = self._evicted.pop_newest(free_units)
            if run is None:
                break
            self._held.add_oldest(run)
            self.index.add(run.hashes, self.bit)
        self._fit()


class PrefixTables:
    """One table for each engine of a pool, by the engine's id: a restarted engine has a new id, and an empty table.

    `index` says which engines hold a block.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self.index = BlockIndex()
        self._of: dict[str, PrefixTable] = {}
        self._names: dict[int, str] = {}  # by the engine's bit

    def __getitem__(self, engine_id: str) -> PrefixTable:
        return self._of[engine_id]

    def get(self, engine_id: str) -> PrefixTable | None:
        """An engine's table; None for an engine that is not in the pool any more."""
        return self._of.get(engine_id)

    def items(self) -> Iterator[tuple[str, PrefixTable]]:
        """All tables by engine id."""
        return iter(self._of.items())

    def set_engines(self, kv_tokens: Mapping[str, int]) -> None:
        """Sets the engines, and the tokens of each engine's KV cache. The tables of those that stay are kept."""
        share = self._most_blocks // max(1, len(kv_tokens))
        for engine_id in self._of.keys() - kv_tokens.keys():
            self._of.pop(engine_id).clear()
        for engine_id, tokens in kv_tokens.items():
            table = self._of.get(engine_id)
            if table is None:
                self._of[engine_id] = PrefixTable(tokens, share, self.index)
            else:
                table.resize(tokens, share)
        self._names = {table.bit: engine_id for engine_id, table in self._of.items()}

    def hits(self, chain: Chain) -> tuple[tuple[str, int], ...]:
        """The tokens of a prompt that each engine is predicted to have: at most 8 engines, the best first.

        Which ones of equals are named depends on the prompt, so that a text that all engines have favors none of them.
        """
        found: list[tuple[str, int]] = []
        for blocks, mask in self.index.depths(chain.hashes):
            tokens, most = chain.tokens_in(blocks), MOST_HITS - len(found)
            # Most masks are a single bit.
            names = (self._names[mask],) if mask in self._names else self._some(mask, most, chain.hashes[-1])
            found += [(name, tokens) for name in names]
            if len(found) == MOST_HITS:
                break
        return tuple(found)

    def _some(self, mask: int, most: int, seed: int) -> list[str]:
        """The engines of a mask, at most so many: those from the bit on that the seed says, and then from the first."""
        first = seed % mask.bit_length() if mask.bit_count() > most else 0
        names: list[str] = []
        rest = mask >> first << first or mask
        while len(names) < most:
            bit = rest & -rest
            names.append(self._names[bit])
            mask ^= bit
            rest = rest ^ bit or mask
            if not rest:
                break
        return names
