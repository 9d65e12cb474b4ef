"""Token blocks of a prompt: the chained hashes by which the emulated engine finds a prefix again.

A token is four bytes of text, or one token id (`request.py`), so a block of N tokens is 4 * N bytes of the prompt. What
a chat template would write between messages is not counted as tokens, but it belongs to the hash of the block in which
it stands: the same text under another role is another prompt. The first hash also covers the model's name, `cache_salt`
and the tools (vLLM: `generate_block_hash_extra_keys` in `vllm/v1/core/kv_cache_utils.py`; an adapter has its own model
name, and a template writes the tools at the beginning).

The output is text, too: `PromptChain.with_output` continues the chain, so that a conversation's next turn hits its last
answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from sidecar.apis import Api
from sidecar.tools.emulator.request import BYTES_PER_TOKEN, Body, read_text
from sidecar.tools.step_model.kv_cache import BlockHash

_HASH_BYTES = 16
_ID_MASK = 2**32 - 1  # a vocabulary has far fewer


class Piece(NamedTuple):
    """A stretch of a prompt: what stands before it without being counted, and its bytes."""

    mark: bytes
    data: bytes


class PromptChain:
    """The hashes of a prompt's full blocks, and what is needed to continue them."""

    __slots__ = ("_begun", "_block_bytes", "block_tokens", "hashes")

    def __init__(self, root: bytes, pieces: Iterable[Piece], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._block_bytes = block_tokens * BYTES_PER_TOKEN
        self._begun = Begun(root, b"")
        self.hashes: list[BlockHash] = []
        for piece in pieces:
            self._begun = _continue(self._begun, piece, self._block_bytes, self.hashes)

    def with_output(self, text: bytes) -> Sequence[BlockHash]:
        """The hashes of prompt and output together."""
        hashes = self.hashes.copy()
        _continue(self._begun, Piece(b"assistant", text), self._block_bytes, hashes)
        return hashes


class Begun(NamedTuple):
    """The block that is not full yet: the hash before it with the marks since then, and its bytes so far."""

    before: bytes
    data: bytes


def _continue(begun: Begun, piece: Piece, size: int, hashes: list[BlockHash]) -> Begun:
    """Appends the hashes of the blocks that `piece` fills, of `size` bytes each."""
    before = begun.before + b"%d:%d:" % (len(begun.data), len(piece.mark)) + piece.mark
    data = begun.data + piece.data
    full = len(data) // size * size
    for start in range(0, full, size):
        before = blake2b(before + data[start : start + size], digest_size=_HASH_BYTES).digest()
        hashes.append(before)
    return Begun(before, data[full:])


def read_chains(api: Api, body: Body, model: str, block_tokens: int) -> tuple[PromptChain, ...]:
    """One chain for each prompt of a body that `read_ask` accepted. Pooling requests have none: they hit nothing."""
    if api is Api.EMBEDDINGS:
        return ()
    extra = [model, body.get("cache_salt"), body.get("tools")]
    root = msgspec.json.encode([api is Api.COMPLETIONS, *extra])
    return tuple(PromptChain(root, pieces, block_tokens) for pieces in read_prompts(api, body))


def read_prompts(api: Api, body: Body) -> Iterator[list[Piece]]:
    """The pieces of each prompt of a body that `read_ask` accepted."""
    if api is Api.COMPLETIONS:
        yield from ([piece] for piece in _completions(body["prompt"]))
    elif api is Api.RESPONSES:
        yield [Piece(b"system", read_text(body.get("instructions"))), *_turns(body["input"])]
    else:
        yield [Piece(b"system", read_text(body.get("system"))), *_turns(body["messages"])]


def _completions(prompt: Any) -> Iterator[Piece]:
    if isinstance(prompt, str):
        yield Piece(b"text", read_text(prompt))
    elif isinstance(prompt[0], int):
        yield Piece(b"ids", array("I", [token & _ID_MASK for token in prompt]).tobytes())
    else:
        for one in prompt:
            yield from _completions(one)


def _turns(value: Any) -> Iterator[Piece]:
    """Messages and input items, each with its role; a plain string is the user's."""
    for turn in value if isinstance(value, list) else [{"role": "user", "content": value}]:
        role = turn.get("role") if isinstance(turn, Mapping) else None
        yield Piece(str(role).encode("utf-8", "surrogatepass"), read_text(turn))
