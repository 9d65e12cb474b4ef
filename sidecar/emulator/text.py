"""The filler that stands for generated text: the same words every time, one per token, ready as bytes of JSON."""

from __future__ import annotations

_WORDS = (
    " the quick brown fox jumps over a lazy dog while seven engines wait for tokens and nobody starves in the queue"
)
WORDS = tuple(f" {word}".encode() for word in _WORDS.split())


def token_text(first: int, count: int) -> bytes:
    """The text of tokens `first` to `first + count - 1`, counted from 0. Needs no JSON escaping."""
    if count == 1:
        return WORDS[first % len(WORDS)]
    return b"".join(WORDS[number % len(WORDS)] for number in range(first, first + count))
