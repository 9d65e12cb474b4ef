"""Text of generated tokens: always the same words, in turn."""

from __future__ import annotations

_WORDS = " the quick brown fox jumps over a lazy dog while seven engines wait for tokens and none starves in the queue"
WORDS = tuple(f" {word}".encode() for word in _WORDS.split())


def token_text(first: int, count: int) -> bytes:
    """The text of tokens `first` to `first + count - 1`, counted from 0. Needs no JSON escaping."""
    if count == 1:
        return WORDS[first % len(WORDS)]
    return b"".join(WORDS[number % len(WORDS)] for number in range(first, first + count))
