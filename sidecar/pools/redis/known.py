"""Figures that a replica goes on with when its store is lost: the safe ones of those that it was told."""

from __future__ import annotations

from sidecar.pools.redis.alone import LastKnown, last_known
from sidecar.pools.redis.protocol import Reply


class Known:
    """What the replica holds as the store has it: what ended is held there until it is said. And the store's figures.

    Room is free where the store has heard of all replicas, and has told so since this one stated what it has. Else the
    store may have given to others what was free: then this replica may go on with what it holds, no more.
    """

    def __init__(self) -> None:
        self.held_tokens = 0
        self.held_requests = 0
        self._last: Reply | None = None
        self._whole: Reply | None = None

    def hold(self, tokens: int, requests: int) -> None:
        """The replica holds so much more, or less where it is negative."""
        self.held_tokens += tokens
        self.held_requests += requests

    def state(self, tokens: int, requests: int) -> None:
        """The replica states what it holds. Whether it is heard or not, the store may go by it from now on."""
        self.held_tokens, self.held_requests = tokens, requests
        self._whole = None

    def hear(self, reply: Reply) -> None:
        """The store's latest answer."""
        self._last = reply
        self._whole = None if reply.is_on_hold or reply.unheard else reply

    def at_loss(self) -> LastKnown | None:
        """What is safe to go on with; None where the store was never reached."""
        if self._last is None:
            return None
        return last_known(self._last.expected, self._whole, self.held_tokens, self.held_requests)
