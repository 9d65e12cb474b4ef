"""Load: rows of the Mooncake conversation trace as chat requests, with the same blocks in common.

The prompts are text, four bytes a token, one user message each: a block's hash gives the same bytes in every prompt.
The trace is Mooncake's (FAST'25 release, Apache-2.0), by default in the folder `shared/` beside the checkout. Its times
are rounded down to three seconds; each is moved later by less than that, by chance (`seed`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice

import msgspec

from benchmarks.fleet.setting import Setting
from benchmarks.fleet_routers.prefix_blocks import BYTES_PER_TOKEN
from sidecar.tools.loadgen import Planned
from sidecar.tools.replay.plan import Sizing, rounding_s, schedule
from sidecar.tools.replay.trace import TraceRow, read_trace

PATH = "/v1/chat/completions"
Label = Callable[[random.Random], tuple[str, Mapping[str, str]]]
"""By chance a request's label (its tier), and the headers that ask for it."""


def unlabeled(_: random.Random) -> tuple[str, Mapping[str, str]]:
    """All requests alike."""
    return "", {}


def load(setting: Setting, label: Label = unlabeled) -> Sequence[Planned]:
    """The requests in the order of their times, which are real seconds. Raises BadTrace."""
    chance = random.Random(f"{setting.seed} order")
    rows = read_trace(str(setting.trace), setting.first_row + setting.requests).rows
    rows = list(islice(rows, setting.first_row, None))
    sizing = Sizing(speed=setting.rate * setting.compression, scale=setting.scale)
    sized = schedule(rows, sizing, rounding_s(rows), chance)
    texts = Texts(setting.seed, setting.block_tokens)
    planned = [_planned(row, texts, *label(chance)) for row in sized]
    return sorted(planned, key=lambda one: one.at_s)


def _planned(row: TraceRow, texts: Texts, label: str, headers: Mapping[str, str]) -> Planned:
    assert row.input_tokens is not None
    body = {
        "model": "emulated",
        "messages": [{"role": "user", "content": texts.prompt(row.hash_ids, row.input_tokens)}],
        "max_tokens": row.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Planned(at_s=row.at_s or 0.0, path=PATH, headers=headers, body=msgspec.json.encode(body), label=label)


class Texts:
    """The text of each block, made once. `seed` makes other texts with the same in common."""

    def __init__(self, seed: int, block_tokens: int) -> None:
        self._seed = seed
        self._block_bytes = block_tokens * BYTES_PER_TOKEN
        self._blocks: dict[int, str] = {}

    def prompt(self, hashes: Sequence[int], tokens: int) -> str:
        """A prompt of so many tokens that begins with these blocks."""
        return "".join(map(self._block, hashes))[: tokens * BYTES_PER_TOKEN]

    def _block(self, number: int) -> str:
        if number not in self._blocks:
            digest = blake2b(f"{self._seed} {number}".encode(), digest_size=32).hexdigest()
            self._blocks[number] = (digest * (self._block_bytes // len(digest) + 1))[: self._block_bytes]
        return self._blocks[number]


def tokens_of(planned: Planned) -> tuple[int, int]:
    """Tokens of a request's prompt, and the most of its answer, as the engines count them."""
    body = msgspec.json.decode(planned.body)
    return -(-len(body["messages"][0]["content"]) // BYTES_PER_TOKEN), body["max_tokens"]
