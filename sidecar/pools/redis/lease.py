"""One request in a `RedisPool`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sidecar.errors import AdmissionError, RemainingLimits
from sidecar.pools.pool import Ask, Grant
from sidecar.scheduling.rate_limit import Charge

Left = asyncio.Future["Grant | None"]


class Holder(Protocol):
    """What a lease needs of its pool."""

    def end(self, lease: RedisLease, left: Left | None, used_tokens: int | None = 0) -> None:
        """The lease, or its wait, is over. `left` is to be told how the wait had gone.

        It used `used_tokens`, None where nobody knows.
        """

    def change_size(self, lease: RedisLease, freed_tokens: int) -> None:
        """`lease.ask.tokens` is what it holds from now on, `freed_tokens` less than before."""

    def keep(self, lease: RedisLease, *, was_chosen: bool) -> None:
        """The lease is not to be preempted any more; whoever waits for it to let go waits in vain if it was chosen."""

    def requeue(self, lease: RedisLease) -> None:
        """The lease gives its room back and waits again."""


class RedisLease:
    """See `pool.Lease`. It is entering until the pool has looked at it, then waits or is held, then it is over.

    `entered_us` is the pool's clock in this process when it came, `served_before` the tokens that had been admitted of
    every tier when the pool first looked at it. `preemptions` counts how often it gave its room back and waited again.
    `charge` is what its tenant was charged without the store.
    """

    __slots__ = (
        "_answered",
        "_error",
        "_granted",
        "_is_chosen",
        "_is_kept",
        "_pool",
        "allowance",
        "ask",
        "charge",
        "entered_us",
        "grant",
        "id",
        "is_over",
        "on_preempt",
        "preemptions",
        "served_before",
    )

    def __init__(self, pool: Holder, lease_id: int, ask: Ask, entered_us: int, answered: asyncio.Future[None]) -> None:
        self.id = lease_id
        self.ask = ask
        self.entered_us = entered_us
        self.grant: Grant | None = None
        self.allowance: RemainingLimits | None = None
        self.charge: Charge | None = None
        self.on_preempt: Callable[[], None] | None = None
        self.is_over = False
        self.preemptions = 0
        self._is_chosen = self._is_kept = False
        self.served_before: Sequence[int] = ()
        self._pool = pool
        self._answered = answered
        self._granted: asyncio.Future[Grant] | None = None
        self._error: AdmissionError | None = None

    @property
    def tier(self) -> int:
        """See `Lease`."""
        return self.ask.tier

    @property
    def is_entering(self) -> bool:
        """Whether the pool has not looked at it yet."""
        return not self._answered.done()

    def wait(self) -> asyncio.Future[Grant]:
        """See `Lease.wait`."""
        if self._granted is None:
            self._granted = asyncio.get_running_loop().create_future()
            if self.grant is not None:
                self._granted.set_result(self.grant)
            elif self._error is not None:
                self._granted.set_exception(self._error)
        return self._granted

    def settle(self, used_tokens: int | None = None) -> bool:
        """See `Lease.settle`."""
        if self.grant is None or self.is_over:
            return False
        self.is_over = True
        self._pool.end(self, None, used_tokens)
        return True

    def leave(self) -> Left:
        """See `Lease.leave`."""
        left: Left = asyncio.get_running_loop().create_future()
        if self.grant is not None or self.is_over:
            left.set_result(None)
            return left
        self.is_over = True
        self._pool.end(self, left)
        return left

    def resize(self, tokens: int) -> bool:
        """See `Lease.resize`."""
        if tokens < 1:
            raise ValueError(f"a lease holds at least 1 token, not {tokens}")
        if self.grant is None or self.is_over:
            return False
        ask = self.ask
        self.ask = msgspec.structs.replace(ask, tokens=tokens)
        self._pool.change_size(self, ask.tokens - tokens)
        return True

    def keep(self) -> None:
        """See `Lease.keep`."""
        if self.grant is not None and not self.is_over and not self._is_kept:
            was_chosen, self._is_kept, self._is_chosen = self._is_chosen, True, False
            self._pool.keep(self, was_chosen=was_chosen)

    def requeue(self) -> asyncio.Future[Grant]:
        """See `Lease.requeue`."""
        if not self._is_chosen or self.is_over:
            raise RuntimeError("a lease is requeued once, after on_preempt, where it is still held and was not kept")
        self._pool.requeue(self)
        return self.wait()

    # -- called by the pool

    def abandon(self) -> None:
        """Nobody is there any more who could settle it."""
        if not self.is_over:
            self.is_over = True
            self._pool.end(self, None)

    def waits(self) -> None:
        """The pool has looked at it, and it waits."""
        if not self._answered.done():
            self._answered.set_result(None)

    def granted(self, grant: Grant) -> None:
        """It is held."""
        self.grant = grant
        self.waits()
        self._tell(lambda granted: granted.set_result(grant))

    def chosen(self, preemptions: int) -> None:
        """It is to give its room back, if this is said of its present grant: that after so many preemptions."""
        if self.grant is None or self.is_over or self._is_chosen or preemptions != self.preemptions:
            return
        if self._is_kept:
            self._pool.keep(self, was_chosen=True)  # it had not been heard of
            return
        self._is_chosen = True
        asyncio.get_running_loop().call_soon(self._preempt)

    def _preempt(self) -> None:
        if not self._is_chosen or self.is_over:
            return
        if self.on_preempt is None:
            self.keep()
        else:
            self.on_preempt()

    def waits_again(self) -> None:
        """It gave its room back."""
        self.preemptions += 1
        self.grant = self._granted = None
        self._is_chosen = False

    def refused(self, error: AdmissionError) -> None:
        """It is over: there is nobody who could admit it."""
        self.is_over = True
        if not self._answered.done():
            self._answered.set_exception(error)
            return
        self._error = error
        self._tell(lambda granted: granted.set_exception(error))

    def _tell(self, tell: Callable[[asyncio.Future[Grant]], None]) -> None:
        if self._granted is not None and not self._granted.done():
            tell(self._granted)
            self._granted.exception()  # whoever asked for it may have gone: then nobody would look at it
