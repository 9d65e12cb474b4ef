"""A request's ask of a pool, and the lease that it waits for, holds, and gives back exactly once; the pools' clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sidecar.errors import AdmissionError, QueueFull, RemainingLimits
from sidecar.events import Grant
from sidecar.policy.cost import RequestCost
from sidecar.policy.tenant import Account
from sidecar.scheduling.tickets import ScheduledLease as Held
from sidecar.scheduling.tickets import Ticket, TicketGain

if TYPE_CHECKING:
    from sidecar.pools.pool import Pool

Clock = Callable[[], int]


def monotonic_us() -> int:
    """The process's monotonic clock in whole microseconds."""
    return monotonic_ns() // 1000


_MUCH = 8
"""Requests are sized anew for an eighth more or less than before: less is no reason for another call to the store."""
MOST_REPORT_BYTES = 8 * 1024
"""Of one replica, for the others: see `Pool.share`."""


class Ask(msgspec.Struct, frozen=True, gc=False):
    """The tokens and requests that a request wants to hold until it is settled. `tier` is a level.

    The hash of `request` is equal when a client sends the same request again, and almost never for another one.
    `attempt` is the client's own count of how often it has sent it before, None where it does not say.
    It is charged to its `accounts`, to all or to none: its tenant's, and those beside it. A request over the limits of
    one falls to the level `downgrade`, or is refused where that is None.

    `most` are the tokens that the request may use in all, 0 for as many as `tokens`. The size limit of its tier and its
    tenant's limits count them; everything else counts `tokens`.

    In a pool of several engines `prompt` are the tokens of the prompt, a part of `tokens`. `hits` are tokens of it that
    engines, by their ids, are predicted to have, at most 8 pairs; `barred` are the names of engines that broke it.

    `gain` are its figures in a pool that orders by gain; None where its tier has no objectives. One that `is_deferred`
    has a deadline, and waits for as long as it may: no figure of its tier's waits counts it. `user` is its end user
    within the tenant, None where the tenant's users take no turns.

    `cost` has the weights of its tokens in limits and fair shares; None where each counts as one.
    """

    tier: int
    tenant: str
    weight: int
    tokens: int
    requests: int
    request: Hashable = 0
    attempt: int | None = None
    accounts: Sequence[Account] = ()
    downgrade: int | None = None
    prompt: int = 0
    hits: tuple[tuple[str, int], ...] = ()
    barred: tuple[str, ...] = ()
    most: int = 0
    gain: TicketGain | None = None
    is_deferred: bool = False
    cost: RequestCost | None = None
    user: str | None = None

    @property
    def charged_tokens(self) -> int:
        """The most tokens that it may use: `most`, and never less than it holds."""
        return max(self.most, self.tokens)

    @property
    def counted_tokens(self) -> int:
        """The tokens that its accounts' limits count: the most that it may use, weighted by its cost."""
        return self.charged_tokens if self.cost is None else self.cost.of(self.charged_tokens)


class TenantUse(NamedTuple):
    """How many requests of a tenant wait and run, and the tokens that those hold."""

    waiting: int
    running: int
    tokens: int


class QueueMark(NamedTuple):
    """A request's place when it began to wait: how many of its tier came before it, and how many had been admitted."""

    ahead: int
    admitted: int


class QueueStanding(NamedTuple):
    """How a waiting request stands, as far as is known: the requests before it, and the seconds it has yet to wait.

    `wait_s` is None where the queue's pace says nothing.
    """

    ahead: int
    wait_s: float | None


class WaitGivenUp(Exception):
    """The process ends before the request could be admitted."""


class StoreError(Exception):
    """The store cannot be reached, did not take something, or answered something else.

    The message is one line, without secrets.
    """


class PeerReport(NamedTuple):
    """Another replica's report of itself, and its age in seconds by the store's clock."""

    age_s: float
    report: bytes


WaitOutcome = asyncio.Future["Grant | None"]
"""How a wait ended that its caller gave up, as soon as the pool knows."""


class Lease(msgspec.Struct, eq=False):
    """One request in a pool: waiting, then held, then over. It ends once, by `settle` or by `leave`.

    `tier` is the level at which it waits and is charged: the one asked for, or a lower one where its tenant was over
    its limits. `allowance` is what was left of them when the request entered, None for a tenant without limits.

    The holder sets `on_preempt` as soon as it has the lease. The pool calls it on the event loop, at most once a grant
    and never after the end, when a more important request is to have the room. The holder aborts its request in the
    engine and then calls `requeue`; the room is not free before. A lease without `on_preempt` is never preempted.

    `size_now` says what the request would ask for now: more may be known than when it came. The pool calls it when a
    wait ends in a grant, and the lease then holds so much.

    `paid_tokens` are what its tenant is charged for in its tier's fair order: what it first asked for, and more by
    `charge_tenant`. They stay where it waits again: no tenant is charged again for that.

    `entered_us` is when it came, by the pool's clock. Where it is not `is_counted`, its tenant gets its request back.

    The rest is for its pool. In its scheduler it is `ticket`, and `held`, None while it waits. Where the pool does not
    look at a request at once, `answered` is done as soon as it has. `is_prompt`: the replica was in its pool when it
    came. `full`: it found no place in its queue, and is refused unless its tenant's limits do so.

    It has waited since `since_us`, and since `rose_us` in the tier that it rose to. `before`: the tokens of each tier
    served before it came. It is overtaken by an admission of a later `id` than `after`. `admitted_tokens`: what it was
    admitted with last.
    """

    _owner: Pool
    id: int
    ask: Ask
    entered_us: int
    ticket: Ticket
    paid_tokens: int
    _answered: asyncio.Future[None] | None = None
    grant: Grant | None = None
    allowance: RemainingLimits | None = None
    on_preempt: Callable[[], None] | None = None
    size_now: Callable[[], int] | None = None
    is_over: bool = False
    is_counted: bool = True
    held: Held | None = None
    is_prompt: bool = False
    full: QueueFull | None = None
    since_us: int = 0
    rose_us: int = 0
    before: Sequence[int] = ()
    after: int = 0
    overtaken_us: int | None = None
    admitted_tokens: int = 0
    _is_chosen: bool = False
    _is_kept: bool = False
    _future: asyncio.Future[Grant] | None = None
    _error: AdmissionError | None = None

    @property
    def tier(self) -> int:
        """The level at which the request waits and is charged."""
        return self.ask.tier

    @property
    def is_entering(self) -> bool:
        """True if the pool has not looked at the request yet."""
        return self._answered is not None and not self._answered.done()

    def wait(self) -> asyncio.Future[Grant]:
        """The grant, as soon as there is one. Cancel-safe: a caller that stops waiting calls `leave`.

        Raises StoreUnavailable where the store was lost and nothing else can admit this request.
        """
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
            if self.grant is not None:
                self._future.set_result(self.grant)
            elif self._error is not None:
                self._future.set_exception(self._error)
        return self._future

    @property
    def holding(self) -> Held:
        """Its lease in its pool's scheduler. It was admitted, and waits no more."""
        assert self.held is not None
        return self.held

    def settle(self, used_tokens: int | None = None, is_counted: bool = True) -> bool:
        """Gives the lease back. False, and nothing changes, where it is not held.

        Its accounts are charged for `used_tokens`, weighted by their cost, instead of the estimate; None: the estimate
        stands. With `is_counted` false it is no request of the tenant's either: the engine failed it.
        """
        if self.grant is None or self.is_over:
            return False
        if used_tokens is not None and self.ask.cost is not None:
            self._correct_charge(self.ask.cost, used_tokens)
        self.is_over = True
        if not is_counted:
            self.is_counted = False
        self._owner.end(self, None, used_tokens)
        return True

    def leave(self) -> WaitOutcome:
        """Stops waiting, at once. The result says how the wait had gone, as soon as the pool knows.

        None, and nothing changes, where it does not wait.
        """
        outcome: WaitOutcome = asyncio.get_running_loop().create_future()
        if self.grant is not None or self.is_over:
            outcome.set_result(None)
        else:
            self.is_over = True
            self._owner.end(self, outcome)
        return outcome

    def resize(self, tokens: int) -> bool:
        """Sets what the lease holds, at least 1 token. False, and nothing changes, where it is not held.

        Growth is never refused: while leases hold more than the pool, no request is admitted. A smaller lease lets
        others in, in a moment: see `Pool`. Where the lease waits again, it asks for as much as it held last.
        """
        if tokens < 1:
            raise ValueError(f"a lease holds at least 1 token, not {tokens}")
        if self.grant is None or self.is_over:
            return False
        if self.ask.tokens != tokens:
            self.ask = msgspec.structs.replace(self.ask, tokens=tokens)
            self._owner.change_size(self)
        return True

    def charge_tenant(self, tokens: int) -> None:
        """The lease uses so many tokens more than its tenant was charged for: its tenant's next requests come later.

        Other tenants of its tier go before them, as far as they wait. Nothing changes where the lease is not held.
        """
        if tokens > 0 and self.grant is not None and not self.is_over:
            before, cost = self.paid_tokens, self.ask.cost
            self.paid_tokens += tokens
            more = tokens if cost is None else cost.in_turns(self.paid_tokens) - cost.in_turns(before)
            self._owner.charge_tenant(self, more)

    def _correct_charge(self, cost: RequestCost, used: int) -> None:
        """Charges its tenant in fair shares for what was used, at the end. An engine may say any number."""
        most = cost.most_in_turns(max(self.paid_tokens, self.ask.charged_tokens))
        if more := min(max(1, used), most) - cost.in_turns(self.paid_tokens):
            self._owner.charge_tenant(self, more)

    def keep(self) -> None:
        """The lease is not preempted from now on, until it waits again: most often the first byte is sent.

        Nothing changes where it is not held.
        """
        if self.grant is not None and not self.is_over and not self._is_kept:
            self._is_kept, self._is_chosen = True, False
            self._owner.keep(self)

    def requeue(self) -> asyncio.Future[Grant]:
        """Gives the room back and waits again, by the original arrival. `grant` is None until the wait ends.

        Allowed once after `on_preempt`, where the lease was not kept or settled since; otherwise it raises
        RuntimeError. The wait may also end in RequestTooLarge: the pool may have shrunk.
        """
        if not self._is_chosen or self.is_over:
            raise RuntimeError("a lease is requeued once, after on_preempt, where it is still held and was not kept")
        self._owner.wait_again(self, is_overtaken=True)
        return self.wait()

    def prefilled(self) -> None:
        """The engine has prefilled the prompt: its first byte came, or its answer must be under way by now.

        Harmless when repeated, and where the lease is not held or has no engine of its own.
        """
        if self.grant is not None and self.grant.engine is not None and not self.is_over:
            self._owner.prefilled(self)

    def hand_back(self, barred: tuple[str, ...] = ()) -> asyncio.Future[Grant]:
        """Gives the room back and waits again, by the original arrival: no engine has taken the request.

        The engines named `barred` do not get it any more. Its tenant is not charged again. Allowed while the lease is
        held, also where it was kept; otherwise it raises RuntimeError. The wait may end as after `requeue`.
        """
        if self.grant is None or self.is_over:
            raise RuntimeError("a lease is handed back while it is held, and before its first byte")
        if barred:
            self.ask = msgspec.structs.replace(self.ask, barred=(*self.ask.barred, *barred))
        self._owner.wait_again(self, is_overtaken=False)
        return self.wait()

    def give_up(self) -> None:
        """Ends `wait` with WaitGivenUp, where it waits. The caller leaves then, as always."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(WaitGivenUp())
            self._future.exception()  # as in `refused`

    # -- for its pool

    def waits(self) -> None:
        """The pool has looked at the request: it is not entering any more."""
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def enters(self) -> None:
        """The pool is to look at the request, perhaps once more at another tier."""
        self._answered = asyncio.get_running_loop().create_future()

    async def looked_at(self) -> None:
        """Returns when the pool has looked at the request. Raises its refusal."""
        assert self._answered is not None
        try:
            await self._answered
        finally:
            self._answered = None  # a refusal refers to its frames, and they to this lease

    def has_grown(self) -> int:
        """Tokens that a waiting request needs now, where that is much more than a pool is about to give it; else 0.

        Many are admitted at once. Each that has grown asks again, by its arrival: together they may overfill the pool.
        """
        tokens, before = 0 if self.size_now is None else self.size_now(), self.ask.tokens
        return tokens if tokens > before + before // _MUCH else 0

    def granted(self, grant: Grant) -> bool:
        """The lease is held; once a wait. Whether it needs much less by now than it asked for."""
        self.grant, admitted_tokens = grant, self.ask.tokens
        if self.size_now is not None:
            self.resize(tokens := self.size_now())
            self.charge_tenant(tokens - self.paid_tokens)
        if self._answered is not None:
            self.waits()
        if self._future is not None and not self._future.done():
            self._future.set_result(grant)
        return self.ask.tokens < admitted_tokens - admitted_tokens // _MUCH

    def refused(self, error: AdmissionError) -> None:
        """The request is over: it will never be admitted."""
        self.is_over = True
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
            self._answered.exception()  # asyncio logs an error that no one reads, and the caller may have gone
            return
        self._error = error
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # as above

    def chosen(self) -> None:
        """The lease is to give its room back, if it is held.

        The holder is called later: it must not come back to a pool that is about to admit another request.
        """
        if self.grant is not None:
            self._is_chosen = True
            asyncio.get_running_loop().call_soon(self._preempt)

    def waits_again(self) -> None:
        """The lease gave its room back."""
        self.held = self.grant = self._future = None
        self._is_chosen = self._is_kept = False

    def _preempt(self) -> None:
        if not self._is_chosen or self.is_over:
            return
        if self.on_preempt is None:
            self.keep()
        else:
            self.on_preempt()
